"""`parallelize` on models that aren't ours: what they compute, their gradients and their training stay the same."""

import copy
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import distribute_module
from torch.nn import functional as F

from mpcore import (
    AdamW,
    Axis,
    ColumnParallelLinear,
    VocabParallelEmbedding,
    Zero,
    full_state_dict,
    load_full_state_dict,
    parallelize,
    prepare,
    vocab_parallel_cross_entropy,
)
from mpcore.gradients import reduce_gradients
from mpcore.interop.parallelize.plan import BASE_PLANS, Colwise, Experts, Hidden, LocalSizes, Vocab, model_plan
from mpcore.tools.simulation import RankError, simulate
from tests.equality import close, full_gradients
from tests.pool import mesh
from tests.quick import some

hf = pytest.importorskip("transformers")

VOCAB, TOLERANCE = 33, 1e-10
LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 4, "intermediate_size": 10, "max_position_embeddings": 16, "attn_implementation": "sdpa",
}  # fmt: skip


class Attention(nn.Module):
    """Grouped queries from one fused product, by the sizes it holds as attributes."""

    def __init__(self, dim=16, num_heads=8, num_kv_heads=4, head_dim=4):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.qkv = nn.Linear(dim, (num_heads + 2 * num_kv_heads) * head_dim)
        self.scale = nn.LayerNorm(head_dim)
        self.out = nn.Linear(num_heads * head_dim, dim)

    def forward(self, x):
        B, T, _ = x.shape
        heads = self.qkv(x).view(B, T, -1, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=2)
        q, k, v = (t.transpose(1, 2) for t in (self.scale(q), k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Own(nn.Module):
    """Not a Hugging Face model: a layer used under two names, a tied head, a frozen bias."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16, padding_idx=-3)
        self.attention = Attention()
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(16, 10), nn.Tanh(), nn.Linear(10, 16)) for _ in range(2))
        self.again = self.mlps[0][0]
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.mlps[1][0].bias.requires_grad_(False)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.attention(x)
        for mlp in self.mlps:
            x = x + mlp(x)
        return self.head(x + self.mlps[0][2](self.again(x)))


OWN_PLAN = {
    "embed": Vocab(), "attention": LocalSizes(("num_heads", "num_kv_heads")),
    "attention.qkv": Colwise(blocks=(32, 16, 16)), "attention.scale": "replicated_with_grad_allreduce",
    "**.out": "rowwise", "mlps.*.0": "colwise", "mlps.*.2": "rowwise", "head": "colwise_rep",
}  # fmt: skip


class T5(hf.T5ForConditionalGeneration):
    """An encoder-decoder, read through its decoder; the tokens of one are a part of the other's."""

    def forward(self, ids):
        return super().forward(ids, decoder_input_ids=ids[:, 1:5])


T5_PLAN = {
    "shared": "vocab", "**.SelfAttention": LocalSizes(("n_heads",)), "**.EncDecAttention": LocalSizes(("n_heads",)),
    "**.relative_attention_bias": "colwise",  # of each head
    **{f"**.{leaf}": "colwise" for leaf in ("q", "k", "v", "wi_0", "wi_1")},
    **{f"**.{leaf}": "rowwise" for leaf in ("o", "wo")},
}  # fmt: skip
T5_CONFIG = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 3, "num_heads": 4, "d_ff": 12, "num_layers": 2}
T5_CONFIG |= {"dropout_rate": 0.0, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": True}
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "attn_implementation": "sdpa"}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GEMMA = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "query_pre_attn_scalar": 4}


def mixtral():
    """Experts that compute in float64 on a CPU."""
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**LLAMA, num_local_experts=3, num_experts_per_tok=2))
    model.set_experts_implementation("eager")
    return model


MODELS = {
    "mixtral": mixtral,
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True)),
    "llama tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, tie_word_embeddings=True, pad_token_id=3)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**LLAMA, tie_word_embeddings=False)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**LLAMA, sliding_window=3)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**LLAMA | {"hidden_size": 32}, pad_token_id=None)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**LLAMA, **GEMMA)),
    "apertus": lambda: hf.ApertusForCausalLM(hf.ApertusConfig(**LLAMA, pad_token_id=None)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    "gpt2 untied": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, tie_word_embeddings=False)),
    "t5": lambda: T5(hf.T5Config(**T5_CONFIG)), "own": Own,
}  # fmt: skip
EXPERTS = {
    "qwen3 moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**LLAMA, num_experts=4, num_experts_per_tok=2,
     moe_intermediate_size=6)),
}  # fmt: skip
SHORT = ("mixtral", "llama tied", "phi3", "gpt2", "t5", "own")
GPT2_PLAN = {f"transformer.{pattern}": style for pattern, style in BASE_PLANS["gpt2"].items()}
GPT2_PLAN |= {"lm_head": "colwise_gather_output"}
PLANS = {"own": OWN_PLAN, "gpt2": GPT2_PLAN, "t5": T5_PLAN}


def build(name, dtype=torch.float64):
    """The model with random values in every parameter, biases and norms too."""
    model = (MODELS | EXPERTS)[name]()
    if name in EXPERTS:
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.4)
    return model.to(dtype).train()


def run(model, step=0):
    """Logits after a forward and a backward from a fixed random gradient."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (2, 6), generator=generator)
    ids[0, :2] = torch.tensor([3, VOCAB - 3])  # the padding ids above
    out = model(ids)
    logits = out if isinstance(out, torch.Tensor) else out.logits
    logits.backward(torch.rand(logits.shape, generator=generator).to(logits.dtype) - 0.5)
    return logits.detach()


def all_same(got, want, what):
    assert got.keys() == want.keys(), f"{what}: {got.keys() ^ want.keys()} on one side only"
    for name in want:
        close(got[name], want[name], f"{what} of {name}", TOLERANCE)


def check_equal(name):
    """Logits, gradients, three steps of SGD, and the state dict under the names and shapes of the original."""
    tp = mesh(tp=torch.distributed.get_world_size()).tp
    dense = build(name)
    sharded = parallelize(copy.deepcopy(dense), PLANS.get(name, "auto"), tp)
    assert sharded.state_dict().keys() == dense.state_dict().keys()
    before = full_state_dict(sharded)
    for key, value in dense.state_dict().items():
        assert torch.equal(before[key], value), f"{key} after parallelize"
    assert tp.size == 1 or sum(p.numel() for p in sharded.parameters()) < sum(p.numel() for p in dense.parameters())
    # Gemma's norms compute in fp32 whatever the model's dtype, and its sums over heads would differ by fp32's error.
    with mock.patch.object(torch.Tensor, "float", lambda x: x):
        for step in range(3):
            dense.zero_grad(), sharded.zero_grad()
            want, got = run(dense, step), run(sharded, step)
            reduce_gradients(sharded)
            close(got, want, f"logits of step {step}", TOLERANCE)
            all_same(full_gradients(sharded), full_gradients(dense), f"gradient in step {step}")
            for model in (dense, sharded):
                torch.optim.SGD(model.parameters(), lr=0.01).step()
    all_same(full_state_dict(sharded), dense.state_dict(), "value after training")


@pytest.mark.parametrize(
    ("size", "name"),
    some((4, "llama"), *((2, name) for name in SHORT), of=[(size, name) for size in (1, 2, 4) for name in MODELS]),
)
def test_logits_gradients_and_training_equal_the_original(ranks, size, name):
    ranks(size, check_equal, name)


@pytest.mark.parametrize("name", MODELS)
def test_on_one_rank_the_results_are_bitwise_those_of_the_original(name):
    original = build(name, torch.bfloat16)
    swapped = copy.deepcopy(original)
    parameters = list(swapped.parameters())
    assert parallelize(swapped, PLANS.get(name, "auto")) is swapped
    assert all(a is b for a, b in zip(swapped.parameters(), parameters, strict=True))
    assert torch.equal(run(swapped), run(original))
    for (key, a), b in zip(swapped.named_parameters(), original.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), key
        assert a.grad is None or torch.equal(a.grad, b.grad), key


LAYOUTS = [
    (2, {"ep": 2}), (2, {"tp": 2, "ep": 2, "etp": 1}), (2, {"tp": 2, "etp": 1}), (4, {"tp": 2, "ep": 2}),
    (4, {"ep": 4}), (4, {"ep": 2}), (4, {"tp": 2, "ep": 2, "etp": 1}),
]  # fmt: skip


def token_loss(output, target):
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten(), reduction="sum")


def balanced_loss(ranks, output, target):
    """The sum over this rank's tokens, and its share of the balance loss for each token of the batch of `ranks`."""
    balance = output.get("aux_loss", 0.0)
    return token_loss(output, target) + 0.3 * balance * target.numel() * ranks


@mock.patch.object(torch.Tensor, "float", lambda x: x)
def check_expert_training(zero, balance, **sizes):
    """Three steps of AdamW: losses, norms of gradients, and weights are those of one process."""
    on = mesh(**sizes)
    dense = build("qwen3 moe")
    dense.config.output_router_logits = balance
    if balance and on.ep.size * on.etp.size > on.tp.size:  # ranks of the experts have other tokens
        with pytest.raises(ValueError, match=r"aux_loss balances .* data=mesh\.data"):
            parallelize(copy.deepcopy(dense), tp=on.tp, ep=on.ep, etp=on.etp)(torch.ones(1, 2, dtype=torch.long))
    model = parallelize(copy.deepcopy(dense), tp=on.tp, ep=on.ep, etp=on.etp, data=on.data)
    trained = prepare(
        model, on, blocks=model.model.layers, loss=partial(balanced_loss, on.data.size), initialize=False,
        data=Zero(zero), optimizer=lambda model: AdamW(model, lr=1e-2),
    )  # fmt: skip
    optimizer = AdamW(dense, lr=1e-2)
    mine = slice(*(4 * at // on.data.size for at in (on.data.rank, on.data.rank + 1)))
    for step in range(3):
        ids = torch.randint(VOCAB, (4, 7), generator=torch.Generator().manual_seed(step))
        x, target = ids[:, :-1], ids[:, 1:]
        mask = torch.ones_like(x)
        mask[0, -2:] = 1 - balance
        loss = balanced_loss(1, dense(x, attention_mask=mask), target) / target.numel()
        loss.backward()
        trained.forward_backward(x[mine], target[mine], attention_mask=mask[mine])
        norms = trained.clip_gradients(1.0), nn.utils.clip_grad_norm_(dense.parameters(), 1.0)
        close(torch.as_tensor(float(norms[0])), torch.as_tensor(float(norms[1])), "norm of the gradients", TOLERANCE)
        optimizer.step()
        optimizer.zero_grad()
        assert trained.optimizer_step().loss == pytest.approx(loss.item(), rel=TOLERANCE)
    with trained.parameters() as whole:
        all_same(full_state_dict(whole), dense.state_dict(), "value after training")
    if balance and on.ep.size == 1 and on.data.rank == 0:  # a rank of data generates alone
        model.generate(ids[:1, :3], max_new_tokens=2, do_sample=False)
    if balance and zero == 0 and on.data.size > 1:
        for what, arguments in {"labels=": {"labels": ids}, "return_dict=False": {"return_dict": False}}.items():
            with pytest.raises(ValueError, match=what):
                model(ids, **arguments)


def test_data_ranks_agree_on_the_balance_loss_before_they_sum_it():
    def work(on, asked, argument):
        model = build("qwen3 moe")
        model.config.output_router_logits = asked and on.data.rank == 0
        model = parallelize(model, data=on.data)
        model(torch.ones(1, 2, dtype=torch.long), output_router_logits=argument and on.data.rank == 0)

    for asked, argument in ((True, False), (False, True)):
        with pytest.raises(RankError, match=r"ValueError: .*output_router_logits"):
            simulate(partial(work, asked=asked, argument=argument), dp=2)


TRAINED = [(size, zero, sizes, balance) for size, sizes in LAYOUTS for zero in range(4) for balance in (False, True)]
TRAINED.append((2, 0, {}, True))


@pytest.mark.parametrize(
    ("size", "zero", "sizes", "balance"),
    some(
        (4, 2, {"tp": 2, "ep": 2}, False), (4, 3, {"ep": 2}, True), (2, 0, {}, True),
        (2, 1, {"tp": 2, "ep": 2, "etp": 1}, True), of=TRAINED,
    ),
)  # fmt: skip
def test_training_with_sharded_experts_equals_one_process(ranks, size, zero, sizes, balance):
    """With transformers' balance loss, of the global batch, and without it."""
    ranks(size, partial(check_expert_training, **sizes), zero, balance)


def check_sharded_logits():
    """With "colwise" the head leaves its logits sharded, for the sharded cross-entropy."""
    tp = mesh(tp=4).tp
    dense = build("own")
    sharded = parallelize(copy.deepcopy(dense), OWN_PLAN | {"head": "colwise"}, tp)
    ids = torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(9))
    want = F.cross_entropy(dense(ids).flatten(0, 1), ids.flatten())
    got = vocab_parallel_cross_entropy(sharded(ids), ids, tp=tp, vocab_size=VOCAB)
    close(got.detach(), want.detach(), "loss", TOLERANCE)
    want.backward()
    got.backward()
    reduce_gradients(sharded)
    all_same(full_gradients(sharded), full_gradients(dense), "gradient")


def check_embedding_columns():
    """Of an embedding whole or cut between ranks, uneven, as its style says; the padding's row gets no gradient."""
    tp = mesh(tp=3).tp
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Embedding(7, 5, padding_idx=-1), nn.Linear(5, 4)).double()
    ids = torch.randint(7, (2, 6), generator=torch.Generator().manual_seed(9))
    dense(ids).square().sum().backward()
    for plan in ({"0": "colwise", "1": "rowwise"}, {"0": "colwise_gather_output"}):
        sharded = copy.deepcopy(dense)
        sharded.zero_grad()
        parallelize(sharded, plan, tp)
        assert sharded[0].weight.shape == (7, [2, 2, 1][tp.rank])
        y = sharded(ids)
        close(y.detach(), dense(ids).detach(), "output", TOLERANCE)
        y.square().sum().backward()
        all_same(full_gradients(sharded), full_gradients(dense), "gradient")


def check_torch_encoder():
    """In evaluation torch's fast paths read the weights of `linear1` and `linear2` past the layers."""
    tp = mesh(tp=2).tp
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dtype=torch.float64)
    dense = nn.TransformerEncoder(layer, 2).eval()
    sharded = parallelize(copy.deepcopy(dense), {"layers.*.linear1": "colwise", "layers.*.linear2": "rowwise"}, tp)
    x, pad = torch.randn(2, 5, 8, dtype=torch.float64), torch.arange(5).repeat(2, 1) > torch.tensor([[2], [4]])
    with torch.no_grad():
        close(sharded(x), dense(x), "an encoder in evaluation", TOLERANCE)
        got, want = sharded(x, src_key_padding_mask=pad), dense(x, src_key_padding_mask=pad)
        close(got[~pad], want[~pad].view(got[~pad].shape), "an encoder of padded rows", TOLERANCE)


def on(rank, size=4):
    return Axis(size, rank, name="tp")


def test_ties_stay_and_the_end_that_the_plan_does_not_name_follows():
    for plan in ({"embed": "vocab"}, {"head": "colwise_rep"}, {"embed": "rowwise", "head": "colwise"}):
        model = parallelize(build("own"), plan, on(1))
        assert isinstance(model.embed, VocabParallelEmbedding)
        assert isinstance(model.head, ColumnParallelLinear)
        assert model.head.weight is model.embed.weight
        assert model.head.gather_output == (plan.get("head") != "colwise")
    model = parallelize(build("own"), OWN_PLAN, on(1))
    assert model.again is model.mlps[0][0]
    assert model.embed.padding_idx == VOCAB - 3
    untied = parallelize(build("gpt2 untied"), tp=on(1))
    assert type(untied.lm_head) is nn.Linear
    assert untied.lm_head.weight.shape == (VOCAB, 16)


def test_dtype_device_requires_grad_training_mode_marks_and_random_state_stay():
    model = build("own", torch.bfloat16).eval()
    model.mlps[1].train()
    model.head.weight.requires_grad_(False)
    model.attention.qkv.weight.no_decay = True
    wanted = {n: (p.dtype, p.device, p.requires_grad) for n, p in model.named_parameters()}
    state = torch.get_rng_state()
    parallelize(model, OWN_PLAN, on(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert {n: (p.dtype, p.device, p.requires_grad) for n, p in model.named_parameters()} == wanted
    assert not model.attention.qkv.training
    assert model.mlps[1][0].training
    assert model.attention.qkv.weight.no_decay
    assert (model.attention.num_heads, model.attention.num_kv_heads, model.attention.head_dim) == (2, 1, 4)


def test_a_model_on_the_meta_device_is_cut_there_and_takes_the_whole_state_dict():
    full = build("gpt2").state_dict()
    with torch.device("meta"):
        model = MODELS["gpt2"]().double()
    model = parallelize(model, GPT2_PLAN, on(1)).to_empty(device="cpu")
    model.tie_weights()
    load_full_state_dict(model, full)
    want = parallelize(build("gpt2"), GPT2_PLAN, on(1))
    for (name, a), b in zip(model.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_the_models_own_plan_and_rules_laid_over_it():
    assert model_plan(build("gpt2"))["transformer.h.*.attn.c_attn"] == Colwise(blocks=3)
    assert model_plan(build("gpt2").transformer)["h.*.mlp.c_fc"] == "colwise"
    llama = build("llama")
    own = model_plan(llama)
    assert own["model.layers.*.mlp.up_proj"] == model_plan(llama.model)["layers.*.mlp.up_proj"] == "colwise"
    plan = own | {"model.layers.1.mlp.**": "replicate", "model.layers.1.self_attn.*_proj": "replicate"}
    plan = {k: v for k, v in plan.items() if "*" not in k or ".1." in k} | {"model.layers.0.mlp.gate_proj": "replicate"}
    parallelize(llama, plan, on(0))
    assert type(llama.model.layers[1].mlp.up_proj) is nn.Linear
    assert type(llama.lm_head) is ColumnParallelLinear
    model = nn.ModuleDict({"fc": nn.Linear(4, 6)})
    model._tp_plan = {"fc": "colwise", "of_another_version": "rowwise"}
    assert type(parallelize(model)["fc"]) is ColumnParallelLinear
    model["fc"] = Scaled(4, 6)
    assert type(parallelize(model)["fc"]) is Scaled, "without tp a plan that doesn't fit isn't needed"
    with pytest.raises(ValueError, match=r"fc is a Scaled .*skip="):
        parallelize(model, tp=on(1))
    layer = nn.Linear(4, 6)
    assert torch.equal(copy.deepcopy(parallelize(layer, {"": "colwise"}, on(1))).weight, layer.weight[2:4])


class Scaled(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def odd():
    """A model with a part for each thing that can't be swapped."""
    model = nn.ModuleDict({"own": Scaled(8, 8), "norm": nn.LayerNorm(8), "hooked": nn.Linear(8, 8)})
    model["hooked"].register_forward_hook(lambda *_: None)
    model["few"] = nn.Embedding(3, 8)
    model["clipped"] = nn.Embedding(8, 8, max_norm=1.0)
    model["sparse"], model["by count"] = nn.Embedding(8, 8, sparse=True), nn.Embedding(8, 8, scale_grad_by_freq=True)
    model["normed"] = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    model["a"], model["b"], model["c"] = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    model["b"].weight = model["a"].weight
    model["c"].weight = model["a"].weight
    model["mlp"] = nn.Sequential(nn.Linear(8, 8), nn.PReLU(), nn.Linear(8, 8))
    model["heads"] = nn.ModuleDict({"qkv": nn.Linear(8, 24), "each": nn.Linear(4, 2)})
    model["heads"].head_dim = 4
    model["fused"] = nn.ModuleDict({"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8)})
    model["mha"] = nn.MultiheadAttention(8, 2)
    model["held"] = nn.ModuleDict({"more": nn.Linear(8, 8)})
    model["held"]["more"].scale = nn.Parameter(torch.ones(1))
    model["counted"] = nn.ModuleDict({"q": nn.Linear(8, 24)})
    model["counted"].head_dim, model["counted"].config = 4, SimpleNamespace(num_attention_heads=3)
    return model


BAD = {
    "one count of heads forgotten": ("own", OWN_PLAN | {"attention": LocalSizes(("num_heads",))}, 2,
     r"attention\.num_kv_heads is 4 on each of 2 ranks"),
    "projections fused": ("odd", {"fused.qkv": "colwise", "fused.out": "rowwise"}, 2, r"fused\.qkv has 24 output"),
    "a style for experts": ("own", {"head": "moe_tp_experts"}, 2, "head: its hidden dimension is unknown"),
    "heads": ("gpt2", GPT2_PLAN, 3, "c_attn: 4 heads of 4 output features are not a multiple of the tp size 3"),
    "kv heads": ("llama", "auto", 8, "k_proj: 4 heads of 4 output features are not a multiple of the tp size 8: take"),
    "local sizes": ("own", {"attention": LocalSizes(("num_heads",))}, 3, "num_heads 8 is not a multiple of the tp"),
    "no local size": ("own", {"attention": LocalSizes(("heads",))}, 2, "attention.heads doesn't exist, so it is no"),
    "a head's norm": ("own", {"attention.qkv": "colwise"}, 2, "attention.scale has a parameter 'weight' of one"),
    "a product with each head": ("odd", {"heads.qkv": "colwise"}, 2, "heads.each has a parameter 'weight' of one"),
    "a scalar among sharded features": ("odd", {"mlp.0": "colwise", "mlp.2": "rowwise"}, 2, "mlp.1 has a parameter"),
    "blocks": ("own", {"head": Colwise(blocks=2)}, 2, "head: 33 output features are not a multiple of 2 blocks"),
    "sums of blocks": ("own", {"head": Colwise(blocks=(30, 2))}, 2, r"head: blocks \(30, 2\) have a sum of 32"),
    "a unit": ("own", {"head": Colwise(unit=2)}, 2, "head: 33 output features are not a multiple of the unit 2"),
    "gathered blocks": ("own", {"attention.qkv": Colwise(4, True)}, 2, "attention.qkv: gather_output can't put 4"),
    "too few features": ("own", {"mlps.*.0": "colwise"}, 16, "mlps.0.0: out_features 10 is smaller than the tp size"),
    "too few rows": ("odd", {"few": "vocab"}, 4, "few: num_embeddings 3 is smaller than the tp size 4"),
    "an embedding in blocks": ("own", {"embed": Colwise(2)}, 2, "embed: an embedding of several blocks, or"),
    "a tied table's columns": ("own", {"embed": "colwise"}, 2, "one tied weight, which the plan cuts in two ways"),
    "heads of T5": ("t5", T5_PLAN, 3, "4 heads of 3 output features are not a multiple of the tp size 3"),
    "a linear layer's vocabulary": ("own", {"mlps.0.0": "vocab"}, 2, "'vocab' is for embeddings, and this is a Linear"),
    "a tie cut in two ways": ("own", {"embed": "vocab", "head": "rowwise"}, 2, "one tied weight"),
    "a tie left whole": ("own", {"embed": "vocab", "head": "replicate"}, 2, "embed.weight and head.weight are one"),
    "a tie of three": ("odd", {"a": "colwise", "b": "colwise", "c": "rowwise"}, 2, "a.weight and c.weight are one"),
    "a norm": ("odd", {"norm": "colwise"}, 2, "norm is a LayerNorm, which"),
    "a forward of its own": ("odd", {"own": "colwise"}, 2, "own is a Scaled with a forward of its own"),
    "hooks": ("odd", {"hooked": "colwise"}, 2, "hooked has hooks"),
    "torch's attention": ("odd", {"mha.out_proj": "rowwise"}, 2, "mha.out_proj is part of an nn.MultiheadAttention"),
    "a clipped embedding": ("odd", {"clipped": "vocab"}, 2, "clipped: max_norm"),
    "a sparse embedding": ("odd", {"sparse": "vocab"}, 2, "sparse: max_norm, scale_grad_by_freq and sparse need the"),
    "gradients by count": ("odd", {"by count": "vocab"}, 2, "by count: max_norm, scale_grad_by_freq and sparse need"),
    "a unit of columns": ("odd", {"few": Colwise(unit=3)}, 2, "few: embedding_dim 8 is not a multiple of the unit 3"),
    "size of a part": ("odd", {"heads": LocalSizes(("head_dim", "qkv"))}, 2, "qkv is Linear.*so it is no size"),
    "no parameter of experts": ("odd", {"norm": Experts({"weight": Hidden(-1)})}, 2, "norm: it has no parameter '"),
    "blocks of experts": ("own", {"mlps.0.0": Experts({"weight": Hidden(-2, blocks=4)})}, 2, "10 features .* not 4 b"),
    "units of experts": ("own", {"mlps.0.0": Experts({"weight": Hidden(-2, 5, 2)})}, 2, "5 blocks of at least 2 units"),
    "more parameters": ("odd", {"held.more": "colwise"}, 2, r"with parameters \['bias', 'scale', 'weight'\], of"),
    "heads of a config": ("odd", {"counted.q": "colwise"}, 2, "num_attention_heads 3 is not a multiple of the tp"),
    "a parametrized weight": ("odd", {"normed": "colwise"}, 2, "normed has no plain weight"),
}  # fmt: skip


def check_gates():
    axis = mesh(tp=2).tp
    torch.manual_seed(0)
    model = nn.ModuleDict({"q": nn.Linear(8, 24), "gate": nn.Linear(8, 6)})
    model.head_dim = 4
    want = {name: layer.weight.detach().clone() for name, layer in model.items()}
    parallelize(model, {"q": "colwise", "gate": "colwise"}, axis)
    for name, rows in (("q", 12), ("gate", 3)):
        assert torch.equal(model[name].weight, want[name][axis.rank * rows :][:rows])


def anatomy(model):
    modules = [(n, type(m), getattr(m, "num_heads", None)) for n, m in model.named_modules(remove_duplicate=False)]
    return modules, [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)]


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_changes(case):
    name, plan, size, message = BAD[case]
    model = odd() if name == "odd" else build(name)
    before = anatomy(model)
    with pytest.raises(ValueError, match=message):
        parallelize(model, plan, on(0, size))
    assert anatomy(model) == before


class MinGPT(nn.Module):
    """Attention as minGPT's: with `n_head` undivided its heads would be too narrow, and nothing else would tell."""

    def __init__(self, fused):
        super().__init__()
        self.n_head, self.fused = 4, fused
        self.qkv = nn.ModuleList([nn.Linear(16, 48)] if fused else [nn.Linear(16, 16) for _ in range(3)])
        self.proj = nn.Linear(16, 16)

    def forward(self, x):
        found = self.qkv[0](x).chunk(3, -1) if self.fused else [layer(x) for layer in self.qkv]
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in found)
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def check_counted_heads(fused):
    axis = mesh(tp=2).tp
    torch.manual_seed(0)
    dense, x = MinGPT(fused).double(), torch.randn(2, 5, 16, dtype=torch.float64)
    plan = {"qkv.*": Colwise(3 if fused else 1, unit=4), "proj": "rowwise"}
    with pytest.raises(
        ValueError, match=r"the model itself\.n_head is 4 on each of 2 ranks, and the plan shards qkv\.0"
    ):
        parallelize(copy.deepcopy(dense), plan, axis)
    keeping = plan | {"": LocalSizes((), kept=("n_head",))}
    with pytest.raises(ValueError, match=r"(other values|fails) on 2 ranks"):
        parallelize(copy.deepcopy(dense), keeping, axis)
    kept = parallelize(copy.deepcopy(dense), keeping, axis, check=False)
    kept.n_head = 2  # as whoever keeps an attribute may do
    for sharded in (kept, parallelize(copy.deepcopy(dense), plan | {"": LocalSizes(("n_head",))}, axis)):
        close(sharded(x).detach(), dense(x).detach(), "attention", TOLERANCE)


def check_disagreement():
    axis = mesh(tp=2).tp
    for what, entry in (
        ("weights", "weights, which"),
        ("plans", "plan: "),
        ("mistakes", "error: None and .*'nowhere'"),
    ):
        model, plan = build("own"), dict(OWN_PLAN)
        if axis.rank == 1 and what == "weights":
            torch.nn.init.normal_(model.mlps[0][0].weight)
        elif axis.rank == 1:
            plan["head" if what == "plans" else "nowhere"] = "colwise"
        before = anatomy(model)
        with pytest.raises(ValueError, match=rf"ranks 0 and 1 disagree about the model and plan .*\({entry}"):
            parallelize(model, plan, axis)
        assert anatomy(model) == before


def check_second():
    """An uneven vocabulary has other shapes on each rank, and DTensors no values to compare: neither is the mistake."""
    axis = mesh(tp=2)
    model = parallelize(build("own"), OWN_PLAN, axis.tp)
    with pytest.raises(ValueError, match="embed is a VocabParallelEmbedding already: parallelize a model once"):
        parallelize(model, OWN_PLAN, axis.tp)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    distribute_module(model[0], axis.device_mesh["tp"])
    with pytest.raises(ValueError, match=r"0 has no plain weight: .* parallelize before"):
        parallelize(model, {"0": "colwise"}, axis.tp)
    assert parallelize(model, {"1": "rowwise"}, axis.tp)[1].weight.shape == (4, 3)
    with FakeTensorMode():
        fake = parallelize(nn.Sequential(nn.Linear(4, 6)), {"0": "colwise"}, axis.tp)
    assert fake[0].weight.shape == (3, 4)
    with pytest.raises(ValueError, match=r"^0\.weight has no shape yet: run the model once"):
        parallelize(nn.Sequential(nn.LazyLinear(4)), {"0": "colwise"}, axis.tp)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(("size", "check", "args"), [
    (4, check_sharded_logits, ()), (3, check_embedding_columns, ()), (2, check_torch_encoder, ()),
    (2, check_gates, ()), (2, check_counted_heads, (True,)), (2, check_counted_heads, (False,)),
    (2, check_disagreement, ()), (2, check_second, ()),
])  # fmt: skip
def test_special_models_on_ranks(ranks, size, check, args):
    ranks(size, check, *args)


def test_a_pipeline_stage_takes_the_patterns_of_its_own_modules():
    """Under the whole model's numbers, as mpcore's stages have them, or under its own. Fewer stars win."""

    def block():
        return nn.ModuleDict({"fc1": nn.Linear(4, 6), "fc2": nn.Linear(6, 4)})

    plan = {"blocks.*.fc1": "colwise", "blocks.*.fc2": "rowwise"} | {f"blocks.5.fc{i}": "replicate" for i in (1, 2)}
    for rules in (plan, dict(reversed(plan.items()))):
        stage = nn.ModuleDict({"blocks": nn.ModuleDict({"4": block(), "5": block()})})
        parallelize(stage, rules, on(0, 2))
        assert [type(stage["blocks"][i]["fc1"]) for i in "45"] == [ColumnParallelLinear, nn.Linear]
    own = nn.ModuleDict({"blocks": nn.ModuleList([block(), block()])})
    for rules, said in (
        (plan, r"'blocks\.0\.fc1' to"),
        ({"blocks.*.fc1": "colwise", "embed": "vocab"}, r"\['blocks'\]"),
    ):
        with pytest.raises(ValueError, match=said):
            parallelize(own, rules, on(0, 2))
