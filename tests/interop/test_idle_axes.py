"""An axis above 1 that a model or a call would not use is named by a ValueError, with the way out."""

import re

import pytest
import torch
import transformers as hf
from torch import nn

import mpcore as mp
from mpcore.interop.parallelize import SequenceParallel, model_plan
from mpcore.tools.simulation import RankError
from tests import families
from tests.test_parallelize_sequence import build, token_loss


def run_of(model, on):
    return mp.prepare(
        model, on, blocks=model.model.layers, loss=token_loss, initialize=False,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )  # fmt: skip


def prepared(name, *axes):
    """Prepare a model of transformers that `parallelize` has sharded over these axes only."""
    return lambda on: run_of(mp.parallelize(build(name), **{key: getattr(on, key) for key in axes}), on)


def with_attention(model):
    model.set_attn_implementation("sdpa")
    return model(IDS)


def set_field(model, **fields):
    vars(model.config).update(fields)
    return model


IDS = torch.arange(1, 17).view(2, 8)
CASES = {  # the sizes of the mesh, the call, and the two parts of the error: the axis, and the way out
    "tp forgotten": ({"tp": 2}, lambda on: run_of(build("llama"), on), "2 ranks of tp", "tp=mesh.tp"),
    "cp forgotten beside tp": ({"tp": 2, "cp": 2}, prepared("llama", "tp"), "cp", "cp=mesh.cp"),
    "tp forgotten beside cp": ({"tp": 2, "cp": 2}, prepared("llama", "cp"), "2 ranks of tp", "tp=mesh.tp"),
    "ep forgotten beside cp": ({"cp": 2, "ep": 2}, prepared("gpt_oss", "cp"), "2 ranks", "ep=mesh.ep"),
    "ep of a dense model": ({"ep": 2}, prepared("llama", "ep"), "ep", "build the mesh with ep 1"),
    "ep of a plan without experts": ({"tp": 2, "ep": 2}, lambda on: mp.parallelize(
        build("gpt_oss"), {"model.embed_tokens": "vocab"}, on.tp, ep=on.ep), "2 ranks of ep", "ep_dispatch_experts"),
    "ep of experts that the plan skips": ({"ep": 2}, lambda on: mp.parallelize(
        build("qwen3_moe"), ep=on.ep, skip=("**.experts",)), "2 ranks of ep", "build the mesh with ep 1"),
    "etp forgotten": ({"tp": 2, "ep": 2, "mesh": {"etp": 1}}, prepared("qwen3_moe", "tp", "ep"),
     "etp of size 2.* etp 1", "etp=mesh.etp"),
    "tp of a plan that replicates": ({"tp": 2}, lambda on: mp.parallelize(
        build("llama"), {"model.norm": "replicate"}, on.tp), "2 ranks of tp", "build the mesh with tp 1"),
    "cp of a family's own attention": ({"cp": 2}, lambda on: mp.parallelize(
        families.build("bloom"), cp=on.cp), "cp 2", "build the mesh with cp 1"),
    "cp of state-space layers": ({"cp": 2}, lambda on: mp.parallelize(
        families.build("mamba2"), cp=on.cp), "cp 2", "build the mesh with cp 1"),
    "sp of a part": ({"tp": 2}, lambda on: mp.parallelize(
        build("llama"), {"model.layers.*": SequenceParallel(), "model.layers.*.mlp.down_proj": "rowwise"}, on.tp),
     "sequence_parallel", "'': 'sequence_parallel'"),
    "sp without sharded layers": ({"tp": 2}, lambda on: mp.parallelize(
        build("llama"), {"": "sequence_parallel"}, on.tp), "2 ranks of tp", "name layers"),
    "pp forgotten": ({"pp": 2}, lambda on: run_of(build("llama"), on),
     "pipeline ranks 0 and 1", "pipeline_stages(model, mesh"),
    "pp of a model that generates": ({"pp": 2}, lambda on: mp.pipeline_stages(
        build("llama"), on, micro_batches=2).stages[0].generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=2),
     "a pipeline stage", "load them on a mesh with pp 1"),
    "attention set after cp": ({"cp": 2}, lambda on: with_attention(mp.parallelize(build("llama"), cp=on.cp)),
     "'sdpa' .*cp 2", "leave out set_attn_implementation"),
    "attention set after sp": ({"tp": 2}, lambda on: with_attention(mp.parallelize(
        build("llama"), model_plan(build("llama"), 2) | {"": "sequence_parallel"}, on.tp)),
     "'sdpa' .*tp 2", "leave out set_attn_implementation"),
    "cp of an encoder with a decoder": ({"cp": 2}, lambda on: mp.parallelize(
        families.build("t5, sequence to sequence"), cp=on.cp, example={"input_ids": IDS, "decoder_input_ids": IDS}),
     "T5.*cp 2", "use tp and ZeRO"),
    "pp of an encoder with a decoder": ({"pp": 2}, lambda on: mp.pipeline_stages(
        families.build("t5, sequence to sequence"), on, micro_batches=2), "T5.*pp 2", "use tp and ZeRO"),
    "pp of images": ({"pp": 2}, lambda on: mp.pipeline_stages(families.build("gemma4_unified"), on, micro_batches=2)
        .stages[0](IDS, pixel_values=torch.ones(2, 3, 8, 8)), r"pixel_values \(2, 3, 8, 8\)", "leave pixel_values out"),
    "pp of router losses": ({"pp": 2}, lambda on: mp.pipeline_stages(
        set_field(build("qwen3_moe"), output_router_logits=True), on, micro_batches=2),
     "output_router_logits .* pipeline stage", "mesh with pp 1"),
    "pp of all hidden states": ({"pp": 2}, lambda on: mp.pipeline_stages(build("llama"), on, micro_batches=2)
        .stages[0](IDS, output_hidden_states=True), "output_hidden_states .* pipeline stage", "mesh with pp 1"),
    "pp of a class of a sequence": ({"pp": 2}, lambda on: mp.pipeline_stages(
        hf.LlamaForSequenceClassification(build("llama").config), on, micro_batches=2), "2 stages", "mesh with pp 1"),
    "pp of a table that grows": ({"pp": 2}, lambda on: mp.pipeline_stages(
        build("llama"), on, micro_batches=2).stages[0].resize_token_embeddings(70), "70.* 66", "on the new folder"),
    "tp of a table that grows": ({"tp": 2}, lambda on: mp.parallelize(
        build("llama"), tp=on.tp).resize_token_embeddings(70), "70.* 66", "on the new folder"),
    "pp of a model without layers": ({"pp": 2}, lambda on: mp.pipeline_stages(
        nn.Embedding(8, 8), on, micro_batches=2), "Embedding", "write its stages"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_axis_without_effect_is_named(case):
    sizes, call, axis, way_out = CASES[case]
    with pytest.raises(RankError, match=f"ValueError: .*{axis}") as found:
        mp.simulate(call, **sizes)
    assert re.search(re.escape(way_out), str(found.value)), found.value
