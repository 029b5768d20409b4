"""Models by name, for `--preset`."""

from __future__ import annotations

from functools import partial

from examples.gpt.config import GPTConfig, LatentConfig, MoEConfig

_gpt2 = partial(
    GPTConfig, vocab_size=50257, seq_len=1024, activation="gelu_tanh", norm="layer", positions="learned", bias=True,
    tie_embeddings=True,
)  # fmt: skip
_llama3 = partial(GPTConfig, vocab_size=128256, seq_len=8192, kv_heads=8, rope_base=500000.0, norm_eps=1e-5)
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
}  # fmt: skip
