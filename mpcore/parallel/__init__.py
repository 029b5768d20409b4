"""Data parallelism (ZeRO), recomputation, offload, precision and local updates.

Open `data.py` first.
"""

from mpcore.parallel.data import shard_data_parallel
from mpcore.parallel.offload import offload_activations, offload_optimizer, offload_parameters
from mpcore.parallel.precision import autocast, convert_to_fp8
from mpcore.parallel.recompute import recompute
from mpcore.parallel.sync import finish_gradients, gathered, set_gradient_sync

__all__ = [
    "autocast", "convert_to_fp8", "finish_gradients", "gathered", "offload_activations", "offload_optimizer",
    "offload_parameters", "recompute", "set_gradient_sync", "shard_data_parallel",
]  # fmt: skip
