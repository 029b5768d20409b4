"""Everything about a machine with one GPU, step by step: `python -m bench.gpu_hour`."""
