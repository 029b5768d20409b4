"""Low-rank adapters (LoRA) on the linear layers of a model, sharded like the layers, with files in PEFT's format.

The package uses `layers` and `checkpoint`. Read `layers.py` first: it says how each factor is sharded.
"""

from mpcore.interop.lora.adapters import add_lora, merge_lora, merged_state_dict
from mpcore.interop.lora.files import load_lora, save_lora
from mpcore.interop.lora.layers import LoRALayer

__all__ = ["LoRALayer", "add_lora", "load_lora", "merge_lora", "merged_state_dict", "save_lora"]
