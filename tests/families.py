"""Try `parallelize` on the architectures of transformers: `python -m tests.families --write`.

Those with a causal language model are tried, or with `--others` encoders, encoders with decoders, speech and images.
Each config is shrunk, its weights are random, and it computes in float64: whole, and sharded over tp, by the plan that
the model carries or else by the one that `suggest_plan` finds. Outputs and gradients of all parameters must be equal.
With `--sequence`, the sequence is sharded over cp, by each kind, and between layers over tp.
With `--train`, three steps of AdamW on every axis, as a user runs them; losses, norms and weights must be equal.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto as auto

from mpcore.interop.hugging_face import small
from mpcore.interop.parallelize import suggest_plan
from mpcore.interop.parallelize.plan import Plan, SequenceParallel, resolve
from mpcore.interop.parallelize.prove import TOLERANCE, CannotCheckError, PlanTester, shapes_of
from mpcore.interop.parallelize.prove_sequence import prove_context, prove_sequence
from mpcore.interop.parallelize.suggest import share_of, targets_of
from mpcore.interop.parallelize.swap import cut_model
from tests.families_training import EXACT, SECONDS, plans_experts, trained, wide

CAUSAL = {name: made for name, made in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if isinstance(made, str)}
OTHERS = {
    f"{name}, {kind}": made
    for kind, names in {
        "sequence to sequence": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "speech to text": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        "masked words": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "images": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "images and text": auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }.items()
    for name, made in names.items()
    if isinstance(made, str)
}
CLASSES: dict[str, Any] = {**CAUSAL, **OTHERS}
PAGE = Path(__file__).parent.parent / "docs" / "families.md"
RECORD = PAGE.parent / "records" / "2026-11-28_families.md"
TABLE = re.compile(r"^\| family .*\n(?:\|.*\n)*", re.MULTILINE)
MOST = 10**7  # parameters
SIZES = small.SIZES | {
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "max_position_embeddings": 32, "n_positions": 32, "max_seq_len": 32, "max_target_positions": 32,
    "first_k_dense_replace": 1,
}  # fmt: skip


ODD: dict[str, dict[str, Any]] = {  # sizes that one architecture has, or that must fit each other in it
    "bamba": {"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_d_state": 4, "attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 12, "mamba_d_head": 8,
                         "mamba_d_state": 4},
    "mamba2": {"num_heads": 12, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "falcon_h1": {"mamba_d_ssm": 96, "mamba_n_heads": 12, "mamba_d_head": 8, "mamba_d_state": 4},
    "nemotron_h": {"mamba_num_heads": 12, "mamba_head_dim": 8, "ssm_state_size": 4, "n_groups": 6, "chunk_size": 8},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "xlstm": {"chunk_size": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "nemotron": {"head_dim": 4, "num_key_value_heads": 6},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "reformer": {"is_decoder": True, "axial_pos_shape": [4, 8], "axial_pos_embds_dim": [24, 24]},
    "zamba": {"num_hidden_layers": 3, "layer_types": ["linear_attention", "hybrid", "hybrid"]},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 6, "clip_qkv": 8.0},
             "ffn_config": {"hidden_size": 48, "ffn_hidden_size": 36, "moe_num_experts": 4, "moe_top_k": 2}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4,
                                                                   "mrope_section": [1, 1, 0]}}},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_config": {"hidden_size_global": 48},
            "decoder_config": {"hidden_size_global": 48}},
    "gemma4": {"text_config": {"vocab_size_per_layer_input": 66, "hidden_size_per_layer_input": 8}},
    "gemma3n_text": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 66,
                     "laurel_rank": 4},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1], "chunk_size": 8},
    "zaya": {"num_experts_per_tok": 1},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "flint": {"mlp_only_layers": []},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "glm4v_moe_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 0, 0]}},
    "gemma4_text": {"vocab_size_per_layer_input": 66, "hidden_size_per_layer_input": 8, "enable_moe_block": True,
                    "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12},
    "step3p5": {"mlp_layer_types": ["dense", "sparse"], "sliding_window": 4},
    "bailing_hybrid": {"n_group": 1, "topk_group": 1, "layer_types": ["linear_attention", "full_attention"]},
    "glm5_next_text": {"qk_rope_head_dim": 0, "mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 12},
    "dots3_note_vision_encoder": {"per_layer_config": {}, "adapter_in_dim": 48},
    "musicgen": {"num_codebooks": 1}, "musicgen_melody": {"num_codebooks": 1},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [12, 12], "head_dim": 12, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "roc_bert": {"pronunciation_vocab_size": 8, "shape_vocab_size": 8},
    "beit": {"image_size": 8, "patch_size": 4}, "deit": {"image_size": 8, "patch_size": 4},
}  # fmt: skip


class TooLong(BaseException):
    """No `Exception`: the prover would take one raised within a forward for an error of the model."""


class Row(NamedTuple):
    """A family, and what came of it on each layout."""

    family: str
    model: str
    results: dict[str, str]


def with_experts() -> dict[str, Any]:
    """The model class of each config whose plans name fused experts: a causal language model, if there is one."""
    found: dict[str, Any] = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/configuration_*.py")):
        if not re.search("ep_dispatch_experts|moe_tp_experts", path.read_text()):
            continue
        name = f"transformers.models.{path.parent.name}.{path.stem.replace('configuration', 'modeling')}"
        made = [
            each for each in vars(importlib.import_module(name)).values() if getattr(each, "__module__", "") == name
        ]
        made = [kind for kind in made if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)]
        for kind in sorted(made, key=lambda kind: not kind.__name__.endswith("ForCausalLM")):
            config: Any = kind.config_class
            if plans_experts(config) and "PreTrainedModel" not in kind.__name__:
                found.setdefault(config.model_type, kind)
    return found


def shrunk(config: Any, family: str = "") -> dict[str, Any]:
    """Small sizes of a config."""
    for each in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if hasattr(each, "allow_global_per_layer_attribute_access"):
            each.allow_global_per_layer_attribute_access = True
    sizes: dict[str, Any] = small.sizes_of(config, SIZES)
    odd = {name: {**sizes[name], **v} if name in config.sub_configs else v for name, v in ODD.get(family, {}).items()}
    return sizes | odd


def build(family: str) -> nn.Module:
    """A small model of a family."""
    make: Any = CLASSES[family]
    make = getattr(transformers, make) if isinstance(make, str) else make
    config = make.config_class(**shrunk(make.config_class(), family))
    with torch.device("meta"):
        size = sum(p.numel() for p in make(config).parameters())
    if size > MOST:
        raise ValueError(f"{size} parameters, for SIZES knows no names of its config")
    return make(config)


def judged(model: nn.Module, plan: Plan | str, tp: int) -> str:
    """Say "equal" and the share sharded, or why not."""
    shapes = shapes_of(model)
    try:
        styles = {name: style for name, _, style in targets_of(shapes, plan, tp)}
        share = f"{share_of(shapes, plan, tp):.0%}"
        with mock.patch.object(torch.Tensor, "float", lambda x: x):  # else norms compute in float32
            exact = PlanTester(shapes, tolerance=EXACT).verdict(styles, tp, cut_model)
        if exact is None:
            return f"equal, {share}"
        wrong = PlanTester(shapes, tolerance=TOLERANCE).verdict(styles, tp, cut_model)
    except (ValueError, CannotCheckError) as error:
        return str(error)
    return wrong or f"equal to {TOLERANCE:g}, {share}"


def tried(model: nn.Module, tp: int) -> str:
    """The result on tp ranks: by the model's own plan, or by the one found where that is right and shards more."""
    own = judged(model, "auto", tp)
    share = int(own.split()[-1].rstrip("%")) if own.startswith("equal") else 0
    if share >= 50:
        return own
    try:
        found = suggest_plan(model, tp)
    except ValueError as error:
        return own if share else f"refused: {error}"
    ours = judged(model, found.plan, tp) if 100 * found.share > share + 1 else ""
    return f"{ours}, plan found" if ours.startswith("equal") else own if share else f"refused: {own}"


def beside_own(model: nn.Module, tp: int) -> str:
    """The result of the plan found, where the model's own is hidden; `suggest_plan` never looks at it."""
    return f"{judged(model, suggest_plan(model, tp).plan, tp)}; own plan: {judged(model, 'auto', tp)}"


def proven(check: Callable[[float], str | None]) -> str:
    """Say "equal", to how many digits if not to all, or why not. `check` takes the tolerance."""
    for tolerance in (EXACT, TOLERANCE):
        with wide():
            wrong = check(tolerance)
        if wrong is None:
            return "equal" if tolerance == EXACT else f"equal to {TOLERANCE:g}"
    return f"refused: {wrong}"


def over_cp(model: nn.Module, cp: int) -> str:
    """The result of each kind of context parallelism on cp ranks, and whether documents may be packed."""
    shapes = shapes_of(model)

    def check(tolerance: float, packed: bool = False) -> str | None:
        prover, kinds = PlanTester(shapes, tolerance=tolerance), ("zigzag", "ring", "alltoall", "allgather")
        return next(filter(None, (prove_context(prover, kind, cp, packed) for kind in kinds)), None)

    try:
        found = proven(check)
        apart = found.startswith("equal") and proven(lambda tolerance: check(tolerance, True)).startswith("equal")
    except (ValueError, CannotCheckError) as error:
        return f"refused: {error}"
    return found if apart or not found.startswith("equal") else f"{found}, one document a row"


def _split(shapes: nn.Module, styles: dict[str, Any], tp: int, tolerance: float) -> str | None:
    return prove_sequence(PlanTester(shapes, tolerance=tolerance), styles, tp, cut_model)


def over_sp(model: nn.Module, tp: int) -> str:
    """The result of sequence parallelism on tp ranks, by the model's own plan or else by the one found."""
    said = ""
    for plan in ("auto", None):
        try:
            shapes = shapes_of(model)
            rules: Plan | str = plan or suggest_plan(model, tp).plan
            styles = {name: style for name, _, style in resolve(shapes, rules)} | {"": SequenceParallel()}
            said = proven(partial(_split, shapes, styles, tp))
        except (ValueError, CannotCheckError) as error:
            said = f"refused: {error}"
        if said.startswith("equal"):
            return said if plan else f"{said}, plan found"
    return said


def sequence(model: nn.Module, size: int) -> dict[str, str]:
    """The results of the axes that shard the sequence."""
    return {f"cp {size}": over_cp(model, size), f"sp {size}": over_sp(model, size)}


def row(family: str, sizes: list[int], result: Callable[[nn.Module, int], Any] = tried) -> Row:
    """Try one family."""
    signal.alarm(SECONDS)
    try:
        model = build(family)
    except (Exception, TooLong) as error:
        made = CLASSES[family]
        why = f"not shrunk: {type(error).__name__}: {' '.join(str(error).split()):.100}"
        return Row(family, made if isinstance(made, str) else made.__name__, {"": why})
    results = {}
    for size in sizes:
        signal.alarm(SECONDS)
        try:
            found = result(model, size)
            results |= found if isinstance(found, dict) else {f"tp {size}": found}
        except (Exception, TooLong) as error:
            why = str(error).splitlines()[0] if str(error) else ""
            results[f"tp {size}"] = f"failed: {type(error).__name__}: {why}"
        finally:
            signal.alarm(0)
    return Row(family, type(model).__name__, results)


def table(rows: list[Row]) -> Iterator[str]:
    """The page's lines."""
    sizes = sorted({size for each in rows for size in each.results} - {""})
    yield f"| family | model | {' | '.join(sizes)} |"
    yield f"|---|---|{'---|' * len(sizes)}"
    for each in sorted(rows):
        said = [each.results.get(size, each.results.get("", "not tried")) for size in sizes]
        cells = [f"{' '.join(one.split()).replace('|', '/'):.160}" for one in said]
        yield f"| {each.family} | {each.model} | {' | '.join(cells)} |"


def rows_of(table: str) -> list[Row]:
    """The rows of a table."""
    head, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return [Row(family, model, dict(zip(head[2:], cells, strict=True))) for family, model, *cells in rows]


def in_short(table: str) -> str:
    """The families of each result, layout by layout."""
    rows = rows_of(table)
    lines = ["| layout | result | families |", "|---|---|---|"]
    for layout in rows[0].results:
        kinds: dict[str, list[str]] = {}
        for each in rows:
            said = each.results[layout]
            kind = re.split(r"[,:] ", said)[0].removesuffix(" to 0.0001").replace("shrunk", "tried")
            kinds.setdefault(kind, []).append(each.family + "*" * ("plan found" in said))
        kinds.pop("not applicable", None)
        lines += [f"| {layout} | {kind}: {len(kinds[kind])} | {'; '.join(kinds[kind])} |" for kind in sorted(kinds)]
    return "\n".join(lines) + "\n"


def counted(table: str) -> str:
    """How many of the families that a mesh applies to are equal. One that isn't shrunk counts as not equal."""
    rows, found = rows_of(table), []
    for kind, families in {"causal": CAUSAL, "with experts (most are causal too)": with_experts()}.items():
        found.append([kind])
        for layout in rows[0].results:
            held = [each.results[layout] for each in rows if each.family in families]
            of = [said for said in held if said != "not applicable"]
            found[-1].append(f"{sum(said.startswith('equal') for said in of)} of {len(of)}")
    lines = ["models", *rows[0].results], ["---"] * (len(rows[0].results) + 1), *found
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def write_page() -> None:
    """Put the record's tables of three steps and of other models, in short, into the page."""
    tables = [match[0] for match in TABLE.finditer(RECORD.read_text())]
    short = [in_short(tables[-1]), in_short(tables[2])]
    page = re.sub(r"^\| layout .*\n(?:\|.*\n)*", lambda _: short.pop(0), PAGE.read_text(), flags=re.M)
    PAGE.write_text(re.sub(r"^\| models .*\n(?:\|.*\n)*", lambda _: counted(tables[-1]), page, flags=re.M))


def _too_long(*_: object) -> None:
    raise TooLong(f"more than {SECONDS} s")


def main() -> None:
    """Try the families named, or all; print a row each, and write the page where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="default: all with a causal language model")
    parser.add_argument("--others", action="store_true", help="encoders, encoders with decoders, images, speech")
    parser.add_argument("--tp", type=int, nargs="+", default=[2])
    parser.add_argument("--rows", type=Path, help="a file of rows: those in it aren't tried again")
    parser.add_argument("--sequence", action="store_true", help="the sequence sharded over cp, and over tp")
    parser.add_argument("--train", action="store_true", help="three steps of AdamW on each mesh of AXES")
    parser.add_argument("--write", action="store_true", help=f"write the table of {RECORD.name}, and {PAGE.name}")
    given = parser.parse_args()
    result: Any = trained if given.train else sequence if given.sequence else tried
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _too_long)
    transformers.logging.set_verbosity_error()
    lines = given.rows.read_text().splitlines() if given.rows and given.rows.exists() else []
    done = [Row(*json.loads(line)) for line in lines]
    experts = with_experts() if given.train else {}
    CLASSES.update({name: kind for name, kind in experts.items() if name not in CLASSES})
    every = OTHERS if given.others else sorted({**CAUSAL, **experts})
    for family in given.families or every:
        if family not in {each.family for each in done}:
            done.append(row(family, given.tp, result))
            print(*done[-1], flush=True)
            if given.rows:
                with given.rows.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
    equal = sum(all(said.startswith(("equal", "not app")) for said in each.results.values()) for each in done)
    print(f"{equal} of {len(done)} equal")
    if given.write:
        text = RECORD.read_text()
        at = list(TABLE.finditer(text))[-1 if given.train else -2 if given.sequence else 2 if given.others else 0]
        old = {each.family: each for each in rows_of(at[0])}  # stay, where they weren't tried again
        for each in done:
            kept = {} if "" in each.results or each.family not in old else old[each.family].results
            old[each.family] = each._replace(results=kept | each.results)
        RECORD.write_text(text[: at.start()] + "\n".join(table([*old.values()])) + "\n" + text[at.end() :])
        write_page()


if __name__ == "__main__":
    main()
