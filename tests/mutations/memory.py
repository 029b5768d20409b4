"""Recomputation, ledger, memory estimate and offload, broken."""

from tests.mutations import Mutation

RECOMPUTE = "tests/test_recompute.py"
LEDGER = "tests/test_ledger.py"
MEMORY = "tests/test_memory.py"
OFFLOAD = "tests/test_offload.py"

MUTATIONS = [
    Mutation("22 recomputation counts as a call", "mpcore/layers/module.py",
             "return torch._C._current_graph_task_id() != -1", "return False", RECOMPUTE),
    Mutation("22 the generator isn't restored", "mpcore/recompute.py",
             "preserve_rng_state=preserve_rng_state, **options", "preserve_rng_state=False, **options", RECOMPUTE),
    Mutation("22 a second recomputation goes on where the first ended", "mpcore/recompute.py",
             "        self.next = 0  # split backward recomputes twice\n", "", RECOMPUTE),
    Mutation("22 products written to are kept", "mpcore/recompute.py",
             "if result is not None and not makes & self.written:", "if result is not None:", RECOMPUTE),
    Mutation("23 keyword tensors get no gradient", "mpcore/recompute.py",
             "forward = partial(type(block).forward, block, **kwargs)",
             "forward = partial(type(block).forward, block, **tree_map_only(Tensor, Tensor.detach, kwargs))",
             RECOMPUTE),
    Mutation("selective keeps what nothing needs", "mpcore/recompute.py",
             "values.append(result if makes & needed else tree_map_only(Tensor, _shell, result))",
             "values.append(result)", RECOMPUTE),
    Mutation("selective repeats collectives", "mpcore/recompute.py",
             'return func.overloadpacket in _PRODUCTS or func.namespace == "_c10d_functional"',
             "return func.overloadpacket in _PRODUCTS", RECOMPUTE),
    Mutation("the ledger counts what an all-gather takes", "mpcore/ledger/counts.py",
             "max(sizes, default=0))", "min(sizes, default=0))", LEDGER),
    Mutation("the plan forgets the micro-batches of the middle", "mpcore/dry_run.py",
             "with found.ledger.times(times), found.ledger:", "with found.ledger.times(1), found.ledger:", LEDGER),
    Mutation("the estimate frees activations at I", "mpcore/dry_run.py",
             'if action.kind in ("B", "W"):', 'if action.kind in ("B", "I"):', MEMORY),
    Mutation("the estimate frees at I what W needs", "mpcore/dry_run.py",
             "held += kept.between - kept.activations", "held -= kept.activations", MEMORY),
    Mutation("the plan runs backward whole where it is split", "mpcore/dry_run.py",
             "                if split:\n", "                if False:\n", MEMORY),
    Mutation("what a rank hands itself is held twice", "mpcore/dry_run.py",
             "            held -= kept.handed  # ", "            # ", MEMORY),
    Mutation("22 a block is recomputed in the mode of now", "mpcore/recompute.py",
             "switched = [module for module, training in modes if module.training != training]",
             "switched = []", RECOMPUTE),
    Mutation("a DTensor counts whole", "mpcore/storages.py",
             "yield local_tensor(leaf)", "yield leaf", MEMORY),
    Mutation("the offloaded step forgets main gradients", "mpcore/offload.py",
             "if gradient_of(p) is None:", "if p.grad is None:", OFFLOAD),
    Mutation("the offloaded step doesn't see what a checkpoint wrote", "mpcore/offload.py",
             "if self.seen.get(p) != (mine.data_ptr(), mine._version):", "if p not in self.seen:", OFFLOAD),
    Mutation("42 a saved storage is copied once, whatever is written to it", "mpcore/offload.py",
             " or held.version != x._version:", ":", OFFLOAD),
    Mutation("parameters stay", "mpcore/offload.py",
             "while len(self.used) > self.keep:", "while False:", OFFLOAD),
]  # fmt: skip
