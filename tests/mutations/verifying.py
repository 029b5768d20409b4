"""What verify compares, and of what it may not accuse a right model, broken."""

from tests.mutations import Mutation

RUN, JUDGE = "mpcore/verify/run.py", "mpcore/verify/judge.py"
NAMED = "tests/test_verify.py::test_a_fault_beside_the_first_output_of_training_is_named"
RIGHT = "tests/test_verify.py::test_numbers_complex_buffers_and_layers_used_twice_are_no_fault"
PLANTED = "tests/test_verify.py::test_a_planted_fault_is_named"

MUTATIONS = [
    Mutation("complex buffers lose their imaginary part", RUN,
             "x.to(complex_dtype if x.is_complex() else task.dtype if", "x.to(task.dtype if x.is_complex() or", NAMED),
    Mutation("the first tensor of an output alone is compared", JUDGE,
             "for name, want in truth.items():\n            own = self._own(which, name)",
             "for name, want in list(truth.items())[:1]:\n            own = self._own(which, name)",
             NAMED),
    Mutation("integers that are returned aren't compared", JUDGE,
             "if got.numel() == 0 or (exact and self.dtype != torch.float64):", "if got.numel() == 0 or exact:", NAMED),
    Mutation("buffers are compared before the step", RUN,
             "for name, _, _, buffer in persistent_buffers(model)}",
             "for name, _, _, buffer in persistent_buffers(build_model(task, mesh, layout))}", NAMED),
    Mutation("the second forward is in training", RUN, "    model.eval()\n", "", NAMED),
    Mutation("what the second forward returns is the first's", RUN,
             "seen.evaluated = _leaves(output) if returned", "seen.evaluated = seen.output if returned", NAMED),
    Mutation("a module's last calls stand for those of each micro-batch", RUN,
             "        forwards.append({})\n", "        forwards.append(forwards[-1] if forwards else {})\n", NAMED),
    Mutation("of a module's calls the first alone is kept", RUN,
             "call = next(i for i in itertools.count() if (name, i) not in forwards[-1])", "call = 0", NAMED),
    Mutation("a rank that has no gradient passes", JUDGE,
             "elif len(there) < len(held) and tensor.any():", "elif False:", NAMED),
    Mutation("numbers of parts of the batch are compared with the whole's", JUDGE,
             "if is_cut and name != main", "if False and name != main", RIGHT),
    Mutation("infinite buffers depart from themselves", JUDGE, ".masked_fill_(got == want, 0)", "", RIGHT),
    Mutation("numbers of micro-batches are joined", RUN, "if key in alike and ts[0].dim()}", "if key in alike}", RIGHT),
    Mutation("14 a table under another name is frozen there alone", JUDGE,
             "unknown = [name for name in extra if name not in self.truth.initial]", "unknown = []", PLANTED),
    Mutation("nobody says that something casts to float32", JUDGE,
             "OF_FLOAT32[0] < first.ulps < OF_FLOAT32[1]", "False", PLANTED),
]  # fmt: skip
