"""Pipelines, broken."""

from tests.mutations import Mutation

PRODUCTS = "tests/pipeline/test_engine.py::test_split_backward_takes_the_products_of_whole_backward"
SPLIT = "tests/pipeline/test_engine.py::test_pitfall_14_24_26_30_every_schedule_gives_the_dense_gradients"

MUTATIONS = [
    Mutation("a split product runs whole, twice", "mpcore/pipeline/engine.py",
             "module.split_backward = self.plan.splits_backward", "module.split_backward = False", PRODUCTS),
    Mutation("a split product doesn't sum its input's gradient", "mpcore/layers/linear.py",
             "return F.linear(collectives.copy(x, tp), weight, bias)", "return F.linear(x, weight, bias)", SPLIT),
]  # fmt: skip
