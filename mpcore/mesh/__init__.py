"""Build the process groups of a run: they say which ranks communicate with each other.

`build_mesh` arranges the ranks along the axes tp, cp, dp, pp, ep and etp. Every layer accepts the axis that it shards
over. The package uses only torch.distributed. Read `axis.py` first: all other packages pass `Axis` and `Mesh` around.
"""

from mpcore.mesh.agreement import check_same, raise_together, raising_together
from mpcore.mesh.axis import Axis, Mesh, check_axis, check_mesh
from mpcore.mesh.build import build_mesh, choose_device
from mpcore.mesh.launch import Launch, read_launch
from mpcore.mesh.layout import divisors, layout_table, mesh_ranks, mesh_shape

__all__ = [
    "Axis", "Launch", "Mesh", "build_mesh", "check_axis", "check_mesh", "check_same", "choose_device", "divisors",
    "layout_table", "mesh_ranks", "mesh_shape", "raise_together", "raising_together", "read_launch",
]  # fmt: skip
