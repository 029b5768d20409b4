"""Models of others made parallel by a plan, broken."""

from tests.mutations import Mutation

TESTS, FILE = "tests/test_parallelize.py", "mpcore/parallelize.py"

MUTATIONS = [
    Mutation("a scalar between column and row is left alone", FILE,
             "if not head and p.numel() != 1:", "if not head:", TESTS),
    Mutation("a product with each head is left alone", FILE,
             "head = p.shape[-1:] == (head_dim,)", "head = p.shape == (head_dim,)", TESTS),
    Mutation("what a config's plan leaves out stays out", FILE,
             "base = {**_LEFT_OUT.get(kind, {}), **base}", "base = {**base}", TESTS),
    Mutation("11 gradients of norms of sharded heads aren't summed", FILE,
             "                add_partial(target, leaf, tp)", "                pass", TESTS),
    Mutation("a fused projection is cut across its blocks", FILE,
             "return cut_blocks(self.blocks, self.tp, 0, (unit,) * len(self.blocks))",
             "return cut_blocks((sum(self.blocks),), self.tp, 0, (unit,))", TESTS),
    Mutation("a turned weight is cut along the other dimension", FILE, "Shard(s.axis, 1 - s.dim, s.runs)", "s", TESTS),
    Mutation("rows of other ranks are looked up here", FILE,
             "rows.masked_fill(elsewhere.unsqueeze(-1), 0)", "rows", TESTS),
    Mutation("the other end of a tie stays whole", FILE,
             'if id(module) not in named and leaf == "weight":', "if False:", TESTS),
    Mutation("a tied weight is cut twice, into two", FILE,
             "shards.setdefault(id(full), _shard(full, layer.shardings[leaf]))", "_shard(full, layer.shardings[leaf])",
             TESTS),
    Mutation("a frozen weight trains again", FILE, ", requires_grad=full.requires_grad)", ")", TESTS),
    Mutation("a rule with stars wins over a name", FILE, 'key=lambda pattern: pattern.count("*"))',
             'key=lambda pattern: -pattern.count("*"))', TESTS),
    Mutation("heads are torn apart", FILE, "unit = style.unit or head_dim or 1", "unit = style.unit or 1", TESTS),
    Mutation("a whole input isn't cut for a row", FILE,
             "input_is_parallel=not style.split_input", "input_is_parallel=True", TESTS),
]  # fmt: skip
