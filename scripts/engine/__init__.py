"""Parts of bench_engine.py: workloads, roofs, what is measured, where a step's time goes, tables and pictures."""
