"""FP8, gradients in float32, recomputation, counts of FLOPs, non-finite losses, and flags."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import mpcore as mp
from examples.gpt.arguments import parse
from examples.gpt.config import PRESETS
from examples.gpt.model import count_parameters, flops_of_token
from mpcore.kernels.quantize_fp8 import dequantize_fp8, quantize_fp8
from mpcore.layers.linear import ParallelLinear
from mpcore.layers.linear_fp8 import Fp8Product
from tests.peers.sources import states

USE, STEPS = "precision, recomputation, flags", "optimizers"

# --- precision -----------------------------------------------------------------------------------------------------


@states(
    USE,
    "nanotron",
    "fp8/test_tensor.py: test_quantize_and_dequantize_tensor_in_fp8",
    table={f"size {n}": n for n in (4, 8, 16, 64)},
)
def test_fp8_keeps_values_to_a_sixteenth(size):
    x = torch.randn(size, size)
    found, _ = quantize_fp8(x)
    assert found is not None
    assert (found.values.dtype, found.values.shape) == (torch.float8_e4m3fn, x.shape)
    back = dequantize_fp8(found)
    assert back.dtype == torch.float32
    assert not torch.equal(back, x)
    largest = x.abs().amax(1, keepdim=True)
    assert bool(((back - x).abs() <= x.abs() / 16 + largest * 2.0**-13).all())


def in_fp8(layers: nn.ModuleList) -> nn.ModuleList:
    mp.parallel.convert_to_fp8(layers)
    return layers


@states(
    USE,
    "nanotron",
    "fp8/test_linear.py",
    table={
        "test_fp8_linear_forward_pass, with a bias": True,
        "test_fp8_linear_forward_pass, without": False,
        "test_fp8_linear_backward_pass": True,
    },
)
def test_an_fp8_linear_is_near_the_exact_one(bias):
    """16 x 16, to 0.1, and its gradients to 0.1 and a tenth."""
    layer = mp.ColumnParallelLinear(16, 16, bias=bias)
    exact = nn.Linear(16, 16, bias=bias)
    exact.load_state_dict(layer.state_dict())
    in_fp8(nn.ModuleList([layer]))
    x = torch.randn(16, 16)
    y, want = layer(x), exact(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, want, rtol=0, atol=0.1)
    y.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(layer.weight.grad, exact.weight.grad, rtol=0.1, atol=0.1)


@states(USE, "nanotron", "fp8/test_linear.py", "test_fp8_linear_attrs", "test_fp8_model_bwd")
def test_every_parameter_of_an_fp8_model_learns():
    """Five layers of 128 and three steps."""
    layers = in_fp8(nn.ModuleList(mp.ColumnParallelLinear(128, 128) for _ in range(5)))
    assert all(p.requires_grad for p in layers.parameters())
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)
    before = [p.detach().clone() for p in layers.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.ones(128, 128)
        for layer in layers:
            x = F.relu(layer(x))
        x.sum().backward()
        optimizer.step()
    assert all(p.grad is not None for p in layers.parameters())
    assert any(not torch.equal(p, old) for p, old in zip(layers.parameters(), before, strict=True))


@states(
    USE,
    "torchtitan",
    "test_quantization.py",
    table={"test_no_float8_by_default": False, "test_nvfp4_converter_targets_layers_not_lm_head": True},
)
def test_the_blocks_alone_are_converted(convert):
    blocks = nn.ModuleList(mp.ParallelMLP(16, 16) for _ in range(6))
    model = nn.ModuleDict({"blocks": blocks, "head": mp.ColumnParallelLinear(16, 32)})
    if convert:
        mp.parallel.convert_to_fp8(blocks)
    modes = {name: m.product == Fp8Product() for name, m in model.named_modules() if isinstance(m, ParallelLinear)}
    assert modes.pop("head") is False
    assert len(modes) == 12
    assert set(modes.values()) == {convert}


@states(
    USE,
    "nanotron",
    "test_parameters_accumulate_gradient_in_fp32.py",
    table={
        "test_gradient_promoting_in_fp32": (1, False),
        "test_gradient_accumulated_in_fp32": (5, False),
        "test_optimizer_can_step_gradient_in_fp32": (5, True),
    },
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_half_precision_accumulate_in_float32(batches, step, dtype):
    """The sum of the half-precision gradients of each backward, in float32."""
    layer = nn.Linear(10, 4, bias=False, dtype=dtype)
    mp.gradients.main_gradients(layer)
    weight, want = layer.weight, torch.zeros(4, 10)
    for _ in range(batches):
        x = torch.randn(3, 10, dtype=dtype)
        layer(x).sum().backward()
        want += x.detach().float().sum(0).expand(4, 10)
    mp.gradients.reduce_gradients(layer)
    found: Tensor = weight.main_grad  # type: ignore[attr-defined]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, want, rtol=2.0**-7, atol=2.0**-6)
    if step:
        before = weight.detach().float().clone()
        mp.AdamW(layer, lr=0.1, weight_decay=0.0, eps=1e-30).step()
        torch.testing.assert_close(weight.float(), before - 0.1 * found.sign(), rtol=2.0**-7, atol=1e-3)


@states(STEPS, "nanotron", "test_data_parallel.py", "test_ddp_with_afab")
@states(STEPS, "nanotron", "test_parameters_accumulate_gradient_in_fp32.py", "test_ddp_with_grad_accum_in_fp32")
def test_gradients_are_equal_on_all_data_ranks_after_they_are_reduced():
    """And are those of the whole batch."""
    x = torch.randn(4, 10)

    def gradient(on: mp.Mesh) -> Tensor:
        layer = nn.Linear(10, 4, bias=False)
        with torch.no_grad():
            layer.weight.fill_(0.5)
        for part in x.chunk(on.dp.size)[on.dp.rank].split(1):
            layer(part).square().sum().backward()
        mp.gradients.reduce_gradients(layer, on)
        return layer.weight.grad.clone()  # type: ignore[union-attr]

    whole, (first, second) = gradient(mp.Mesh()), mp.simulate(gradient, dp=2)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole)


# --- recomputation -------------------------------------------------------------------------------------------------


class Three(nn.Module):
    """torchtitan's toy: a gate, a query projection, and an output of twice the width."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.wq = (mp.ColumnParallelLinear(64, 64, bias=False) for _ in range(2))
        self.output = mp.ColumnParallelLinear(64, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.wq(self.gate(x))).sum()


@states(
    USE,
    "torchtitan",
    "test_activation_checkpoint.py: TestApplyAC",
    table={"test_flops, nothing recomputed": ("none", 8.0), "test_correctness": ("full", None)},
)
def test_backward_of_three_products_takes_eight(kind, products):
    """In units of a 64 x 64 x 64 product: 4 forward and 8 backward. A convention: selective keeps all three."""
    plain, block, x = Three(), Three(), torch.randn(64, 64, requires_grad=True)
    block.load_state_dict(plain.state_dict())
    mp.parallel.recompute([block], kind)
    y = block(x)
    with FlopCounterMode(display=False) as counter:
        y.backward()
    if products is not None:
        assert counter.get_total_flops() / (2 * 64**3) == products
    found = [x.grad, *(p.grad for p in block.parameters())]
    x.grad = None
    plain(x).backward()
    for a, b in zip(found, [x.grad, *(p.grad for p in plain.parameters())], strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]


def test_selective_recomputation_repeats_no_product():
    """A convention: torchtitan's repeats every second one, and its full recomputation the last one too."""
    counts = {}
    for kind in ("selective", "full"):
        block, x = Three(), torch.randn(64, 64, requires_grad=True)
        mp.parallel.recompute([block], kind)
        y = block(x)
        with FlopCounterMode(display=False) as counter:
            y.backward()
        counts[kind] = counter.get_total_flops() / (2 * 64**3)
    assert counts == {"selective": 8.0, "full": 10.0}


class Several(nn.Module):
    """A block whose forward takes and returns what the rows say."""

    def __init__(self, returns: int) -> None:
        super().__init__()
        self.inner, self.returns = nn.Linear(8, 8), returns

    def forward(self, x: Tensor, other: Any = None, *, label: Any = "") -> Any:
        y = self.inner(x).tanh() + (other if isinstance(other, Tensor) else 0.0)
        return (y, y * 2, other if label == "" else label)[: self.returns] if self.returns > 1 else y


@states(
    USE,
    "DeepSpeed",
    "runtime/activation_checkpointing/test_activation_checkpointing.py: TestActivationCheckpoint",
    table={
        "test_ckpt_inputs1_outputs1": (1, (), {}),
        "test_ckpt_inputs2_outputs1": (1, (torch.ones(8),), {}),
        "test_ckpt_inputs2_outputs2": (2, (torch.ones(8),), {}),
        "test_ckpt_inputs2_outputs3": (3, (torch.ones(8),), {}),
        "test_ckpt_arg_none": (2, (None,), {}),
        "test_ckpt_non_tensor_input": (1, (3,), {}),
        "test_ckpt_non_tensor_output": (3, (None,), {"label": (2, "two")}),
    },
)
def test_recomputation_changes_no_output_and_no_gradient(returns, others, named):
    plain, block = Several(returns), Several(returns)
    block.load_state_dict(plain.state_dict())
    mp.parallel.recompute([block], "full")
    x, found = torch.randn(4, 8), []
    for each in (plain, block):
        inner = x.clone().requires_grad_()
        y = each(inner, *others, **named)
        outputs = y if isinstance(y, tuple) else (y,)
        sum(out.square().sum() for out in outputs if isinstance(out, Tensor) and out.requires_grad).backward()
        found.append([*outputs, inner.grad, each.inner.weight.grad])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@states(USE, "nanotron", "test_checkpointing.py", "test_activation_checkpointing")
def test_a_recomputed_block_repeats_its_dropout():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.dropout = nn.Linear(10, 10), nn.Linear(10, 10), mp.Dropout(0.1)

        def forward(self, x: Tensor, samples: Tensor) -> Tensor:
            return self.dropout(self.second(self.first(x)), samples)

    plain, block = Block(), Block()
    block.load_state_dict(plain.state_dict())
    mp.parallel.recompute([block], "full")
    x, found = torch.randn(2, 5, 10), []
    for each in (plain, block):
        mp.layers.seed_dropout(each, 0)
        y = each(x, torch.arange(2))
        y.square().sum().backward()
        found.append([y, *(p.grad for p in each.parameters())])
    assert bool((found[0][0] == 0).any())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# --- counts and losses ---------------------------------------------------------------------------------------------


def test_flops_of_attention_count_what_the_causal_mask_hides():
    """A convention: for 4 layers of 512 and 1,024 tokens Megatron counts 6 x 4 x 512 x 1,024 a token, half as many."""
    config = replace(PRESETS["gpt2"], layers=4, d_model=512, heads=8, kv_heads=8, d_ff=2048, positions="rope")
    short, long = (flops_of_token(replace(config, seq_len=length)) for length in (1024, 2048))
    assert long - short == 2 * 6 * 4 * 512 * 1024


@states(USE, "torchtitan", "test_weight_tying.py", "test_tied_parameter_count_matches_unique_parameters")
def test_a_tied_table_is_counted_once():
    tied, loose = (
        replace(
            PRESETS["gpt2"], vocab_size=100, layers=1, d_model=12, heads=4, kv_heads=4, d_ff=48, tie_embeddings=each
        )
        for each in (True, False)
    )
    assert count_parameters(loose) - count_parameters(tied) == 100 * 12


def run_of(loss: float) -> mp.Run:
    """A run whose loss is the given one."""
    model = nn.Sequential(nn.Linear(2, 2))
    return mp.prepare(
        model, mp.Mesh(), blocks=model, initialize=False, data=mp.Zero(0),
        loss=lambda y, target: y.sum() * 0 + loss * target.numel(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    )  # fmt: skip


@states(USE, "torchtitan", "test_invalid_loss.py", "test_finite_loss_does_not_raise")
def test_a_finite_loss_is_the_mean_of_the_tokens_and_takes_the_step():
    run = run_of(1.5)
    run.forward_backward(torch.ones(2, 2), torch.zeros(2, dtype=torch.long))
    found = run.optimizer_step()
    assert (found.loss, found.taken) == (1.5, True)


def test_a_loss_that_is_not_finite_skips_the_step():
    """A convention: torchtitan raises an error."""
    run = run_of(float("nan"))
    run.forward_backward(torch.ones(2, 2), torch.zeros(2, dtype=torch.long))
    assert run.optimizer_step().taken is False


# --- flags ---------------------------------------------------------------------------------------------------------


@states(USE, "torchtitan", "test_config_manager.py", "test_model_config_args_equals_form")
@states(USE, "Megatron-LM", "test_argument_utils.py", "test_argument_types")
def test_flags_have_types_and_may_have_an_equals_sign():
    args = parse(["--tp=2", "--lr", "0.5", "--data", "0.7", "web", "0.3", "code"])
    assert (args.tp, args.lr, args.data) == (2, 0.5, ["0.7", "web", "0.3", "code"])


@states(
    USE,
    "Megatron-LM",
    "test_argument_utils.py",
    table={
        "test_literal_fields_reject_invalid_choices": (["--optimizer", "sgd"], "'sgd' is none of adamw"),
        "test_literal_fields_have_choices": (["--optimizer", "adamw_bf16"], "did you mean adamw-bf16"),
    },
)
def test_a_choice_that_does_not_exist_is_refused(argv, words, capsys):
    with pytest.raises(SystemExit):
        parse(argv)
    assert words in capsys.readouterr().err


@states(USE, "Megatron-LM", "test_argument_utils.py", "test_default_values_preserved", "test_boolean_store_true")
def test_flags_left_out_have_their_defaults():
    args = parse([])
    assert (args.tp, args.pp, args.sequence_parallel) == (1, 1, False)
    assert parse(["--sequence-parallel"]).sequence_parallel is True


@states(
    USE,
    "torchtitan",
    "test_config_manager.py",
    table={"test_cli_overrides": (["--steps", "5"], 5), "test_model_config_args": ([], 10)},
)
def test_the_command_line_overrides_the_file(argv, steps, tmp_path):
    (tmp_path / "run.toml").write_text("[training]\nsteps = 10\n")
    assert parse(["--config", str(tmp_path / "run.toml"), *argv]).steps == steps
