"""Parts of `cuda_aot.py`."""
