"""A GPT step with kernels on and off: the same losses and gradients."""

import sys

import laws
import pytest
import torch

from examples.gpt.config import GPTConfig
from examples.gpt.model import GPT
from mpcore import VocabParallelCrossEntropy
from mpcore.kernels import _dispatch
from mpcore.layers import materialize

CONFIGS = {
    "llama": GPTConfig(
        vocab_size=37, seq_len=12, layers=2, d_model=24, heads=3, kv_heads=1, d_ff=20, activation="swiglu", dropout=0.2
    ),
    "gpt2": GPTConfig(
        vocab_size=37, seq_len=12, layers=2, d_model=24, heads=3, activation="gelu", norm="layer",
        positions="learned", bias=True, tie_embeddings=True, dropout=0.2,
    ),
    "primer": GPTConfig(vocab_size=37, seq_len=12, layers=1, d_model=24, heads=2, activation="relu_squared"),
}  # fmt: skip
KERNELS = {
    "llama": {"_norm", "activation", "rope", "dropout_add", "cross_entropy"},
    "gpt2": {"_norm", "dropout_add", "cross_entropy"},
    "primer": {"_norm", "activation", "rope", "cross_entropy"},
}


def kernels(monkeypatch, on):
    """Let `impl=None` take the kernels on every device, or on none; returns the set of files whose kernels then run."""
    seen = set()

    def runs(impl, x, operator, **sizes):
        return on and impl != "reference" and x.dtype in _dispatch.KERNEL_DTYPES

    for name, module in list(sys.modules.items()):
        if name.startswith(("mpcore.kernels.", "mpcore.layers.loss")) and hasattr(module, "runs_triton"):
            if module is _dispatch:
                continue
            kernel = name.rpartition(".")[2].replace("loss", "cross_entropy")  # it asks for the kernels itself
            monkeypatch.setattr(module, "runs_triton", lambda *a, of=kernel, **k: seen.add(of) or runs(*a, **k))
    return seen


def train(config, steps=3):
    """Losses of some steps of plain descent, and the last gradients."""
    model = materialize(GPT(config, device="meta"), 5, torch.get_default_device())
    criterion = VocabParallelCrossEntropy(config.vocab_size)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for step in range(steps):
        ids = laws.drawn(torch.randint, 0, config.vocab_size, (2, config.seq_len + 1), generator=generator)
        loss = criterion(model(ids[:, :-1], samples=torch.arange(2) + 2 * step), ids[:, 1:])
        model.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
    return torch.stack(losses), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_gpt_step_is_the_same_with_kernels_on_and_off(kind, monkeypatch):
    with monkeypatch.context() as patch:
        kernels(patch, on=False)
        losses, gradients = train(CONFIGS[kind])
    with monkeypatch.context() as patch:
        seen = kernels(patch, on=True)
        kernel_losses, kernel_gradients = train(CONFIGS[kind])
    assert KERNELS[kind] <= seen
    torch.testing.assert_close(kernel_losses, losses, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        error, scale = (kernel_gradients[name] - gradient).abs().max(), gradient.abs().max()
        assert error <= 1e-5 * scale, name
