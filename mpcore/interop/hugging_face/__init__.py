"""Import and export Hugging Face models: GPT-2, Llama, Mistral, Mixtral, Phi-3, Qwen2, Qwen3, DeepSeek-V2 and V3.

Each Hugging Face tensor is a box of one mpcore tensor. So every layout can read a Hugging Face folder directly, and
the conversion needs one tensor in memory at a time. A field of config.json that mpcore's models don't support is
refused by name. Read `architectures.py` first: it has the tables.
"""

from mpcore.interop.hugging_face.architectures import ARCHITECTURES, LENGTH, Architecture
from mpcore.interop.hugging_face.config import (
    ModelSpec,
    architecture_of,
    config_from_hf,
    config_to_hf,
    read_config,
    read_json,
)  # fmt: skip
from mpcore.interop.hugging_face.convert import export_hf, import_hf, load_hf, open_checkpoint
from mpcore.interop.hugging_face.extra_files import FOLDER, ExtraFiles, carried_by_checkpoint, carried_by_hf
from mpcore.interop.hugging_face.folder import INDEX, ROUTER_BIAS, ROUTER_STATISTICS, Source, open_hf, parts_of
from mpcore.interop.hugging_face.loading import from_pretrained
from mpcore.interop.hugging_face.pretrained import hf_tensors, save_pretrained

__all__ = [
    "ARCHITECTURES", "FOLDER", "INDEX", "LENGTH", "ROUTER_BIAS", "ROUTER_STATISTICS", "Architecture", "ExtraFiles",
    "ModelSpec", "Source", "architecture_of", "carried_by_checkpoint", "carried_by_hf", "config_from_hf",
    "config_to_hf", "export_hf", "from_pretrained", "hf_tensors", "import_hf", "load_hf", "open_checkpoint", "open_hf",
    "parts_of", "read_config", "read_json", "save_pretrained",
]  # fmt: skip
