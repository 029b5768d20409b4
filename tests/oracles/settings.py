"""The flags of `examples.gpt.pretrain` that change a number, with the defaults that `--help` tells."""

from __future__ import annotations

from dataclasses import dataclass

PRESETS = {  # norm, its eps, positions, activation, biases, tied embeddings
    "tiny": ("rms", 1e-6, "rope", "swiglu", False, False),
    "tiny-moe": ("rms", 1e-6, "rope", "swiglu", False, False),
    "tiny-mla": ("rms", 1e-6, "rope", "swiglu", False, False),
    "gpt2": ("layer", 1e-5, "learned", "gelu_tanh", True, True),
}


@dataclass(frozen=True)
class Settings:
    """A small run. Sizes are this table's own; what trains the model has the defaults of the command."""

    preset: str = "tiny"
    layers: int = 2
    d_model: int = 16
    heads: int = 4
    kv_heads: int | None = None
    d_ff: int = 24
    seq_len: int = 12
    dropout: float = 0.0
    attention_dropout: float = 0.0
    tie_embeddings: bool = False
    experts: int = 0
    top_k: int = 2
    shared_experts: int = 0
    expert_d_ff: int = 8
    routed_scale: float = 1.0
    moe_every: int = 1
    balance: str = "aux"
    aux_loss: str = "sequence"
    aux_coefficient: float = 0.01
    router_z_loss: float = 0.0
    bias_rate: float = 0.001
    router_jitter: float = 0.0
    capacity_factor: float | None = None
    steps: int = 4
    global_batch: int = 4
    micro_batch: int = 2
    lr: float = 3e-3
    min_lr: float | None = None
    warmup: int = 2
    lr_schedule: str = "cosine"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    embedding_lr_scale: float = 1.0
    optimizer: str = "adamw"
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    dtype: str = "float64"
    eval_samples: int = 5

    @property
    def norm(self) -> tuple[str, float]:
        return PRESETS[self.preset][:2]

    @property
    def learned_positions(self) -> bool:
        return PRESETS[self.preset][2] == "learned"

    @property
    def tied(self) -> bool:
        return self.tie_embeddings or PRESETS[self.preset][5]
