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
]  # fmt: skip
