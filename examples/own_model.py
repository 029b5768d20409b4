"""Train a transformer of your own on any mesh, and see the same losses on each.

`python -m examples.own_model` runs in one process; `torchrun --nproc-per-node 4 -m examples.own_model --tp 2 --zero 3`
runs on tp 2 x dp 2.
"""

import argparse

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import trange

import mpcore as mp

V, D, H, LAYERS, T = 256, 64, 4, 2, 64  # vocabulary (bytes), width, heads, blocks, tokens a sample
SAMPLES, MICRO_BATCHES = 8, 2  # a step
TEXT = " ".join(f"{n} times {n} is {n * n}." for n in range(200))  # what the model learns


class Block(nn.Module):
    """Attention and MLP side by side under one norm: x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, tp: mp.Axis) -> None:
        super().__init__()
        self.norm = mp.LayerNorm(D)  # was nn.LayerNorm(D)
        self.qkv = mp.QKVParallelLinear(D, H, H, D // H, tp=tp)  # was nn.Linear(D, 3 * D)
        self.up = mp.ColumnParallelLinear(D, 4 * D, tp=tp)  # was nn.Linear(D, 4 * D)
        self.mix = mp.RowParallelLinear(D, D, tp=tp, unit=D // H)  # was nn.Linear(D, D); sharded between heads
        self.down = mp.RowParallelLinear(4 * D, D, tp=tp)  # was nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]; in between H/tp heads and 4D/tp features."""
        h = self.norm(x)
        q, k, v = (rearrange(part, "b t (h k) -> b h t k", k=D // H) for part in self.qkv(h).chunk(3, dim=-1))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mix(rearrange(heads, "b h t k -> b t (h k)")) + self.down(F.gelu(self.up(h)))


class Transformer(nn.Module):
    """Bytes in, this rank's columns of the logits out."""

    def __init__(self, tp: mp.Axis) -> None:
        super().__init__()
        self.embedding = mp.VocabParallelEmbedding(V, D, tp=tp)  # was nn.Embedding(V, D)
        self.position = nn.Embedding(T, D)  # modules that you don't swap are replicated
        self.blocks = nn.ModuleList(Block(tp) for _ in range(LAYERS))
        self.norm = mp.LayerNorm(D)
        self.head = mp.ColumnParallelLinear(D, V, bias=False, tp=tp)  # was nn.Linear(D, V, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, V/tp]."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def samples(step: int, share: range) -> Tensor:
    """Return the samples of a step whose indices are in `share`: [.., T + 1] bytes of the text."""
    text = torch.tensor(list(TEXT.encode()))
    first = torch.randint(len(text) - T, (SAMPLES, 1), generator=torch.Generator().manual_seed(step))
    return text[first + torch.arange(T + 1)][share.start : share.stop]


def train(tp: int = 1, zero: int = 0, steps: int = 30) -> list[float]:
    """Train, and return the loss before each step: the same on every mesh."""
    mesh = mp.build_mesh(tp=tp)  # dp is what tp leaves of the world
    with torch.device("meta"):  # `prepare` draws the parameters, by seed and name: the same on every mesh
        model = Transformer(mesh.tp)

    def loss(logits: Tensor, target: Tensor) -> Tensor:  # a sum; the run divides it once, by the step's tokens
        return mp.vocab_parallel_cross_entropy(logits, target, tp=mesh.tp, vocab_size=V, reduction="sum")

    run = mp.prepare(
        model, mesh, blocks=model.blocks, data=mp.Zero(zero), micro_batches=MICRO_BATCHES, loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),  # called once the model is sharded
    )  # fmt: skip
    losses = []
    for step in (bar := trange(steps, disable=mesh.job.rank != 0)):  # rank 0 of the whole job shows it
        batch = samples(step, run.share(SAMPLES)).to(mesh.device)
        run.forward_backward(batch[:, :-1], batch[:, 1:])
        run.clip_gradients(1.0)  # by the norm of the whole model
        losses.append(run.optimizer_step().loss)
        bar.set_postfix(loss=f"{losses[-1]:.4f}")
    if mesh.job.rank == 0:
        print(f"loss {losses[0]:.5f} -> {losses[-1]:.5f}")
    return losses  # run.save(folder) writes a checkpoint; run.load(latest(folder, mesh)) resumes on any mesh


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--zero", type=int, default=0, choices=range(4), help="stage of ZeRO over the data ranks")
    parser.add_argument("--steps", type=int, default=30)
    train(**vars(parser.parse_args()))
