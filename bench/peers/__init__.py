"""Ours beside the libraries that do the same: `python -m bench.peers`."""
