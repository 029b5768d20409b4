"""A word on each drawn mutation that survived, by its definition and its line before and after."""

from __future__ import annotations

# Changes that nobody can see: they are not counted.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "Watchdog._watch",
        "while not self.over.wait(min(1.0, self.timeout / 4)):",
        "while not self.over.wait(min(1.0, self.timeout / 5)):",
    ): "It looks more often; the time limit is the same",
    (
        "_forward_op",
        "if not has_no_values(q) and y.numel() > 0:",
        "if not has_no_values(q) and y.numel() > 1:",
    ): "Heads have an even size, so y never has one element",
    (
        "_run_stage",
        "more_back, more_weight = (more_back, more_weight - made) if split else (more_back - made, 0)",
        "more_back, more_weight = (more_back, more_weight - made) if split else (more_back - made, 1)",
    ): "Only a split backward's `more_weight` is read",
    (
        "_tile",
        "block_h = min(8, next_power_of_2(max(q.shape[2], 1 if k is None else k.shape[2])))",
        "block_h = min(8, next_power_of_2(max(q.shape[3], 1 if k is None else k.shape[2])))",
    ): "The size of a tile, whose mask leaves out heads that are not there: it changes time alone",
    (
        "policies",
        "recompute = Recompute(kind, preserve_rng_state=False) # the layers' dropout draws from no generator of torch",
        "recompute = Recompute(kind, preserve_rng_state=True) # the layers' dropout draws from no generator of torch",
    ): "Torch's generators are saved and restored, and nothing draws from them: it changes time alone",
    (
        "_Sources.__init__",
        "super().__init__()",
        "pass",
    ): "Torch's mode makes what is missing when it is entered",
    (
        "LossCheck.call",
        "self.is_mean = abs(twice - value) <= slack * abs(value) > 0 # a sum is twice as large",
        "self.is_mean = abs(twice - value) < slack * abs(value) > 0 # a sum is twice as large",
    ): "No loss is just at the limit, which is a width of rounding",
    (
        "launch",
        "scalars = [type(s) is int and (s == 1, s % 16 == 0, -(2**31) <= s < 2**31) for s in numbers(arguments)]",
        "scalars = [type(s) is int and (s != 1, s % 16 == 0, -(2**31) <= s < 2**31) for s in numbers(arguments)]",
    ): "A part of a key: two launches differ in it as before",
    (
        "_LinearCrossEntropy.backward",
        "main.addcmul_(dweight, dtotal)",
        "main.addcmul_(dtotal, dweight)",
    ): "Both are multiplied",
    (
        "PythonGroup.__init__",
        "super().__init__(options.group_rank, options.group_size)",
        "super().__init__(options.group_size, options.group_rank)",
    ): "Nothing reads the two numbers of torch's class: the subclass overrides both functions that return them",
    (
        "draw",
        'text = "-" if ulps is None else f"{ulps:.2g}" if ulps < 1e4 else f"{ulps:.0e}"',
        'text = "-" if ulps is None else f"{ulps:.2g}" if ulps <= 1e4 else f"{ulps:.0e}"',
    ): "Both formats write 1e4 as 1e+04",
    (
        "moe_unpermute_reference",
        "index = torch.where((row >= 0) & (row < len(y)), row, len(y)).long()",
        "index = torch.where((row >= 0) & (row <= len(y)), row, len(y)).long()",
    ): "The row len(y) becomes len(y) either way",
    (
        "PeakTracker._note",
        "if where is self.made and len(where) > known:",
        "if where is self.made and len(where) >= known:",
    ): "If nothing was made, no more is held than before: the largest stays",
    (
        "ReplicaCheck.compare",
        "if names and tp.size > 1:",
        "if names and tp.size > 0:",
    ): "On one rank the largest and the least value are equal, so no replica is wrong",
    (
        "AdamW.zero_grad",
        "def zero_grad(self, set_to_none: bool = True) -> None:",
        "def zero_grad(self, set_to_none: bool = False) -> None:",
    ): "The argument is torch's, and is not read",
    (
        "_backward_op",
        "elements = 8192 if subtract_mean and D & (D - 1) == 0 else 4096",
        "elements = 8192 if subtract_mean and D & (D - 1) == 0 else 4097",
    ): "`row_tile` divides the number by a power of two and rounds down: every row size gets the same tile",
    (
        "as_int32",
        "return (word + 2**31) % 2**32 - 2**31",
        "return (word - 2**31) % 2**32 - 2**31",
    ): "The two sums differ by 2^32, so their remainders are equal",
    (
        "send_header",
        "dist.send(torch.tensor(content, dtype=torch.int64, device=device), group=pp.group, group_dst=to)",
        "dist.send(torch.tensor(content, device=device), group=pp.group, group_dst=to)",
    ): "The list holds Python integers, of which torch makes int64; the argument shows what the receiver expects",
    (
        "Checkpoints.own",
        "if self.run.workers is None and sum(map(bool, by_place)) > 1:",
        "if self.run.workers is None and sum(map(bool, by_place)) >= 1:",
    ): "The checkpoints of a single place are already in this order: only their manifests are read once more",
}

# Changes that a test could see, and none does.
NOTES: dict[tuple[str, str, str], str] = {
    (
        "_reference",
        "tokens = torch.arange(x.shape[sequence_dim], device=x.device)",
        "tokens = torch.arange(x.shape[sequence_dim])",
    ): "Only a GPU can tell: on a CPU both tensors are on one device",
    (
        "draw",
        'axes.text(middle, span.rank, label, ha="center", va="center", fontsize=7, color=ink)',
        'axes.text(middle, span.rank, label, ha="center", fontsize=7, color=ink)',
    ): "The height of a label in a picture",
    (
        "ParallelMoE.forward",
        "y = y.transpose(0, 1) if self.sequence_dim == 0 else y",
        "y = y.transpose(0, 0) if self.sequence_dim == 0 else y",
    ): "A missing test: none runs a mixture with `sequence_dim=0`",
    (
        "draw",
        'loads.axhline(1, color="gray", lw=0.5)',
        'loads.axhline(0, color="gray", lw=0.5)',
    ): "A grey line in a picture",
    (
        "draw",
        'figure, (losses, apart) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")',
        'figure, (losses, apart) = plt.subplots(2, 1, figsize=(10, 4), layout="constrained")',
    ): "Two pictures below each other instead of side by side",
    (
        "draw",
        'panels[0].set(ylabel="held-out loss, nats a byte", ylim=(None, 3))',
        "panels[0].set(ylim=(None, 3))",
    ): "The label of an axis in a picture",
}
