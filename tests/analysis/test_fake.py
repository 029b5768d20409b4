"""The short cuts of fake tensors and of equal micro-batches, against torch's own mode and every micro-batch run."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from examples.gpt.plan import build
from mpcore._torch import fake
from mpcore._torch.fake import NoValueError, fake_tensors
from mpcore.kernels.rms_norm import rms_norm
from mpcore.parallel.shared import DataParallel
from mpcore.tools.analysis.dry_run import dry_run
from tests.quick import some

SMALL = ["--layers", "2", "--d-model", "16", "--heads", "2", "--d-ff", "16", "--seq-len", "16"]
SMALL += ["--micro-batch", "1", "--global-batch", "16"]


def forms(mode: FakeTensorMode) -> list[tuple]:
    """Run operators twice, and describe what they return, and which tensors before share its storage."""
    found: list[tuple] = []
    made: list[torch.Tensor] = []

    def see(*outs: Any) -> None:
        for x in outs:
            assert isinstance(x, torch.Tensor)
            storage = x.untyped_storage()
            shared = tuple(i for i, y in enumerate(made) if y.untyped_storage()._cdata == storage._cdata)
            found.append((tuple(x.shape), x.stride(), x.dtype, x.device, x.storage_offset(), storage.nbytes(), shared))
            made.append(x)

    with mode:
        for _ in range(2):
            x, w = torch.empty(4, 6), torch.empty(6, 8, dtype=torch.float32, requires_grad=True)
            see(x, w, x @ w, x.t(), x.t() @ x, x[1:3], x.view(2, 12), x.double(), x + 1, x + x.t().sum(), x * 2.0)
            see(*x.split(2), *torch.unbind(x), *x.max(0), x.transpose(0, 1).contiguous(), x.expand(3, 4, 6), x.sum())
            see(x.t() + 1, torch.empty(6, 4) + 1, torch.empty(4, 6, device="cuda") + 1)  # strides and devices
            torch.set_default_dtype(torch.float64)
            see(torch.arange(5) / 2)
            torch.set_default_dtype(torch.float32)
            see(torch.arange(5) / 2)
            see(x.add_(1), torch.zeros_like(x.t()), torch.cat([x, x]), torch.full((2,), 3), x.detach(), x.bfloat16())
            see(
                torch.tensor([1.0, 2.0]) + 1,
                x.clone(memory_format=torch.preserve_format),
                torch.arange(5),
                x.new_empty(0),
            )
            y = rms_norm(x, torch.empty(6, requires_grad=True))
            y = y[0] if isinstance(y, tuple) else y
            see(y, *torch.autograd.grad((y @ w).sum(), w))
            with pytest.raises(NoValueError):
                x.sum().item()
    return found


@pytest.mark.parametrize("gpu", [False, True])
def test_operators_return_what_they_return_in_torchs_mode(gpu):
    plain = FakeTensorMode(allow_non_fake_inputs=True)
    plain.stands_for_gpu = gpu  # type: ignore[attr-defined]
    expected = forms(plain)
    assert forms(fake_tensors(gpu)) == expected
    assert forms(fake_tensors(gpu)) == expected, "from the cache alone"


@pytest.mark.parametrize(("flags", "sizes"), some(
    ("--zero 1 --recompute selective --dropout 0.1", {"tp": 2, "pp": 2, "dp": 2}),
    ("--zero 2 --preset tiny-moe --set moe.d_ff=8 --set moe.dispatch=all_to_all --set moe.capacity_factor=1 "
     "--recompute full --dtype bfloat16", {"dp": 2, "ep": 2}), of=[("--zero 3 --set replicate=2", {"dp": 4}),
     ("--zero 3 --sequence-parallel --dtype bfloat16", {"tp": 2, "dp": 2})],
))  # fmt: skip
def test_a_step_counts_as_in_torchs_mode_and_with_every_micro_batch_run(flags, sizes):
    arguments = [*SMALL, *flags.split()]
    found = dry_run(build, arguments, 0, True, **sizes)
    always = mock.patch.object(DataParallel, "last_differs", True)
    with mock.patch.object(fake, "_Fake", FakeTensorMode), always:
        expected = dry_run(build, arguments, 0, True, **sizes)
    assert (found.held, found.stages, found.most, found.peak) == (
        expected.held, expected.stages, expected.most, expected.peak,
    )  # fmt: skip
    assert found.ledger.counts == expected.ledger.counts
