"""Blends of corpora, and the flags of the optimizer, broken."""

from tests.mutations import Mutation

BLEND, ARGUMENTS = (f"examples/gpt/{name}.py" for name in ("blend", "arguments"))
TESTS = "tests/examples/test_blend.py"

MUTATIONS = [
    Mutation("a blend gives the same samples in every period", BLEND, "period * count + slot", "slot", TESTS),
    Mutation("a blend has one order for all periods", BLEND, "epoch=-1 - period", "epoch=-1", TESTS),
    Mutation("a blend leaves its samples in order", BLEND,
             "slot = permute(slot, PERIOD, seed=self.seed, epoch=-1 - period)", "slot = slot", TESTS),
    Mutation("shares are rounded to the smaller remainders", BLEND, "np.argsort(counts - exact",
             "np.argsort(exact - counts", TESTS),
    Mutation("what is held out is blended by sizes", BLEND, "Blend(held_out, train.counts, seed=seed)",
             "Blend(held_out, None, seed=seed)", TESTS),
    Mutation("a run goes on with other shares", BLEND, "if len(self.datasets) > 1:", "if False:", TESTS),
    Mutation("a share of nothing is a share", BLEND, "if counts.min() < 1:", "if False:", TESTS),
    Mutation("Adam's betas are always the same", ARGUMENTS, '"betas": tuple(args.betas)',
             '"betas": (0.9, 0.95)', TESTS),
    Mutation("the learning rate always falls to a tenth", ARGUMENTS, "warmup=args.warmup, lr=args.lr, **floor)",
             "warmup=args.warmup, lr=args.lr)", TESTS),
    Mutation("a corpus by another path is another corpus", BLEND, 'os.path.realpath(f"{prefix}.bin")', "prefix", TESTS),
    Mutation("a table that is looked up multiplies", "examples/gpt/model.py",
             "(0 if c.tie_embeddings else c.vocab_size)", "0",
             "tests/examples/test_pretrain.py::test_flops_of_a_token_are_those_of_its_products"),
    Mutation("a window saves no product", "examples/gpt/model.py", "min(c.window or c.seq_len, c.seq_len)", "c.seq_len",
             "tests/examples/test_pretrain.py::test_flops_of_a_token_with_a_window_are_those_of_a_sequence_as_long"),
]  # fmt: skip
