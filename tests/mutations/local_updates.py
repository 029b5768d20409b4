"""Workers that merge, broken."""

from tests.mutations import Mutation

TESTS = "tests/test_local_updates.py"
EXAMPLE = "tests/examples/test_local_updates.py"
FILE = "mpcore/local_updates.py"
PRETRAIN = "examples/gpt/pretrain.py"

MUTATIONS = [
    Mutation("workers are summed, not averaged", FILE, "(total / size).to", "total.to", TESTS),
    Mutation("the first worker is left out", FILE, "in all_to_all_rows(flat, axis):",
             "in all_to_all_rows(flat, axis)[1:]:",
             TESTS),
    Mutation("the order of a sum depends on its place", FILE, """            for row in all_to_all_rows(flat, axis):
                total += row
""", """            total = all_reduce(flat.reshape(-1), axis).view(size, -1)[axis.rank].to(wide)
""", TESTS),
    Mutation("biases of routers aren't averaged", FILE, "if not p.requires_grad and self._frag",
             "if False and self._frag",
             TESTS),
    Mutation("a parameter that was never used is saved", FILE, "if not inner and any(self.inner.values()):",
             "if False:",
             TESTS),
    Mutation("histories that differ are put together", FILE, "        self._begin()\n        self._compare({",
             "        self._begin()\n        ({", TESTS),
    Mutation("the outer momentum forgets", FILE, ".mul_(self.momentum).add_(gradient)", ".copy_(gradient)", TESTS),
    Mutation("the outer step doesn't look ahead", FILE, "if self.nesterov else momentum",
             "if False else momentum", TESTS),
    Mutation("the outer step looks ahead unasked", FILE, "if self.nesterov else momentum",
             "if True else momentum", TESTS),
    Mutation("the outer learning rate is 1", FILE, "sub_(gradient, alpha=self.lr)", "sub_(gradient)", TESTS),
    Mutation("parameters go on without the merge", FILE, "held.copy_(local_tensor(state[_ANCHOR]))", "pass", TESTS),
    Mutation("a merge comes a step late", FILE, "(step - first) % self.every == 0]",
             "(step - 1 - first) % self.every == 0]", TESTS),
    Mutation("all fragments are merged at the end", FILE, "(i + 1) * self.every // self.fragments",
             "self.every", TESTS),
    Mutation("fragments are of blocks in a row", FILE, "int(number.group()) % self.fragments",
             "min(int(number.group()) // 2, self.fragments - 1)", TESTS),
    Mutation("34 masters don't hear of the merge", FILE, '.get("master", p)', '.get("none", p)', TESTS),
    Mutation("34 what rounding cut off counts as moved", FILE, "anchor.to(now.dtype).to(anchor.dtype) - now",
             "anchor - now", TESTS),
    Mutation("34 masters on the host are mixed with shards", FILE,
             'return local_tensor(self.optimizer.state.get(p, {}).get("master", p).detach())',
             'return self.optimizer.state.get(p, {}).get("master", p).detach()', TESTS),
    Mutation("what is frozen moves the places of the others", FILE,
             "places = list(self._grouped())", "places = list(self._parameters())", TESTS),
    Mutation("buffers aren't averaged", FILE, "found += [buffer] if self",
             "found += [] if self", TESTS),
    Mutation("workers may begin apart", FILE, "if value != row[0]]", "if False]", TESTS),
    Mutation("NaN is merged", FILE, "if not good:", "if False:", TESTS),
    Mutation("anchors are taken anew at each step", FILE, "if _ANCHOR not in state:", "if True:", TESTS),
    Mutation("a checkpoint's anchors are lost", FILE, "            self.outer[p] = ours", "            pass", TESTS),
    Mutation("workers share the first one's groups", "mpcore/mesh.py", "[[start + rank for rank in group] for start",
             "[[rank for rank in group] for start", TESTS),
    Mutation("a save waits for the other workers", "mpcore/checkpoint/saving.py",
             "else mesh.saves.group or dist.new_group",
             "else dist.new_group", EXAMPLE),
    Mutation("workers don't hear that one stops", PRETRAIN, "self.meet(stop) if self.before_merge(done) else stop",
             "stop",
             EXAMPLE),
    Mutation("workers train on the same samples", PRETRAIN, "self.mesh.workers.rank * count, count",
             "0, count", EXAMPLE),
    Mutation("a worker goes on from its newest checkpoint", PRETRAIN, "if merges[path] == most]", "if True]", EXAMPLE),
    Mutation("a damaged checkpoint is passed over by its worker alone", PRETRAIN,
             'all_reduce(failed, self.mesh.workers, "max")', "failed", EXAMPLE),
    Mutation("a skipped step skips its merge", PRETRAIN, "merged = self.merge(step + 1)",
             'merged = self.merge(step + 1) if math.isfinite(entry["grad_norm"]) else None', EXAMPLE),
]  # fmt: skip
