"""The configuration of a GPT (`GPTConfig`), its layout on the ranks (`Layout`), and models by name (`PRESETS`)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mpcore import Mesh
from mpcore.layers.mlp import GATED

MOST_LAYERS = 10_000
LINEAR = ("delta", "kimi", "mamba")  # GatedDeltaNet, KimiDeltaAttention and Mamba2 of `mpcore.experimental`


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of a dense MLP; names as in `mpcore.ParallelMoE` and `mpcore.layers.Router`."""

    experts: int = 8
    top_k: int = 2
    shared_experts: int = 0
    d_ff: int | None = None  # of each expert; None: the dense MLP's
    every: int = 1  # block i has experts where (i + 1) % every == 0, and a dense MLP elsewhere
    dense: int = 0  # the first blocks have a dense MLP, whatever `every` says
    score: str = "softmax"
    normalize: bool | None = None  # None: where top_k > 1
    routed_scale: float = 1.0
    groups: int = 1
    top_groups: int | None = None
    aux_loss: str | None = "sequence"
    aux_coefficient: float = 0.01
    z_loss: float = 0.0
    bias_rate: float = 0.0
    bias: bool | None = None  # True with a rate of 0: the bias was learned earlier and stays fixed
    jitter: float = 0.0
    capacity_factor: float | None = None
    dispatch: str | None = None
    latent_dim: int | None = None  # width in which tokens are sent to experts (latent MoE); None: the model's
    biased: bool = False  # experts have biases and the clamped SwiGLU of GPT-OSS


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention in place of `kv_heads` and `head_dim`; names as in `mpcore.MultiLatentAttention`."""

    kv_lora_rank: int = 32
    q_lora_rank: int | None = 48  # None: queries are projected from x directly
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32


@dataclass(frozen=True)
class LinearConfig:
    """The sizes of the linear-attention blocks of `layers_spec`; names as in the layers of `mpcore.experimental`."""

    heads: int = 4  # of values
    head_dim: int = 32  # of values; in "kimi" of keys too
    key_heads: int | None = None  # of "delta"; None: heads
    key_dim: int | None = None  # of "delta"; None: head_dim
    state_dim: int = 16  # of "mamba"
    groups: int = 1  # of "mamba"
    convolution: int = 4


@dataclass(frozen=True)
class BlockKind:
    """The parts of a block that may differ from other blocks. A string of `layers_spec` joins words for them with "+".

    Attributes:
        mixer: "attention", set by the words "full" and "window=N", or one of `LINEAR`, which are words themselves.
        window: as in `GPTConfig`; "full" sets None.
        rope_base: "rope=BASE", or None with the word "no-rope" and in a linear block.
        experts: the words "moe" and "dense".
    """

    mixer: str
    window: int | None
    rope_base: float | None
    experts: bool

    def change(self, text: str) -> BlockKind:
        """Return this kind, changed by the words of a string of `layers_spec`. Other fields stay the same."""
        words: dict[str, dict[str, Any]] = {name: {"mixer": name, "window": None, "rope_base": None} for name in LINEAR}
        words |= {"full": {"mixer": "attention", "window": None}, "no-rope": {"rope_base": None}}
        words |= {"moe": {"experts": True}, "dense": {"experts": False}}
        found: dict[str, Any] = {}
        for word in text.split("+"):
            name, _, value = word.partition("=")
            try:
                numbers = {"window": {"window": int}, "rope": {"rope_base": float}}.get(name, {})
                more = words.get(word) or {field: kind(value) for field, kind in numbers.items()}
            except ValueError:
                more = {}
            if not more or not 0 < (more.get("rope_base") or 1) < math.inf:
                raise ValueError(
                    f"layers_spec: {word!r} in {text!r} is none of window=N, rope=BASE, {', '.join(words)}"
                )
            if twice := found.keys() & more.keys():
                raise ValueError(f"layers_spec: two words of {text!r} set {' and '.join(sorted(twice))}: give one")
            found |= more
        return dataclasses.replace(self, **found)


@dataclass(frozen=True)
class GPTConfig:
    """The sizes and options of a model. They don't depend on the layout."""

    vocab_size: int = 257  # bytes, and the end of a document
    seq_len: int = 256
    layers: int = 4
    d_model: int = 128
    heads: int = 4
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: d_model / heads
    d_ff: int | None = None  # None: 4 d_model; with a gate 8/3 d_model, rounded up to a multiple of 64
    activation: str = "swiglu"
    norm: str = "rms"  # or "layer"
    norm_eps: float | None = None  # None: 1e-6 for "rms", 1e-5 for "layer"
    qk_norm: bool = False  # RMSNorm of each query and key head
    positions: str = "rope"  # or "learned"
    rope_base: float = 10000.0
    rope_scaling: dict[str, Any] | None = dataclasses.field(default=None, hash=False)  # as in `RotaryEmbedding`
    rope_fraction: float = 1.0  # of each head that is rotated
    window: int | None = None  # number of tokens that each token attends to, itself included; None: all before it
    bias: bool = False
    qkv_bias: bool | None = None  # these three: None: as `bias`
    output_bias: bool | None = None  # of the attention's output projection
    mlp_bias: bool | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0  # of the attention weights, in training
    tie_embeddings: bool = False
    init_std: float = 0.02  # as in GPT-2
    moe: MoEConfig | None = None  # None: every MLP is dense
    latent: LatentConfig | None = None  # None: attention with `kv_heads` and `head_dim`
    layers_spec: tuple[str, ...] | None = None  # `BlockKind` of the first blocks, repeated for the others; None: alike
    linear: LinearConfig | None = None  # of the blocks "delta", "kimi" and "mamba"; None: the defaults
    gate: str | None = None  # of `GatedAttention`: "channel" or "head"; None: no gate
    sinks: bool = False  # a learned logit of each head in the softmax
    post_norm: bool = False  # norms of what attention and MLP return, too
    embedding_scale: float = 1.0
    mtp: int = 0  # further tokens that `MultiTokenPrediction` predicts, in training
    mtp_weight: float = 0.3  # of the mean of their losses

    def __post_init__(self) -> None:
        for name, kind in PARTS.items():
            if isinstance(getattr(self, name), dict):  # from a checkpoint's config
                object.__setattr__(self, name, kind(**getattr(self, name)))
        if self.layers_spec is not None:
            object.__setattr__(self, "layers_spec", tuple(self.layers_spec))
        for field in ("vocab_size", "seq_len", "layers", "d_model", "heads"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} {getattr(self, field)} is smaller than 1")
        if self.layers > MOST_LAYERS:  # each is built before a run begins
            raise ValueError(f"layers {self.layers} is more than {MOST_LAYERS}")
        if self.latent is not None:
            self._check_latent(self.latent)
        elif self.head_dim is None and self.d_model % self.heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of heads {self.heads}")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.norm not in ("rms", "layer") or self.positions not in ("rope", "learned"):
            raise ValueError(
                f"norm {self.norm!r} must be 'rms' or 'layer', positions {self.positions!r} 'rope' or 'learned'"
            )
        if self.rope_fraction != 1 and (self.positions != "rope" or self.latent is not None):
            raise ValueError(
                f"rope_fraction {self.rope_fraction} needs positions 'rope' and no latent attention, which has "
                f"dimensions of its own for RoPE"
            )
        if self.attention_dropout and (self.latent is not None or self.gate or self.sinks):
            raise ValueError(
                f"attention_dropout {self.attention_dropout} needs attention without latents, gate {self.gate} and "
                f"sinks {self.sinks}: set it to 0"
            )
        if self.mtp < 0:
            raise ValueError(f"mtp {self.mtp} is smaller than 0")
        if self.moe is not None:
            self._check_moe(self.moe)
        self._check_blocks([self.kind(i) for i in range(self.layers)])

    def _check_latent(self, latent: LatentConfig) -> None:
        qkv, output, _ = self.biases
        names = ("kv_heads", "head_dim", "qk_norm", "gate", "sinks")
        given = {name: value for name in names if (value := getattr(self, name)) not in (None, False)}
        if given or qkv != output:
            raise ValueError(
                f"latent attention has no {given or 'biases of one projection alone'}: every head has its own keys, as "
                f"wide as {latent} says, and either all down projections and the output have biases or none has"
            )

    def _check_moe(self, moe: MoEConfig) -> None:
        if self.biases[2]:
            raise ValueError(f"{moe.experts} experts in the place of an MLP with biases: experts have none")
        if moe.biased and self.activation != "swiglu":
            raise ValueError(f"moe biased has a clamped SwiGLU, and the model's activation is {self.activation!r}")
        if not 1 <= moe.every <= self.layers:
            raise ValueError(f"moe every {moe.every} is not between 1 and the {self.layers} layers")
        if not 0 <= moe.dense < self.layers:
            raise ValueError(f"moe dense {moe.dense} leaves no experts in the {self.layers} layers")

    def _check_blocks(self, kinds: list[BlockKind]) -> None:
        """Refuse a list of kinds that doesn't fit the layers, and settings that no block has."""
        spec, mixers = self.layers_spec or (), {kind.mixer for kind in kinds}
        if self.layers_spec is not None and not 1 <= len(spec) <= self.layers:
            raise ValueError(
                f"layers_spec has {len(spec)} kinds for {self.layers} layers: give from 1 to {self.layers}"
            )
        words = {word for text in spec for word in text.split("+")}
        moe, linear = self.moe, self.linear
        if moe is None and "moe" in words:
            raise ValueError("layers_spec has moe, but the model no experts: --experts says how many")
        if moe is not None and words & {"moe", "dense"} and (moe.every, moe.dense) != (1, 0):
            raise ValueError(
                f"moe every {moe.every} and dense {moe.dense}, and layers_spec with moe or dense: give one"
            )
        own = {"delta": ("key_heads", "key_dim"), "mamba": ("state_dim", "groups")}
        unused = [name for kind, names in own.items() if kind not in mixers for name in names]
        unused = [
            f"linear.{name}" for name in unused if linear and getattr(linear, name) != getattr(LinearConfig, name)
        ]
        none = {"moe": moe is not None and not any(kind.experts for kind in kinds),
                "linear": linear is not None and not mixers & {*LINEAR},
                "window": self.window is not None and all(kind.window != self.window for kind in kinds)}  # fmt: skip
        if "attention" not in mixers:
            names = ("kv_heads", "head_dim", "latent", "qk_norm", "gate", "sinks", "attention_dropout")
            none |= {name: bool(getattr(self, name)) for name in names}
        if unused := [*unused, *(name for name, there in none.items() if there)]:
            raise ValueError(f"no block of layers_spec {list(spec)} has {', '.join(unused)}: leave it out")

    def kind(self, block: int) -> BlockKind:
        """Return what a block has."""
        moe, spec = self.moe, self.layers_spec
        experts = moe is not None and block >= moe.dense and (block + 1) % moe.every == 0
        kind = BlockKind("attention", self.window, self.rope_base if self.positions == "rope" else None, experts)
        return kind.change(spec[block % len(spec)]) if spec else kind

    @property
    def eps(self) -> float:
        """Epsilon of all norms."""
        usual = 1e-6 if self.norm == "rms" else 1e-5
        return usual if self.norm_eps is None else self.norm_eps

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        """Whether the QKV projection, the attention's output projection and the MLP have biases."""
        own = (self.qkv_bias, self.output_bias, self.mlp_bias)
        qkv, output, mlp = (self.bias if one is None else one for one in own)
        return qkv, output, mlp

    @property
    def head_width(self) -> int:
        """Width of a head of attention without latents."""
        return self.head_dim or self.d_model // self.heads

    @property
    def hidden(self) -> int:
        """Width of the dense MLP."""
        if self.d_ff is not None:
            return self.d_ff
        return -(-8 * self.d_model // (3 * 64)) * 64 if self.activation in GATED else 4 * self.d_model

    @property
    def output_std(self) -> float:
        """Standard deviation of output projections: smaller, as two in each block add to the residual stream."""
        return self.init_std / math.sqrt(2 * self.layers)

    @property
    def shares_embedding(self) -> bool:
        """Whether the last stage reads the embedding too."""
        return self.tie_embeddings or self.mtp > 0

    def has_experts(self, block: int) -> bool:
        """Whether a block has experts in place of a dense MLP."""
        return self.kind(block).experts


PARTS = {"moe": MoEConfig, "latent": LatentConfig, "linear": LinearConfig}


@dataclass(frozen=True)
class Layout:
    """The layout of a model on the ranks, and where and in which dtype it is built. All its layers take the same.

    Attributes:
        mesh: the axes; `Mesh()` is one process.
        context: how sequences are sharded over `mesh.cp`; see `mpcore.shard_sequence`.
        sequence_parallel: between tensor-parallel regions each rank holds its part of the sequence.
        device, dtype: those of the parameters.
    """

    mesh: Mesh = Mesh()
    context: str = "zigzag"
    sequence_parallel: bool = False
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None


_gpt2 = partial(
    GPTConfig, vocab_size=50257, seq_len=1024, activation="gelu_tanh", norm="layer", positions="learned", bias=True,
    tie_embeddings=True,
)  # fmt: skip
_llama3 = partial(GPTConfig, vocab_size=128256, seq_len=8192, kv_heads=8, rope_base=500000.0, norm_eps=1e-5)
_deepseek = partial(MoEConfig, score="sigmoid", normalize=True, bias_rate=0.001)
PRESETS = {
    "tiny": GPTConfig(),
    "tiny-moe": GPTConfig(moe=MoEConfig(d_ff=192)),
    "tiny-mla": GPTConfig(latent=LatentConfig()),
    "mixtral-8x7b": GPTConfig(
        vocab_size=32000, seq_len=32768, layers=32, d_model=4096, heads=32, kv_heads=8, d_ff=14336, rope_base=1e6,
        norm_eps=1e-5, moe=MoEConfig(aux_coefficient=0.02),  # 8 experts, 2 a token, as of tiny-moe
    ),
    "megatron-gpt": _gpt2(vocab_size=51200, seq_len=2048, layers=24, d_model=2304, heads=24),  # SC'21, table 1
    "megatron-gpt-rope": _gpt2(
        vocab_size=131072, seq_len=4096, layers=30, d_model=4096, heads=32, positions="rope", tie_embeddings=False
    ),
    "gpt2": _gpt2(layers=12, d_model=768, heads=12),
    "gpt2-medium": _gpt2(layers=24, d_model=1024, heads=16),
    "gpt2-large": _gpt2(layers=36, d_model=1280, heads=20),
    "gpt2-xl": _gpt2(layers=48, d_model=1600, heads=25),
    "llama-7b": GPTConfig(vocab_size=32000, seq_len=2048, layers=32, d_model=4096, heads=32, d_ff=11008),
    "llama-13b": GPTConfig(vocab_size=32000, seq_len=2048, layers=40, d_model=5120, heads=40, d_ff=13824),
    "llama-65b": GPTConfig(
        vocab_size=32000, seq_len=2048, layers=80, d_model=8192, heads=64, d_ff=22016, norm_eps=1e-5
    ),
    "llama3-1b": _llama3(layers=16, d_model=2048, heads=32, d_ff=8192, tie_embeddings=True),
    "llama3-8b": _llama3(layers=32, d_model=4096, heads=32, d_ff=14336),
    "llama3-70b": _llama3(layers=80, d_model=8192, heads=64, d_ff=28672),
    "llama3-405b": _llama3(layers=126, d_model=16384, heads=128, d_ff=53248),
    "nemotron4-15b": GPTConfig(
        vocab_size=256000, seq_len=4096, layers=32, d_model=6144, heads=48, kv_heads=8, d_ff=24576,
        rope_fraction=0.5, activation="relu_squared", norm="layer",
    ),
    "qwen3-next-80b-a3b": GPTConfig(  # without its shared expert's gate
        vocab_size=151936, seq_len=32768, layers=48, d_model=2048, heads=16, kv_heads=2, head_dim=256, qk_norm=True,
        rope_base=1e7, rope_fraction=0.25, gate="channel", layers_spec=("delta", "delta", "delta", "full"),
        linear=LinearConfig(heads=32, head_dim=128, key_heads=16),
        moe=MoEConfig(experts=512, top_k=10, shared_experts=1, d_ff=512, aux_coefficient=0.001),
    ),
    "gpt-oss-20b": GPTConfig(  # without its router's bias
        vocab_size=201088, seq_len=131072, layers=24, d_model=2880, heads=64, kv_heads=8, head_dim=64, norm_eps=1e-5,
        qkv_bias=True, output_bias=True, sinks=True, layers_spec=("window=128", "full"), rope_base=150000.0,
        rope_scaling={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
        moe=MoEConfig(experts=32, top_k=4, d_ff=2880, biased=True, aux_coefficient=0.001),
    ),
    "gemma-3-1b": GPTConfig(
        vocab_size=262144, seq_len=32768, layers=26, d_model=1152, heads=4, kv_heads=1, head_dim=256, d_ff=6912,
        activation="geglu_tanh", qk_norm=True, rope_base=1e6, layers_spec=(*("window=512+rope=1e4",) * 5, "full"),
        post_norm=True, embedding_scale=math.sqrt(1152), tie_embeddings=True,
    ),
    "kimi-linear-48b": GPTConfig(
        vocab_size=163840, seq_len=1048576, layers=27, d_model=2304, heads=32, d_ff=9216, norm_eps=1e-5,
        latent=LatentConfig(512, None, 128, 64, 128), linear=LinearConfig(heads=32, head_dim=128),
        layers_spec=tuple("full+no-rope" if i % 4 == 3 or i == 26 else "kimi" for i in range(27)),
        moe=_deepseek(256, 8, 1, 1024, dense=1, routed_scale=2.446, aux_loss=None),
    ),
    "deepseek-v3": GPTConfig(
        vocab_size=129280, seq_len=4096, layers=61, d_model=7168, heads=128, d_ff=18432, mtp=1,
        latent=LatentConfig(512, 1536, 128, 64, 128),
        moe=_deepseek(256, 8, 1, 2048, dense=3, routed_scale=2.5, groups=8, top_groups=4, aux_coefficient=0.0001),
    ),
}  # fmt: skip
