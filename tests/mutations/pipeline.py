"""Pipelines, broken."""

from tests.mutations import Mutation

PRODUCTS = "tests/pipeline/test_engine.py::test_split_backward_takes_the_products_of_whole_backward"
SPLIT = "tests/pipeline/test_engine.py::test_pitfall_14_24_26_30_every_schedule_gives_the_dense_gradients"
MAIN = "tests/pipeline/test_engine.py::test_pitfall_32_deferred_weight_gradients_are_summed_in_float32"
PROVE = "tests/pipeline/test_prove.py"
PARTITION = "tests/pipeline/test_partition.py"
SCHEDULES = "tests/pipeline/test_schedules.py"

MUTATIONS = [
    Mutation("a split product runs whole, twice", "mpcore/pipeline/engine.py",
             "module.split_backward = plan.splits_backward", "module.split_backward = False", PRODUCTS),
    Mutation("a split product doesn't sum its input's gradient", "mpcore/layers/products.py",
             "return F.linear(collectives.copy(x, tp), ", "return F.linear(x, ", SPLIT),
    Mutation("35 a swapped pair of messages is proved", "mpcore/pipeline/prove.py",
             "if _other_end(send) != receive:", "if False:", PROVE),
    Mutation("an action that is there twice is proved", "mpcore/pipeline/prove.py",
             "            if action in where:", "            if False:", PROVE),
    Mutation("a missing action is proved", "mpcore/pipeline/prove.py",
             'raise ValueError(f"{Action(missing, stage, micro_batch)} is missing")', "return", PROVE),
    Mutation("a backward doesn't wait for the stage behind", "mpcore/pipeline/prove.py",
             "        if stage < schedule.stages - 1:", "        if False:", PROVE),
    Mutation("a gradient is sent before it is there", "mpcore/pipeline/prove.py",
             'yield Action("F", stage, m) if kind == "SEND_F" else _backward(schedule, stage, m)',
             'yield Action("F", stage, m)', PROVE),
    Mutation("the head costs nothing", "mpcore/pipeline/partition.py", " + (last if i == n - 1 else 0)", "", PARTITION),
    Mutation("a V is laid as a loop", "mpcore/pipeline/partition.py",
             'if style == "v" and i % 2 else there', "if False else there", SCHEDULES),
    Mutation("1F1B warms up for one too many", "mpcore/pipeline/schedules.py",
             '"1f1b": min(P - 1 - rank, M)', '"1f1b": min(P - rank, M)', SCHEDULES),
    Mutation("half of an overlapped pair is not read", "mpcore/pipeline/schedules.py",
             'overlapped[1].split(";") if', 'overlapped[1].split(";")[:1] if', SCHEDULES),
]  # fmt: skip
