"""Samples a step: a constant, or a ramp. The size of a step depends on the samples before it and on nothing else.

As in Megatron's --rampup-batch-size, the size grows by INCREMENT at equal distances within the first SAMPLES. Megatron
counts its learning rate schedule in samples too, and refuses a ramp where --train-iters counts steps. Here --steps,
--warmup and the schedule count steps, with a ramp or without.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Ramp:
    """Sizes of steps.

    Attributes:
        start, final: samples of the first step, and of each step after the ramp.
        stages: how many times the size grows.
        samples: the ramp's length.
    """

    start: int
    final: int
    stages: int = 0
    samples: int = 1

    def size(self, sample: int) -> int:
        """Return the samples of the step whose first sample has this global index."""
        return self._stage_size(self._stage(sample))

    def after(self, sample: int, steps: int) -> int:
        """Return the global index of the first sample `steps` steps after the one that begins with `sample`."""
        while steps:
            stage = self._stage(sample)
            size = self._stage_size(stage)
            end = -(-(stage + 1) * self.samples // max(self.stages, 1))  # where the next stage begins
            taken = steps if stage == self.stages else min(steps, -(-(end - sample) // size))
            sample, steps = sample + taken * size, steps - taken
        return sample

    @property
    def sizes(self) -> list[int]:
        """All sizes, rising."""
        return [self._stage_size(stage) for stage in range(self.stages + 1)]

    def _stage(self, sample: int) -> int:
        return min(sample * self.stages // self.samples, self.stages)

    def _stage_size(self, stage: int) -> int:
        return self.start + (self.final - self.start) // max(self.stages, 1) * stage


def read_ramp(args: argparse.Namespace, each: int) -> Ramp:
    """Read --rampup-batch-size and --global-batch.

    Args:
        args: the flags.
        each: samples that all ranks take at once: workers x dp x micro-batch.

    Raises:
        ValueError: if there is no such ramp, with the numbers that contradict each other.
    """
    final = args.global_batch
    if args.rampup_batch_size is None:
        return Ramp(final, final)
    start, increment, samples = args.rampup_batch_size
    told = f"--rampup-batch-size {start} {increment} {samples}"
    if start >= final:
        raise ValueError(f"{told}: the start {start} is not below --global-batch {final}, where the ramp ends")
    if (final - start) % increment:
        raise ValueError(
            f"{told}: from {start} to --global-batch {final} are {final - start} samples, no multiple of the increment "
            f"{increment}"
        )
    for what, size in (("start", start), ("increment", increment)):
        if size % each:
            raise ValueError(
                f"{told}: the {what} {size} is not a multiple of workers x dp x micro-batch = {each}: "
                f"{-(-size // each) * each} is"
            )
    if args.workers > 1:
        raise ValueError(f"{told} with --workers {args.workers}: workers take steps of one size")
    if args.schedule.endswith(".csv"):
        raise ValueError(f"{told} with --schedule {args.schedule}: a file is for one number of micro-batches")
    return Ramp(start, final, (final - start) // increment, samples)
