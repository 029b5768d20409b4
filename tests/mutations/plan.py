"""The search for a layout, broken."""

from tests.mutations import Mutation

PLAN = "tests/test_plan.py"

MUTATIONS = [
    Mutation(
        "attention's products on a CPU aren't counted",
        "mpcore/dry_run.py",
        "_ON_CPU.get(func.overloadpacket) or ",
        "",
        PLAN,
    ),
    Mutation(
        "the forward's products count in backward too",
        "mpcore/dry_run.py",
        "kept.forward_flops, flops.count = flops.count, 0",
        "kept.forward_flops = flops.count",
        PLAN,
    ),
    Mutation(
        "what a stage sends is all that was sent",
        "mpcore/dry_run.py",
        "size - before_stage.get(axis, 0)",
        "size + before_stage.get(axis, 0)",
        "tests/test_plan.py",
    ),
    Mutation(
        "a ring sends all of the volume", "mpcore/plan.py", "volume * (1 - 1 / max(len(ranks), 1))", "volume", PLAN
    ),
    Mutation(
        "every group is in one node", "mpcore/plan.py", "len({rank // self.node for rank in ranks}) <= 1", "True", PLAN
    ),
    Mutation(
        "one micro-batch is the step", "mpcore/plan.py", "return found.plan.micro_batches * (kept", "return (kept", PLAN
    ),
    Mutation(
        "the first pipeline rank stands for all",
        "mpcore/plan.py",
        'for pp in range(sizes["pp"]):',
        "for pp in range(1):",
        PLAN,
    ),
    Mutation(
        "gradients' sums are waited for in each micro-batch",
        "mpcore/plan.py",
        'INSIDE = ("tp", "cp", "cp_outer", "cp_inner", "ep", "etp")',
        'INSIDE = ("tp", "cp", "ep", "etp", "dp", "data")',
        PLAN,
    ),
    Mutation("messages between stages take no time", "mpcore/plan.py", "message=message, stages", "stages", PLAN),
    Mutation(
        "the bubble is left out",
        "mpcore/plan.py",
        "return self.compute + self.inside + self.bubble + self.data",
        "return self.compute + self.inside + self.data",
        PLAN,
    ),
    Mutation(
        "the slowest comes first", "mpcore/plan.py", "key=lambda e: (round(e.step", "key=lambda e: (round(-e.step", PLAN
    ),
    Mutation("tp leaves the node", "mpcore/plan.py", "[n for n in divisors if n <= machine.node]", "divisors", PLAN),
]
