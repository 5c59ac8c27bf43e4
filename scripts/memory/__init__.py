"""What `scripts/bench_memory.py` is made of: replays through the memory manager, and through what it replaces."""
