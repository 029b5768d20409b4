"""Make a small Hugging Face model for `verify`: from a config, with random weights, on any layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpcore.interop.cut import pipeline_stages
from mpcore.interop.hugging_face.loading import auto_config
from mpcore.interop.hugging_face.stored import transformers_module
from mpcore.interop.parallelize import model_plan, parallelize, suggest_plan
from mpcore.mesh.axis import Mesh

MOST = 2 * 10**7  # parameters at most: each process holds them in float64, with gradients
ROWS, TOKENS, LAYERS = 8, 16, 4


@dataclass(frozen=True)
class HuggingFaceModel:
    """Build a causal language model from a folder or a config.json, with at most `LAYERS` layers, for `verify`.

    `changes` are values of config fields, such as ("hidden_size", 64).
    """

    path: str
    changes: tuple[tuple[str, Any], ...] = ()

    def config(self) -> Any:
        """Return the config with fewer layers and without dropout."""
        if not Path(self.path).exists():
            raise ValueError(f"{self.path} is no folder and no config.json on this machine")
        changes = dict(self.changes)
        config: Any = auto_config(Path(self.path), **changes)
        known = {*config.to_dict(), *config.attribute_map}
        for name in changes:
            if name not in known:
                raise ValueError(f"{name} is no field of the {config.model_type} config in {self.path}")
        if config.num_hidden_layers > LAYERS and "num_hidden_layers" not in changes:
            types = getattr(config, "layer_types", None)
            fewer = {"num_hidden_layers": LAYERS} | ({"layer_types": types[:LAYERS]} if types else {})
            config = auto_config(Path(self.path), **{**fewer, **changes})
        dropped = [name for name, value in config.to_dict().items() if "drop" in name and isinstance(value, float)]
        config.update({"use_cache": False, **dict.fromkeys(dropped, 0.0)})  # its masks would differ between layouts
        return config

    def __call__(self, mesh: Mesh) -> nn.Module:
        """Return the model, or this rank's stage of it, sharded by its own plan or by the plan of `suggest_plan`."""
        model = transformers_module("").AutoModelForCausalLM.from_config(self.config(), trust_remote_code=False)
        model.set_experts_implementation("eager")  # torch's grouped product has no float64
        tp, ep = mesh.tp.size, mesh.ep.size
        if max(tp, ep) > 1:
            plan: Any = "auto"
            try:
                model_plan(model, tp, ep)
            except ValueError:  # it has no plan
                plan = suggest_plan(model, tp, ep=ep).plan
            parallelize(model, plan, mesh.tp, ep=mesh.ep, etp=mesh.etp)
        return pipeline_stages(model, mesh, micro_batches=mesh.pp.size).stages[0]

    def batch(self) -> dict[str, Tensor]:
        """Return random token ids, and the next tokens as targets."""
        config = self.config()
        with torch.device("meta"):
            size = sum(p.numel() for p in transformers_module("").AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST:
            raise ValueError(
                f"with {config.num_hidden_layers} layers the model of {self.path} has {size} parameters, and {MOST} "
                f"can be tried: shrink it, such as --set hidden_size=64 --set vocab_size=257"
            )
        generator = torch.Generator().manual_seed(7)
        ids = torch.randint(2, config.vocab_size, (ROWS, TOKENS + 1), generator=generator)
        return {"x": ids[:, :-1], "target": ids[:, 1:]}


def token_loss(output: Any, target: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum of the cross-entropies of all tokens."""
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten(), reduction="sum")
