"""The process groups of a run: which rank talks to which.

`build_mesh` cuts the world into the axes tp, cp, dp, pp, ep and etp. Every layer takes the axis that it shards over.
Stands on torch.distributed alone. Open `axis.py` first: `Axis` and `Mesh` are what all other packages pass around.
"""

from mpcore.mesh.agreement import check_same, raise_together, raising_together
from mpcore.mesh.axis import Axis, Mesh, check_axis, check_mesh
from mpcore.mesh.build import build_mesh, choose_device
from mpcore.mesh.layout import divisors, layout_table, mesh_ranks, mesh_shape
from mpcore.mesh.rendezvous import is_launched

__all__ = [
    "Axis", "Mesh", "build_mesh", "check_axis", "check_mesh", "check_same", "choose_device", "divisors",
    "is_launched", "layout_table", "mesh_ranks", "mesh_shape", "raise_together", "raising_together",
]  # fmt: skip
