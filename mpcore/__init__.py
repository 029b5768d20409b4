"""mpcore: Megatron-style model-parallel layers in pure PyTorch and Triton, proven equal to the unsharded model."""

from mpcore.gradients import clip_gradients, grad_norm, reduce_gradients
from mpcore.initialize import materialize
from mpcore.layers import *  # noqa: F403
from mpcore.layers import __all__ as _layers
from mpcore.mesh import Axis, Mesh, build_mesh
from mpcore.parallelize import parallelize
from mpcore.sharding import full_state_dict, load_full_state_dict, shardings

__version__ = "0.1.0"
__all__ = [
    "Axis",
    "Mesh",
    "build_mesh",
    "clip_gradients",
    "full_state_dict",
    "grad_norm",
    "load_full_state_dict",
    "materialize",
    "parallelize",
    "reduce_gradients",
    "shardings",
    *_layers,
]
