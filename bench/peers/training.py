"""Rows of training steps: one process, tensor parallel, data parallel and pipelines."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mpcore as mp
from bench.examples.bench_gpt_step import BATCH, CONFIG, PlainGPT, hugging_face
from bench.peers.measure import Row, Step
from examples.gpt.model import GPT
from mpcore.pipeline import Pipeline

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "fused": True}
STACK = replace(CONFIG, d_model=512, heads=8, seq_len=32)
MICRO_BATCHES, WIDTH = 32, 16


def batch(vocab: int, length: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and their targets, [BATCH, length]."""
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (BATCH, length + 1), generator=draws)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def step_of(
    parameters: Iterable[nn.Parameter], loss: Callable[[], Tensor], make: Callable[..., Any] = torch.optim.AdamW,
    between: Callable[[], object] = lambda: None, zero: Callable[[], None] | None = None, scale: int = 1,
) -> Step:  # fmt: skip
    """A bare training loop's step: forward, backward, `between`, AdamW; returns the loss times `scale`."""
    optimizer = make(parameters, **ADAMW)

    def step() -> Tensor:
        value = loss()
        value.backward()
        between()
        optimizer.step()
        (zero or optimizer.zero_grad)()
        return value.detach() * scale

    return step


# --- one process ------------------------------------------------------------------------------------------------------


def plain_gpt() -> PlainGPT:
    """The reference, whose weights all others take."""
    torch.manual_seed(0)
    return PlainGPT(CONFIG)


def bare_loop() -> Step:
    """As nanoGPT trains: plain torch, clipped."""
    model, (x, target) = plain_gpt(), batch(CONFIG.vocab_size, CONFIG.seq_len)
    return step_of(
        model.parameters(), lambda: F.cross_entropy(model(x).flatten(0, 1), target.flatten()),
        between=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    )  # fmt: skip


def prepared() -> Step:
    """The example's GPT by `prepare`, which also skips steps that aren't finite."""
    model, (x, target) = GPT(CONFIG), batch(CONFIG.vocab_size, CONFIG.seq_len)
    model.load_state_dict(plain_gpt().state_dict())
    run = mp.prepare(
        model, mp.build_mesh(device_type="cpu"), blocks=list(model.blocks.values()), initialize=False,
        loss=partial(mp.vocab_parallel_cross_entropy, reduction="sum"),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), **ADAMW),
    )  # fmt: skip

    def step() -> Tensor:
        loss = run.forward_backward(x, target)
        run.clip_gradients(1.0)
        run.optimizer_step()
        return loss

    return step


def layers_alone() -> Step:
    """The example's GPT in a bare loop."""
    model, (x, target) = GPT(CONFIG), batch(CONFIG.vocab_size, CONFIG.seq_len)
    model.load_state_dict(plain_gpt().state_dict())
    return step_of(model.parameters(), lambda: mp.vocab_parallel_cross_entropy(model(x), target))


def transformers_gpt2() -> Step:
    """Hugging Face's GPT-2."""
    model, (x, target) = hugging_face(CONFIG, plain_gpt().state_dict()), batch(CONFIG.vocab_size, CONFIG.seq_len)
    return step_of(model.parameters(), lambda: model(input_ids=x, labels=target, shift_labels=target).loss)


# --- tensor parallel --------------------------------------------------------------------------------------------------


def llama() -> Any:
    """Hugging Face's Llama of the same sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    c = CONFIG
    sizes: dict[str, Any] = {
        "hidden_size": c.d_model,
        "intermediate_size": 4 * c.d_model,
        "num_hidden_layers": c.layers,
    }
    heads: dict[str, Any] = {"num_attention_heads": c.heads, "num_key_value_heads": c.heads}
    return LlamaForCausalLM(LlamaConfig(vocab_size=c.vocab_size, **sizes, **heads)).train()


def llama_step(model: Any, after: Callable[[], object] = lambda: None) -> Step:
    """Forward and backward; returns the loss."""
    x, target = batch(CONFIG.vocab_size, CONFIG.seq_len)

    def step() -> Tensor:
        loss = model(input_ids=x, labels=target, shift_labels=target).loss
        loss.backward()
        after()
        model.zero_grad()
        return loss.detach()

    return step


def mpcore_llama() -> Step:
    """By `parallelize` and the plan that the model carries."""
    model = mp.parallelize(llama(), "auto", mp.build_mesh(tp=2, device_type="cpu").tp)
    return llama_step(model, lambda: mp.gradients.reduce_gradients(model))


def dtensor_llama() -> Step:
    """By DTensor and the same plan."""
    model, mesh = llama(), mp.build_mesh(tp=2, device_type="cpu").device_mesh
    assert mesh is not None
    columns, rows = ColwiseParallel(), RowwiseParallel()
    of: dict[ParallelStyle, tuple[str, ...]] = {
        columns: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    }
    of |= {rows: ("self_attn.o_proj", "mlp.down_proj")}
    plan: dict[str, ParallelStyle] = {name: style for style, names in of.items() for name in names}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], plan)
    return llama_step(model)


def tp_plan_llama() -> Step:
    """By transformers' `tp_plan="auto"`, which reads the launcher's variables."""
    from transformers import LlamaForCausalLM

    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    with tempfile.TemporaryDirectory() as mine:
        folder = [mine]
        dist.broadcast_object_list(folder)
        if rank == 0:
            llama().save_pretrained(mine)
        dist.barrier()
        model = LlamaForCausalLM.from_pretrained(folder[0], tp_plan="auto", dtype=torch.float32).train()
        dist.barrier()
    return llama_step(model)


# --- data parallel ----------------------------------------------------------------------------------------------------


def stack() -> tuple[PlainGPT, Callable[..., Tensor]]:
    """A GPT of 14 million parameters and its loss on this rank's few tokens: most of a step is moving parameters."""
    torch.manual_seed(0)
    model, (x, target) = PlainGPT(STACK), batch(STACK.vocab_size, STACK.seq_len, seed=dist.get_rank())

    def loss(module: nn.Module, divisor: int = 1) -> Tensor:
        return F.cross_entropy(module(x).flatten(0, 1), target.flatten()) / divisor

    return model, loss


def mpcore_data(zero: int) -> Step:
    """`shard_data_parallel`, whose gradients are sums."""
    model, loss = stack()
    mesh = mp.build_mesh(device_type="cpu")
    mp.parallel.shard_data_parallel(model, mesh, model.blocks, zero=zero)

    def announced() -> Tensor:
        mp.parallel.set_gradient_sync(model, last=True)  # this backward sums
        return loss(model, mesh.data.size)

    def optimizer(parameters: Iterable[nn.Parameter], fused: bool, **options: Any) -> mp.AdamW:
        return mp.AdamW(model, groups=[{"params": list(parameters)}], **options)

    return step_of(
        model.parameters(), announced, optimizer, between=lambda: mp.gradients.reduce_gradients(model),
        scale=mesh.data.size,
    )  # fmt: skip


def ddp(make: Callable[..., Any] = torch.optim.AdamW) -> Step:
    """DDP, whose gradients are means; with another optimizer, ZeRO-1."""
    model, loss = stack()
    module = DistributedDataParallel(model)
    return step_of(model.parameters(), lambda: loss(module), make)


def zero_redundancy() -> Step:
    """DDP and its sharded optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns of torch.jit

    return ddp(partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW))


def fsdp2(reshard: bool) -> Step:
    """`fully_shard` of each block and the model."""
    model, loss = stack()
    mesh = mp.build_mesh(device_type="cpu").device_mesh
    assert mesh is not None
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshard)
    return step_of(model.parameters(), lambda: loss(model))


# --- pipelines --------------------------------------------------------------------------------------------------------


def summed(y: Tensor, target: Tensor) -> Tensor:
    """A sum, whose backward is as short as it can be."""
    return (y * target).sum()


def mpcore_pipeline() -> Step:
    """Our executor."""
    torch.manual_seed(0)
    mesh, x = mp.build_mesh(pp=2, device_type="cpu"), torch.ones(2 * MICRO_BATCHES, WIDTH)
    stage = [nn.Linear(WIDTH, WIDTH) for _ in range(2)][mesh.pp.rank]
    pipeline = Pipeline(stage, mesh, MICRO_BATCHES, summed, "1f1b")
    return lambda: pipeline.forward_backward(x, x)


def torch_pipeline() -> Step:
    """torch's runtime; the loss of the last stage is summed over ranks, as ours is."""
    torch.manual_seed(0)
    mesh, x = mp.build_mesh(pp=2, device_type="cpu"), torch.ones(2 * MICRO_BATCHES, WIDTH)
    rank, group = mesh.pp.rank, mesh.pp.group
    module = [nn.Linear(WIDTH, WIDTH) for _ in range(2)][rank]
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=summed, scale_grads=False)

    def step() -> Tensor:
        losses: list[Tensor] = []
        schedule.step(*([x] if rank == 0 else []), **({"target": x, "losses": losses} if rank else {}),
                      return_outputs=False)  # fmt: skip
        total = torch.stack(losses).detach().sum(dtype=torch.float64) if rank else torch.zeros((), dtype=torch.float64)
        dist.all_reduce(total, group=group)
        return total

    return step


SAME_MODEL = "both sides run the same model of transformers and the same products"
SAME_SHARDS = "both sides run torch's `fully_shard`, which packs gradients for a message and copies what it gathered"
EARLY_RECEIVES = (
    "gloo's own threads. In a separate run they took, on both ranks, 12.6 of mpcore's 33.8 ms and 8.6 of the peer's "
    "32.8 ms (the scheduler's times by thread, 2026-11-25). mpcore posts a receive before it needs the "
    "message, which wakes these threads more often. When mpcore posted each receive as late as the peer does, the "
    "ratio was 1.22. But gloo sends nothing before the receive is posted: with 300 ms of other work to overlap, a "
    "message of 64 MiB cost 128 ms of waiting with the late receive, and 0.03 ms with the early one. So mpcore "
    "keeps the early receive"
)
ROWS = [
    Row("training step of a GPT", "a bare loop of torch.nn", prepared, bare_loop,
        why="the run computes the gradient norm in float64, to skip a step whose norm isn't finite: 52 norms and their "
        "copies"),
    Row("the GPT of mpcore's layers in a bare loop", "transformers GPT-2", layers_alone, transformers_gpt2, 1.2,
        needs="transformers", why="products and attention, the same on both sides, took 50 of the 74 ms of the peer's "
        "step (torch's profiler, 2026-11-25)"),
    Row("Llama on tp 2", "DTensor", mpcore_llama, dtensor_llama, 1.2, ranks=2, needs="transformers", why=SAME_MODEL),
    Row("Llama on tp 2", "transformers tp_plan", mpcore_llama, tp_plan_llama, 1.2, ranks=2, needs="accelerate",
        why=SAME_MODEL),
    Row("ZeRO-0 on dp 2", "DDP", partial(mpcore_data, 0), ddp, 1.0, ranks=2, memory=True,
        why="nothing beyond the spread: both sides compute the same products, and sum the same bytes by all-reduces"),
    Row("ZeRO-1 on dp 2", "ZeroRedundancyOptimizer", partial(mpcore_data, 1), zero_redundancy, 1.0, ranks=2,
        memory=True, why="mpcore's ZeRO-1 calls torch's `fully_shard`, which copies more than the peer. After "
        "backward it frees the gathered parameters, so each of their pages causes a page fault in the next step"),
    Row("ZeRO-2 on dp 2", "FSDP2", partial(mpcore_data, 2), partial(fsdp2, False), 1.0, ranks=2, memory=True,
        why=SAME_SHARDS),
    Row("ZeRO-3 on dp 2", "FSDP2", partial(mpcore_data, 3), partial(fsdp2, True), 1.0, ranks=2, memory=True,
        why=SAME_SHARDS),
    Row("1F1B on pp 2, 32 tiny micro-batches", "torch pipelining", mpcore_pipeline, torch_pipeline, 1.2, ranks=2,
        turn_s=0.15, longer=2.5, why=EARLY_RECEIVES),
]  # fmt: skip
