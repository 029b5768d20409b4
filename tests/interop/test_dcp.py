"""`torch.distributed.checkpoint` of sharded models: any layout to any other, and to plain torch."""

from __future__ import annotations

import json
import math
import pickle
import random
import shutil
import tempfile
from contextlib import nullcontext, suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mpcore as mp
from examples.gpt.config import GPTConfig, MoEConfig
from examples.gpt.model import GPT
from mpcore import AdamW, Axis, ColumnParallelLinear, Mesh
from mpcore.checkpoint import diff, load, save, verify
from mpcore.checkpoint.tensor_file import HEADER_LIMIT
from mpcore.interop.dcp import dcp_state_dict
from mpcore.interop.dcp_files import export_dcp, import_dcp
from mpcore.interop.torchtitan import load_torchtitan
from mpcore.sharding.dcp import mark
from mpcore.sharding.declare import Sharding, cut
from mpcore.sharding.local import local_tensor
from mpcore.tools.checkpoint import main
from tests.checkpoint.test_mutated_folders import mutate_bytes
from tests.pool import mesh, on_ranks
from tests.test_checkpoint import CONFIG, TIED, Run, same_bits

EXPERTS = replace(CONFIG, moe=MoEConfig(experts=4, d_ff=21))


def check_save(sizes: dict, folder: str, config: GPTConfig, zero: int) -> dict[str, Tensor]:
    run = Run(mesh(**sizes), config, zero % 10, replicate=zero // 10 or 1)
    if config.moe is None:  # else: the initial values, and moments of zero
        run.step(0)
    state = dcp_state_dict(run.model, run.mesh, run.optimizer)
    want = run.full()
    saving: Any = dcp.async_save(state, checkpoint_id=folder)
    for p in run.model.parameters():
        local_tensor(p.detach()).zero_()  # what is written is a copy
    saving.result()
    return want


def check_load(sizes: dict, folder: str, config: GPTConfig, zero: int, used: bool) -> dict[str, Tensor]:
    run = Run(mesh(**sizes), config, zero % 10, seed=6, replicate=zero // 10 or 1)
    if used and config.moe is None:
        run.step(9)
        run.evaluate()
    dcp.load(dcp_state_dict(run.model, run.mesh, run.optimizer), checkpoint_id=folder)
    return run.full()


def check_fsdp2(folder: str, size: int) -> dict[str, Tensor]:
    model = GPT(CONFIG, Mesh(), dtype=torch.float64)  # the names of the unsharded model
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder)
    return {f"model/{name}": x.full_tensor().detach() for name, x in model.named_parameters()}  # pyright: ignore


@pytest.mark.parametrize(("writer", "zero", "config"), [
    pytest.param({"tp": 2}, 0, CONFIG, id="tp2", marks=pytest.mark.slow),
    pytest.param({"tp": 3, "dp": 2}, 3, CONFIG, id="tp3-dp2-zero3", marks=pytest.mark.slow),
    pytest.param({"dp": 3}, 3, CONFIG, id="dp3-zero3"),
    pytest.param({"tp": 2, "ep": 2}, 0, EXPERTS, id="tp2-ep2", marks=pytest.mark.slow),
    pytest.param({"tp": 2, "pp": 2}, 0, TIED, id="tp2-pp2-tied"),
])  # fmt: skip
def test_dcp_of_any_layout_loads_on_any_other(request, tmp_path, writer, zero, config):
    folder, want = str(tmp_path / "dcp"), {}
    ranks = request.getfixturevalue("ranks" if math.prod(writer.values()) < 5 else "eight_ranks")
    for part in ranks(math.prod(writer.values()), check_save, writer, folder, config, zero):
        want |= part
    readers = [({}, 0), ({"tp": 4}, 0), ({"dp": 3}, 2), ({"tp": 2, "dp": 2}, 1), ({"dp": 4}, 23), ({"pp": 2}, 0)]
    readers = readers if request.node.get_closest_marker("slow") else readers[config is CONFIG :: 2]
    for i, (sizes, zero) in enumerate(readers):
        got: dict[str, Tensor] = {}
        for part in ranks(math.prod(sizes.values()), check_load, sizes, folder, config, zero, i % 2 == 0):
            got |= part
        same_bits(got, want)
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    model = {name: want[f"model/{name}"] for name in whole["model"] if f"model/{name}" in want}
    same_bits({name: whole["model"][name] for name in model}, model)
    for name, slots in whole["optimizer"]["state"].items():
        same_bits({f"optimizer/{slot}/{name}": x for slot, x in slots.items()},
                  {f"optimizer/{slot}/{name}": want[f"optimizer/{slot}/{name}"] for slot in slots})  # fmt: skip
    if config is CONFIG:
        for part in ranks(2, check_fsdp2, folder, 2):
            same_bits(part, {name: want[name] for name in part})


@on_ranks(2)
def test_stages_of_unequal_names_and_reads_of_values_are_refused() -> None:
    on = mesh(pp=2)
    with pytest.raises(ValueError, match="ranks 0 and 1 have different tensors named 0"):
        dcp_state_dict(nn.Sequential(nn.Linear(2, 2)), on)
    stage = nn.Sequential(nn.Identity())
    stage.register_buffer("scale", torch.ones(2))
    with pytest.raises(ValueError, match="ranks 0 and 1 have different tensors named scale"):
        dcp_state_dict(stage, on)
    tied = GPT(TIED, Mesh())
    assert dcp_state_dict(tied).keys() == tied.state_dict().keys()
    layer = ColumnParallelLinear(4, 6, tp=mesh(tp=2).tp)
    state = dcp_state_dict(layer, Mesh(tp=layer.tp))["weight"]
    for read in (lambda: state + 1, lambda: pickle.dumps(state), lambda: torch.zeros(6, 4).copy_(state)):
        with pytest.raises(ValueError, match="full_state_dict"):
            read()


OPTIMIZERS: dict[str, Any] = {
    name: lambda model, name=name: getattr(torch.optim, name)(model.parameters(), weight_decay=0.1)
    for name in ("AdamW", "Adam", "RAdam", "RMSprop", "Adamax", "Adadelta", "Adagrad", "NAdam", "ASGD")
} | {
    "mpcore.AdamW": lambda model: AdamW(model, weight_decay=0.1), "mpcore.Muon": lambda model: mp.Muon(model),
    "Adam of eps 0": lambda model: torch.optim.Adam(model.parameters(), eps=0.0, amsgrad=True),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters()),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD of dampening": lambda model: torch.optim.SGD(model.parameters(), momentum=0.9, dampening=0.5),
}  # fmt: skip
NOT_FROM_ZEROS = ("NAdam", "ASGD", "Rprop", "SGD of dampening")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_before_the_first_step_changes_nothing_and_is_loaded(tmp_path, name):
    """With gradients, and with a parameter that is never used."""
    torch.manual_seed(0)
    nets: list[Any] = [nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)) for _ in range(3)]
    nets[1].load_state_dict(nets[0].state_dict())
    a, b, fresh = (OPTIMIZERS[name](net) for net in nets)
    for step in range(3):
        for net, optimizer in zip(nets[:2], (a, b), strict=True):
            optimizer.zero_grad()
            net[0](torch.ones(1, 3)).sin().sum().backward()
            if net is nets[0] and step == 0:
                refused = pytest.raises(ValueError, match=rf"{name.split()[0]} has no state of 0\.weight")
                with refused if name in NOT_FROM_ZEROS else nullcontext():
                    dcp_state_dict(net, optimizer=optimizer)
            optimizer.step()
    same_bits(nets[0].state_dict(), nets[1].state_dict())
    if name in NOT_FROM_ZEROS:
        return
    dcp.save(dcp_state_dict(nets[0], optimizer=a), checkpoint_id=tmp_path, no_dist=True)
    nets[2](torch.ones(1, 3)).sum().backward()
    grad = nets[2][0].weight.grad.clone()
    dcp.load(dcp_state_dict(nets[2], optimizer=fresh), checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(nets[2][0].weight.grad, grad)
    for p, q in zip(nets[0].parameters(), nets[2].parameters(), strict=True):
        assert torch.equal(p, q)
        same_bits(fresh.state[q], a.state[p])


def test_a_run_before_its_first_step_an_empty_buffer_and_an_extra_state(tmp_path):
    net = nn.Linear(3, 2)
    net.register_buffer("none", torch.empty(0, 3))
    run = mp.prepare(net, Mesh(), blocks=[], loss=lambda y, _: y.sum(), optimizer=AdamW, initialize=False)
    dcp.save(dcp_state_dict(run.model, optimizer=run.optimizer), checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_dcp(tmp_path / "dcp", tmp_path / "checkpoint")
    export_dcp(tmp_path / "checkpoint", tmp_path / "again")
    dcp_to_torch_save(tmp_path / "again", tmp_path / "whole.pt")
    assert torch.load(tmp_path / "whole.pt")["none"].shape == (0, 3)
    dcp.load(dcp_state_dict(run.model), checkpoint_id=tmp_path / "again", no_dist=True)
    extra = type("Extra", (nn.Linear,), {"get_extra_state": lambda self: 3})
    with pytest.raises(ValueError, match="1 modules have an extra state, such as 0"):
        dcp_state_dict(nn.Sequential(extra(2, 2)))


def test_a_shard_over_two_axes_is_refused_with_both() -> None:
    axes = [Axis(2, 1, name="tp"), Axis(3, 2, name="ep")]
    x = torch.ones(2, 2)
    mark(x, "w", Sharding((4, 6), tuple(cut(2 * axis.size, axis, dim) for dim, axis in enumerate(axes))))
    with pytest.raises(ValueError, match=r"shape \(4, 6\), sharded over tp \(2 ranks\) and ep \(3 ranks\)"):
        x.__create_write_items__("w", x)  # type: ignore[attr-defined]


def check_masters(folder: str, sizes: dict, saves: bool) -> dict[str, Tensor]:
    on = mesh(**sizes)
    torch.manual_seed(0)
    wide = GPT(replace(CONFIG, dropout=0.0), on, dtype=torch.float32)
    if not saves:
        dcp.load({"model": dcp_state_dict(wide, on)}, checkpoint_id=folder)
    model = GPT(replace(CONFIG, dropout=0.0), on, dtype=torch.bfloat16)
    optimizer = AdamW(model, lr=0.01)
    if saves:
        model(torch.zeros(2, 6, dtype=torch.int64)).float().square().sum().backward()
        optimizer.step()
        saving: Any = dcp.async_save(dcp_state_dict(model, on, optimizer), checkpoint_id=folder)
        for held in (*model.parameters(), *(state["master"] for state in optimizer.state.values())):
            held.detach().zero_()
        saving.result()
    else:
        dcp.load(dcp_state_dict(model, on, optimizer), checkpoint_id=folder)
        dcp.save(dcp_state_dict(model, on, optimizer), checkpoint_id=f"{folder}-again")
    return mp.full_state_dict(wide)


def test_master_weights_come_back(ranks, tmp_path):
    """In a bfloat16 run with master weights, and in a float32 model, which got the rounded weights."""
    folder = str(tmp_path / "dcp")
    ranks(2, check_masters, folder, {"tp": 2}, True)
    (wide,) = ranks(1, check_masters, folder, {}, False)
    for name in ("dcp", "dcp-again"):
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
    a, b = (torch.load(tmp_path / f"{name}.pt") for name in ("dcp", "dcp-again"))
    same_bits(b["model"], a["model"])
    same_bits(wide, {name: a["optimizer"]["state"][name]["master"] for name in wide})
    assert a["optimizer"]["state"].keys() == b["optimizer"]["state"].keys()
    for name, slots in a["optimizer"]["state"].items():
        assert slots["master"].dtype == torch.float32
        assert slots["step"] == 1
        same_bits(b["optimizer"]["state"][name], slots)


def check_write(path: str, sizes: dict, zero: int) -> dict[str, Tensor]:
    run = Run(mesh(**sizes), zero=zero)
    run.step(0)
    run.save(path, 1, beside={"tokenizer.json": b"{}"})
    return run.full()


@pytest.mark.parametrize(("sizes", "zero"), [({"tp": 3}, 0), ({"tp": 2, "dp": 2}, 3)])
def test_checkpoint_convert_writes_and_reads_dcp(ranks, tmp_path, sizes, zero, capsys):
    want: dict[str, Tensor] = {}
    paths = [str(tmp_path / name) for name in ("checkpoint", "dcp", "again")]
    for part in ranks(math.prod(sizes.values()), check_write, paths[0], sizes, zero):
        want |= part
    assert main(["convert", *paths[:2]]) == main(["convert", *paths[1:]]) == 0
    same_bits(ranks(1, check_load, {}, paths[1], CONFIG, 0, False)[0], want)
    assert diff(paths[0], paths[2]) == []  # the optimizer's options, too
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == b"{}"
    assert main(["convert", *paths[1:]]) == 2  # there is one
    assert capsys.readouterr().err.count("not overwritten") == 1


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])  # a tied weight has two names there
def test_checkpoint_convert_reads_the_weights_of_plain_torch(tmp_path, capsys, config):
    paths = [str(tmp_path / name) for name in ("dcp", "checkpoint")]
    model, other = (GPT(config, Mesh(), dtype=torch.float64) for _ in range(2))
    state = {**model.state_dict(), "optimizer": {"state.norm.weight.exp_avg": torch.ones(2)}, "train_state": 3}
    dcp.save(state, checkpoint_id=paths[0], no_dist=True)  # as torchtitan: the names of the model at the top
    (tmp_path / "config.json").write_text('{"run": {}}')
    assert main(["convert", *paths, "--config", str(tmp_path / "config.json")]) == 2
    assert "config.json has no 'model'" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model": {"layers": 2}, "run": {}}')
    assert main(["convert", *paths, "--config", str(tmp_path / "config.json")]) == 0
    assert "left out 2 entries" in capsys.readouterr().out
    assert load(paths[1], other, mesh=Mesh()).config == {"model": {"layers": 2}}
    same_bits(other.state_dict(), model.state_dict())
    state["embedding.weight"][0, 0] = torch.nan  # equal in both names
    differ = r"(?s)ValueError: embedding.weight and head.weight differ in the checkpoint"
    for added, refused in ((0, None), (1, differ if config is TIED else None)):
        dcp.save({**state, "head.weight": state["head.weight"] + added}, checkpoint_id=paths[0], no_dist=True)
        with pytest.raises(CheckpointException, match=refused) if refused else nullcontext():
            dcp.load(dcp_state_dict(other), checkpoint_id=paths[0], no_dist=True)
    assert torch.equal(other.head.weight.nan_to_num(), (state["head.weight"] + (config is CONFIG)).nan_to_num())


def test_checkpoint_convert_runs_no_code(tmp_path, capsys):
    files = "torch.distributed.checkpoint.filesystem"
    for module, attribute in [("builtins", "eval"), ("os", "system"), (files, "os.system"), ("torch", "load")]:
        words = [b"\x80\x04"] + [b"\x8c" + bytes([len(w)]) + w.encode() for w in (module, attribute)]
        (tmp_path / ".metadata").write_bytes(b"".join(words) + b"\x93\x8c\x01x\x85R.")
        assert main(["convert", str(tmp_path), str(tmp_path / "to")]) == 2
        assert "which it never holds" in capsys.readouterr().err


def test_checkpoint_convert_refuses_what_is_damaged_or_leads_out(tmp_path):
    source, folder, path = (tmp_path / name for name in ("source", "dcp", "checkpoint"))
    dcp.save({"model": {"a": torch.arange(6.0), "b": torch.ones(2)}}, checkpoint_id=source, no_dist=True)
    metadata: Any = pickle.loads((source / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(info, relative_path="../source/" + info.relative_path)
    many = Metadata({f"a.{i}": None for i in range(300_000)}, storage_data={})  # type: ignore[misc]
    beside = json.dumps({"beside": {"../out": {"bytes": 1, "crc32": 1}}}).encode()
    other: Any = pickle.loads((source / ".metadata").read_bytes())
    for key, info in other.state_dict_metadata.items():
        other.state_dict_metadata[key] = replace(info, chunks=[])
    for name, data, words in (
        (".metadata", pickle.dumps(metadata), "leads out of the checkpoint"),
        (".metadata", pickle.dumps(other), "the 0 chunks of model.a don't tile"),
        (".metadata", pickle.dumps(torch.Size([1])), "holds a Size, not the metadata"),
        (".metadata", pickle.dumps(Metadata({}, storage_data={})), "holds no tensors of a model"),
        (".metadata", bytes(HEADER_LIMIT + 1), f"has {HEADER_LIMIT + 1} bytes, more than"),
        ("mpcore.json", beside, "leads out of the checkpoint"),
        (".metadata", pickle.dumps(many), "300000 entries, more than"),
    ):
        shutil.copytree(source, folder, dirs_exist_ok=True)
        (folder / name).write_bytes(data)
        with pytest.raises(ValueError, match=words):
            import_dcp(folder, path)
        (folder / "mpcore.json").unlink(missing_ok=True)
    save(tmp_path / "mine", nn.Linear(2, 2), mesh=Mesh(), step=1, beside={"note.txt": b"said"})
    for file in ("note.txt", "model-00000.safetensors"):
        data = (tmp_path / "mine" / file).read_bytes()
        (tmp_path / "mine" / file).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(ValueError, match=file):
            export_dcp(tmp_path / "mine", tmp_path / "exported")
        (tmp_path / "mine" / file).write_bytes(data)
    for seed in range(60):
        draw = random.Random(seed)
        shutil.copytree(source, folder, dirs_exist_ok=True)
        file = folder / draw.choice([".metadata", "__0_0.distcp"])
        file.write_bytes(mutate_bytes(file.read_bytes(), draw))
        shutil.rmtree(path, ignore_errors=True)
        with suppress(ValueError, OSError):  # bytes of a tensor may change: DCP has no checksums
            import_dcp(folder, path)
            assert not verify(path)


def titan(name: str, x: torch.Tensor, old: bool) -> tuple[str, torch.Tensor]:
    """torchtitan's name and rows of a tensor of LlamaForCausalLM (`Llama3StateDictAdapter.from_hf`)."""
    if "q_proj" in name or "k_proj" in name:
        x = x.view(-1, 2, 4, x.shape[1]).transpose(1, 2).reshape(x.shape)  # heads of size 8
    qkv = "attention" if old else "attention.qkv_linear"
    names = {"self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
             "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "model.norm": "norm",
             "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "tok_embeddings", "model.layers": "layers",
             "lm_head": "output" if old else "lm_head"}  # fmt: skip
    names |= {f"self_attn.{each}_proj": f"{qkv}.w{each}" for each in "qkv"}
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name, x


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is missing")
@pytest.mark.parametrize("old", [True, False], ids=["before 2026", "now"])
@on_ranks(2)
def test_a_checkpoint_of_torchtitan_loads_by_name(old: bool) -> None:
    hf, on = import_module("transformers"), mesh(tp=2)
    torch.manual_seed(0)
    config = hf.LlamaConfig(vocab_size=12, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
                            num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    dense, model = (hf.LlamaForCausalLM(config).double() for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(dict(titan(*each, old) for each in dense.state_dict().items()), checkpoint_id=folder, no_dist=True)
        mp.parallelize(model, tp=on.tp, check=False)
        with pytest.raises(ValueError, match="head_dim 4 is not the 8"):
            load_torchtitan(model, folder, 4, on)
        with pytest.raises(ValueError, match="No such file or directory"):
            load_torchtitan(model, folder if on.tp.rank else f"{folder}/none", 8, on)
        for other, words in (
            ({"num_hidden_layers": 1}, "has 9 more tensors, such as layers.1.*: make the model as large"),
            ({"vocab_size": 14}, r"has tok_embeddings.weight of shape torch.Size\(\[12, 32\]\), and .* has \(14, 32\)"),
        ):
            larger = hf.LlamaForCausalLM(hf.LlamaConfig(**{**config.to_dict(), **other})).double()
            with pytest.raises(ValueError, match=words):
                load_torchtitan(mp.parallelize(larger, tp=on.tp, check=False), folder, 8, on)
        load_torchtitan(model, folder, 8, on)
        same_bits(mp.full_state_dict(model), dense.state_dict())
        config.tie_word_embeddings = True
        tied = mp.parallelize(hf.LlamaForCausalLM(config).double(), tp=on.tp, check=False)
        with pytest.raises(ValueError, match=r"2 different tensors for .*embed_tokens.* and lm_head.*embeddings=False"):
            load_torchtitan(tied, folder, 8, on)
        dcp.save({"norm.weight": torch.ones(32)}, checkpoint_id=folder, no_dist=True)
        with pytest.raises(ValueError, match="lacks 20 tensors, such as "):
            load_torchtitan(model, folder, 8, on)
