"""Data parallelism (ZeRO), recomputation, offload, precision and local updates.

Open `data.py` first.
"""

from mpcore.parallel.data import shard_data_parallel
from mpcore.parallel.offload import offload_activations, offload_optimizer, offload_parameters
from mpcore.parallel.precision import autocast, convert_to_fp8
from mpcore.parallel.recompute import recompute
from mpcore.parallel.sync import finish_gradients, gathered, sync_gradients

__all__ = [
    "autocast", "convert_to_fp8", "finish_gradients", "gathered", "offload_activations",
    "offload_optimizer", "offload_parameters", "recompute", "shard_data_parallel", "sync_gradients",
]  # fmt: skip
