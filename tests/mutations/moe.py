"""The mixture of experts, broken."""

from tests.mutations import Mutation

MOE = "tests/layers/test_moe.py"
EXAMPLE = "tests/examples/test_moe.py"
MESH = "tests/test_mesh.py"
KERNELS = "tests/kernels/test_moe.py"
ROUTER = "mpcore/layers/router.py"

MUTATIONS = [
    Mutation("11 router's gradient isn't summed over tp", ROUTER,
             "init or uniform(bound), partial=(tp,), **like)", "init or uniform(bound), **like)", MOE),
    Mutation("22 recomputed tokens are counted again", ROUTER,
             "if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:", "if True:", MOE),
    Mutation("26 the dry run of a pipeline counts tokens", "mpcore/pipeline/engine.py",
             "        module.eval()\n", "", EXAMPLE),
    Mutation("27 fractions of this rank's tokens alone", ROUTER,
             "counts = all_reduce(all_reduce(counts, self.tp), self.cp)", "counts = counts * 1", MOE),
    Mutation("27 padding counts in the balance loss", ROUTER,
             "(loss * scale[places.sequence]).masked_fill(~real, 0).sum()",
             "(loss * scale[places.sequence]).sum()", MOE),
    Mutation("27 the balance loss ignores the loss scale", ROUTER,
             "(loss * scale[places.sequence])", "(loss / len(loss))", MOE),
    Mutation("27 evaluation counts", ROUTER,
             "if not (self.training and torch.is_grad_enabled()):", "if not torch.is_grad_enabled():", MOE),
    Mutation("28 experts are summed over data", "mpcore/sharding.py",
             "return mesh.edp if self._is_expert(mesh) else mesh.data", "return mesh.data", MOE),
    Mutation("29 ties go to the higher expert", ROUTER,
             "scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]",
             "scores.shape[-1] - 1 - scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :k]",
             MOE),
    Mutation("29 capacity by the order in memory", ROUTER,
             "places.length + position[:, None]", "places.length + 0 * position[:, None]", MOE),
    Mutation("30 the norm leaves out experts on tp ranks", "mpcore/sharding.py",
             "over = self.partial if self._is_expert(mesh) else (mesh.tp, *self.partial)",
             "over = (mesh.tp, *self.partial)", MOE),
    Mutation("33 a rank without tokens sends nothing", "mpcore/layers/moe.py",
             "        y = self._through_experts(tokens, routing, places)\n",
             "        y = self._through_experts(tokens, routing, places) if bool(places.real.any()) else tokens * 0\n",
             MOE),
    Mutation("weights of experts aren't normalised", ROUTER,
             "        if self.normalize:\n", "        if False:\n", MOE),
    Mutation("tokens of a second choice come first", "kernels/moe_permute.py",
             "flat = experts.reshape(-1).long()", "flat = experts.flip(1).reshape(-1).long()", KERNELS),
    Mutation("ep ranks are numbered before etp ranks", "mpcore/mesh.py",
             "expert = grid.view(pp, -1, ep, etp)", "expert = grid.view(pp, -1, etp, ep).transpose(2, 3)", MESH),
]  # fmt: skip
