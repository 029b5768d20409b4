"""transformers' `generate` on sharded models writes the tokens of the dense model, or says why it can't."""

import copy
import io

import pytest
import torch

from mpcore import Axis, parallelize
from mpcore.interop.parallelize.plan import model_plan
from tests.equality import close
from tests.pool import mesh, on_ranks
from tests.quick import some
from tests.test_parallelize import GPT2_PLAN

hf = pytest.importorskip("transformers")

VOCAB, NEW = 37, 64
IDS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SMALL = {**IDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 12}
SMALL |= {"max_position_embeddings": 128, "num_key_value_heads": 2, "head_dim": 4}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "query_pre_attn_scalar": 4}
GPT2 = {**IDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 128}
NEOX = {name: value for name, value in SMALL.items() if name not in ("num_key_value_heads", "head_dim")}
FAMILIES = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SMALL)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SMALL, sliding_window=5)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SMALL, **MIXED)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SMALL, **MIXED)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**NEOX)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**SMALL)),
}
PLANS = {"gpt2": GPT2_PLAN}


def build(name, spread=0.6):
    """Random weights, large enough that the likeliest tokens are many."""
    model = FAMILIES[name]().double().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(spread * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        if model.config.tie_word_embeddings:  # else a token's own logit is the largest
            model.get_input_embeddings().weight *= 0.2
    return model


def prompt(padded=True):
    """Two rows, the first of which is padded on the left."""
    ids = torch.randint(2, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    if padded:
        ids[0, :3] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def tp_axis():
    return mesh(tp=torch.distributed.get_world_size()).tp


@pytest.mark.parametrize("name", some("gemma3", "gpt2", of=FAMILIES))
@on_ranks(2)
def test_64_greedy_tokens_with_a_cache_are_those_of_the_dense_model(name):
    dense = build(name)
    sharded = parallelize(copy.deepcopy(dense), PLANS.get(name, "auto"), tp_axis())
    given = prompt(
        padded=name != "gemma2"
    )  # it has NaN there, dense too, where a row of its soft caps sees padding alone
    how = {**given, "max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    want, got = dense.generate(**how), sharded.generate(**how)
    assert torch.equal(got.sequences, want.sequences)
    assert got.sequences.shape == (2, 7 + NEW)
    for step in range(0, NEW, 9):
        close(got.logits[step], want.logits[step], f"logits of token {step}", 1e-5)  # norms compute in float32
    assert len(set(want.sequences[:, 7:].flatten().tolist())) > 2, "nothing to tell apart"
    heads, mine = (out.past_key_values.layers[-1].keys.shape[1] for out in (want, got))
    assert mine == (heads if name == "phi3" else heads // 2)  # Phi-3's own plan gathers its fused projection
    static = sharded.generate(**given, max_new_tokens=9, do_sample=False, cache_implementation="static")
    assert torch.equal(static, want.sequences[:, : 7 + 9])


def refused(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


PARTED = {  # arguments that ranks 0 and 1 pass; the first four left ranks waiting
    "max_new_tokens": (3, 6), "do_sample": (True, None), "num_beams": (1, 2), "max_time": (None, 9.0),
    "repetition_penalty": (1.0, 9.0), "generation_config": [hf.GenerationConfig(top_k=k) for k in (3, 5)],
    "logits_processor": [[hf.RepetitionPenaltyLogitsProcessor(x)] for x in (1.0, 9.0)],
    "sequence_bias": ({(1,): 9.0}, {(2,): 9.0}),
}  # fmt: skip


def check_refusals():
    tp = tp_axis()
    dense = build("llama")
    sharded = parallelize(copy.deepcopy(dense), tp=tp)
    how = {**prompt(), "max_new_tokens": 8}
    said = []
    torch.manual_seed(tp.rank)
    said.append(refused(lambda: sharded.generate(**how, do_sample=True)))
    said.append(refused(lambda: sharded.generate(how["input_ids"], hf.GenerationConfig(do_sample=True))))
    said.append(refused(lambda: sharded.generate(input_ids=how["input_ids"] + tp.rank, max_new_tokens=2)))
    said.append(refused(lambda: sharded.generate(**how, max_time=9.0)))
    for name, values in PARTED.items():
        said.append(refused(lambda: sharded.generate(**{**how, name: values[tp.rank]})))  # noqa: B023
    logits = parallelize(build("llama"), {**model_plan(dense), "lm_head": "colwise"}, tp)
    said.append(refused(lambda: logits.generate(**how)))
    torch.manual_seed(3)
    got = sharded.generate(**how, do_sample=True)
    torch.manual_seed(3)
    assert torch.equal(got, dense.generate(**how, do_sample=True)), "one seed on all ranks is right"
    beams = {**how, "num_beams": 3, "do_sample": False}
    assert torch.equal(sharded.generate(**beams), dense.generate(**beams))
    return said


def test_what_would_have_ranks_part_is_refused_on_all_of_them(ranks):
    for said in ranks(2, check_refusals):
        for found, words in zip(
            said,
            (
                *(r"ranks 0 and 1 disagree about the state of torch's random generator, .* torch.manual_seed",) * 2,
                r"ranks 0 and 1 disagree about the arguments: every rank of tp must call .* same \(input_ids",
                r"max_time 9.0 would end ranks of tp 2 at different tokens, .*: give max_new_tokens",
                *(rf"every rank of tp must call generate with the same \({name}" for name in PARTED),
                r"logits of all 37 tokens, but this rank's head gives (19|18) of them: .* 'colwise_gather_output'",
            ),
            strict=True,
        ):
            with pytest.raises(ValueError, match=words):
                raise ValueError(found)


def test_a_copy_guards_itself_and_a_saved_model_is_transformers_own():
    model = parallelize(build("llama"), tp=Axis(2, 0), check=False)
    assert "generate" in vars(model)
    twin = copy.deepcopy(model)
    assert twin.generate.__self__ is twin
    held = io.BytesIO()
    torch.save(model, held)
    held.seek(0)
    loaded = torch.load(held, weights_only=False)
    assert loaded.lm_head.weight.shape == model.lm_head.weight.shape
    assert "generate" not in vars(parallelize(build("llama")))  # one rank: nothing to part from
