"""Recognize the checkpoints of other libraries by their files, and say which command converts them."""

from __future__ import annotations

from pathlib import Path

_BRIDGE = "export it to a Hugging Face folder with Megatron Bridge, where it was written"
_DEEPSPEED = "run its zero_to_fp32.py with --safe_serialization, and put the config.json of the model beside the result"
_DCP = "convert it with mpcore checkpoint convert SOURCE TARGET"
_HUGGING_FACE = "mpcore.from_pretrained reads it, and mpcore convert SPEC --from-hf SOURCE --to TARGET converts it"
_PICKLES = "if you trust them, convert them to safetensors with save_pretrained of transformers"
_OF_MEGATRON = ("common.pt", "metadata.json")  # beside its .metadata
_FORMATS = {  # the first that fits
    "**/zero_pp_rank_*_model_states.pt": ("DeepSpeed, ZeRO-3", _DEEPSPEED),
    "**/*zero_pp_rank_*_optim_states.pt": ("DeepSpeed, ZeRO-1 or ZeRO-2", _DEEPSPEED),
    "**/mp_rank_*_model_states.pt": ("DeepSpeed", _DEEPSPEED),
    "**/zero/*/fp32.pt": ("DeepSpeed, universal", f"go back to the checkpoint it was made of; {_DEEPSPEED}"),
    "**/mp_rank_*/model_optim_rng.pt": ("Megatron-LM", _BRIDGE),
    "**/*.distcp": ("torch.distributed.checkpoint", _DCP),
    "**/.metadata": ("torch.distributed.checkpoint", _DCP),
    "pytorch_model*.bin": ("transformers", _PICKLES),
    "model.safetensors": ("Hugging Face", _HUGGING_FACE),
    "model-*-of-*.safetensors": ("Hugging Face", _HUGGING_FACE),
}


def other_format(folder: Path) -> str | None:
    """Return which library wrote a folder that is no checkpoint of mpcore, and which command converts it.

    Returns:
        A sentence, or None if no other format is recognized.
    """
    for pattern, (kind, way) in _FORMATS.items():
        found = next(iter(sorted(folder.glob(pattern))), None)
        if found is None:
            continue
        if kind == "torch.distributed.checkpoint" and any((found.parent / n).is_file() for n in _OF_MEGATRON):
            kind, way = "Megatron-Core, torch_dist", _BRIDGE
        pickles = "" if kind == "Hugging Face" else ", whose tensors lie in pickles, which run code when they are read"
        return f"{folder} is a checkpoint of {kind} ({found.relative_to(folder)}){pickles}: {way}"
    return None


def refuse_other_format(folder: Path) -> None:
    """Raise ValueError for a folder of another library, except one with safetensors files that can be read."""
    if not any(folder.glob("*.safetensors")) and (found := other_format(folder)):
        raise ValueError(found)
