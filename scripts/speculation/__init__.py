"""What `scripts/bench_speculation.py` is made of."""
