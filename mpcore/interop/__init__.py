"""Use models made elsewhere: shard any model (`parallelize`), use Hugging Face folders, and add LoRA adapters."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Import a module of this package when it is first used, such as `mpcore.interop.lora`."""
    if name.startswith("_") or find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
