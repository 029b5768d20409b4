"""Declare which part of its logical tensor each rank's local tensor holds.

A layer makes one declaration (`Sharding`) for each of its parameters. Initialization, gradient reduction, gradient
norms, state dicts and checkpoints read the declarations; no code looks at a parameter's name. The package uses `mesh`
and `collectives`. Read `declare.py` first.
"""

from mpcore.sharding.declarations import (
    add_partial,
    declarations,
    named_modules,
    owners,
    persistent_buffers,
    sharding_of,
    shardings,
)
from mpcore.sharding.declare import Shard, Sharding, cut, cut_blocks
from mpcore.sharding.local import is_dtensor, local_tensor, reshard
from mpcore.sharding.state_dict import full_state_dict, full_tensor, load_full_state_dict

__all__ = [
    "Shard", "Sharding", "add_partial", "cut", "cut_blocks", "declarations", "full_state_dict", "full_tensor",
    "is_dtensor", "load_full_state_dict", "local_tensor", "named_modules", "owners", "persistent_buffers", "reshard",
    "sharding_of", "shardings",
]  # fmt: skip
