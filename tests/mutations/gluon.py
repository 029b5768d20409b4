"""The forward pass for Hopper in Gluon, broken, and the machine in Python that runs it, blinded."""

from tests.mutations import Mutation

FILE, TESTS = "kernels/_attention_gluon.py", "tests/kernels/test_attention_gluon.py"
MACHINE, FAULTS = "tests/kernels/hopper_simulator.py", "tests/kernels/test_hopper_simulator.py"

MUTATIONS = [
    Mutation("gluon: products begin before their keys are there", FILE,
             "        mbarrier.wait(k_full.index(stage), parity)\n"
             "        if TURNS:\n            mbarrier.wait(turns.index(WHICH), (now",
             "        if TURNS:\n            mbarrier.wait(turns.index(WHICH), (now", TESTS),
    Mutation("gluon: keys are given back while products read them", FILE,
             "        scores = warpgroup_mma_wait(1, deps=[scores])\n"
             "        mbarrier.arrive(k_empty.index(stage), count=1)",
             "        mbarrier.arrive(k_empty.index(stage), count=1)\n"
             "        scores = warpgroup_mma_wait(1, deps=[scores])", TESTS),
    Mutation("gluon: turns are told apart by the wrong parity", FILE,
             "(now + WHICH + 1) & 1", "(now + WHICH) & 1", TESTS),
    Mutation("gluon: each tile begins with the first buffer", FILE,
             "stage, parity = done % STAGES, done // STAGES & 1", "stage, parity = 0, 0", TESTS),
    Mutation("gluon: one consumer gives the queries back", FILE,
             "mbarrier.init(q_empty, count=2)", "mbarrier.init(q_empty, count=1)", TESTS),
    Mutation("gluon: no fence before the output is copied", FILE,
             "            fence_async_shared()\n            tma", "            tma", TESTS),
    Mutation("gluon: an output is written over the one before", FILE,
             "            tma.store_wait(0)  # for the output of the tile before\n", "", TESTS),
    Mutation("gluon: the output before is not shrunk", FILE,
             "        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT_LAYOUT))[:, None]\n", "", TESTS),
    Mutation("gluon: keys before the first are seen", FILE,
             "first = gl.maximum(outer + (right - 1) * BLOCK_N, 0)", "first = outer + (right - 1) * BLOCK_N", TESTS),
    Mutation("gluon: hidden keys of the left are seen", FILE,
             "gl.maximum(right, within), blocks", "blocks, blocks", TESTS),
    Mutation("gluon: a group reads the keys of another", FILE, "group = head // GROUP", "group = head % GROUP", TESTS),
    Mutation("gluon: the exponentials wait for the product", FILE,
             "        mbarrier.wait(v_full.index(stage_before), parity_before)\n        acc, p_next",
             "        acc, p_next", TESTS),
    Mutation("gluon: odd starts are given to the copy engine", FILE, " or x.data_ptr() % 16", "", TESTS),
    Mutation("gluon: rounds in reverse are off by one", FILE,
             "programs - 1 - program)", "programs - program)", TESTS),
    Mutation("gluon: a launch forgets the dtype of what is copied", "kernels/_launch.py",
             "d if d is None else (d.base.dtype, *d.block_shape)", "d if d is None else (*d.block_shape,)",
             "tests/kernels/test_launch.py"),
    Mutation("the simulated machine lets anybody read", MACHINE,
             "        if not me.knows(self.name, self.copies):\n            raise MachineError(f\"{said} and",
             "        if False:\n            raise MachineError(f\"{said} and", FAULTS),
    Mutation("the simulated machine lets anybody write", MACHINE,
             "            if not me.knows(who, time):", "            if False:", FAULTS),
    Mutation("the simulated machine forgets who still reads", MACHINE,
             "        if self.unfinished:", "        if False:", FAULTS),
    Mutation("the simulated machine has products at once", MACHINE,
             "d.value if isinstance(d, Pending) and d not in me.products else d",
             "d.value if isinstance(d, Pending) else d", FAULTS),
    Mutation("the simulated machine fences all by itself", MACHINE,
             "if self.stored is not None and not self.fenced:", "if False:", FAULTS),
    Mutation("the simulated machine passes on what nobody said", MACHINE,
             "            join(me.clock, held.clock)",
             "            join(me.clock, {s.name: s.copies for s in self.slots} | held.clock)", FAULTS),
    Mutation("the simulated machine counts no bytes", MACHINE,
             "if nbytes * (len(held.coming) + 1) > held.bytes:", "if False:", FAULTS),
]  # fmt: skip
