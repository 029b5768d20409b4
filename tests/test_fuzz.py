"""Pure functions on random inputs: each result equals a definition written out, or is a refusal in words."""

from __future__ import annotations

import itertools
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from examples.gpt.hf import SPEC
from examples.gpt.policies import Ramp
from examples.gpt.samples import PERIOD, Blend, Piece, TokenSamples, split_samples
from mpcore.checkpoint.format import Chunk, Entry
from mpcore.checkpoint.loading import fill
from mpcore.checkpoint.pieces import _held
from mpcore.interop.hugging_face.architectures import ARCHITECTURES
from mpcore.interop.hugging_face.config import config_from_hf, config_to_hf, read_config
from mpcore.layers.attention.documents import visible_keys
from mpcore.mesh import Axis, Mesh
from mpcore.mesh.launch import read_launch
from mpcore.mesh.layout import mesh_ranks, mesh_shape
from mpcore.pipeline.partition import partition
from mpcore.pipeline.prove import prove
from mpcore.pipeline.schedules import (
    NAMES,
    Action,
    Schedule,
    build_schedule,
    check_schedule,
    read_csv,
    with_messages,
    write_csv,
)
from mpcore.sharding.declare import Shard, Sharding
from mpcore.tools.preflight import read_command
from mpcore.tools.simulation import RankError, simulate

SLOW_S = 5.0  # a case takes milliseconds; a refusal that takes longer is a failure
REFUSED, EQUAL = "refused", "equal"


def said(error: ValueError) -> str:
    """The words of a refusal, which must be some."""
    assert len(str(error)) > 10, f"refused in {str(error)!r}"
    return str(error)


def refused(call: Callable[[], object]) -> str | None:
    """The words of a refusal; None where there is none."""
    try:
        call()
    except ValueError as error:
        return said(error)
    return None


# --- data -------------------------------------------------------------------------------------------------------------


class Texts:
    """Documents whose tokens are all different: a token tells its place."""

    def __init__(self, lengths: Sequence[int], name: str = "") -> None:
        self.lengths, self.name = np.asarray(lengths, np.int64), name
        self.parts = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.parts[index]

    def origin(self, index: int) -> tuple[str, int]:
        return self.name, index

    def read(self, piece: Piece) -> list[int]:
        return self.parts[piece.document][piece.first : piece.first + piece.count].tolist()


def texts(dice: random.Random, name: str = "") -> Texts:
    return Texts([dice.choice([0, 1, 1, 2, 3, dice.randint(0, 30)]) for _ in range(dice.randint(1, 12))], name)


def corpus(dice: random.Random) -> str:
    """An epoch holds each window once; pieces are the tokens; no held-out token is trained on."""
    data, length, seed = texts(dice), dice.randint(1, 9), dice.randint(-3, 2**70)
    try:
        train, held_out = split_samples(data, length, seed=seed, evaluate=dice.random() < 0.7)
    except ValueError:
        return REFUSED
    seen: list[set[int]] = []
    for samples in (train, held_out):
        if samples is None:
            continue
        n, whole = len(samples), np.concatenate([data[int(k)] for k in samples._documents]) if len(data) > 1 else None
        epochs = [[samples.sample(index).tolist() for index in range(e * n, e * n + n)] for e in range(2)]
        for e, index in itertools.product(range(2), range(n)):
            pieces = samples.pieces(e * n + index)
            assert [token for piece in pieces for token in data.read(piece)] == epochs[e][index]
            assert all(piece.count > 0 for piece in pieces)
        assert sorted(epochs[0]) == sorted(epochs[1])
        if whole is not None:
            windows = [whole[i * length : i * length + length + 1].tolist() for i in range(n)]
            assert sorted(epochs[0]) == sorted(windows)
            assert len(whole) - (n * length + 1) < length
        seen.append({token for window in epochs[0] for token in window})
    assert len(seen) < 2 or not seen[0] & seen[1]
    return EQUAL


def blend(dice: random.Random) -> str:
    """Shares are exact in every period; without weights each sample comes once a period; a part goes on in order."""
    parts = []
    for name in range(dice.randint(1, 5)):
        data = texts(dice, str(name))
        try:
            parts.append(TokenSamples(data, 2, seed=dice.randint(0, 9)))
        except ValueError:
            parts.append(TokenSamples(Texts([3 + 2 * dice.randint(0, 8)], str(name)), 2, seed=1))
    weights = dice.choice([None, [dice.choice([1, 0.3, 1e-3, 7, 1e-5, 0, -1, math.nan, math.inf]) for _ in parts]])
    try:
        mix = Blend(parts, weights, seed=dice.randint(0, 2**40))
    except ValueError:
        return REFUSED
    if weights is None:
        periods = [[mix.place(p * len(mix) + i) for i in range(len(mix))] for p in range(3)]
        for p, places in enumerate(periods):
            assert sorted(places) == [(i, p * len(x) + k) for i, x in enumerate(parts) for k in range(len(x))]
    else:
        assert sum(mix.counts) == mix.period == PERIOD
        exact = [PERIOD * weight / sum(weights) for weight in weights]
        assert all(abs(count - share) < 1 and count > 0 for count, share in zip(mix.counts, exact, strict=True))
    begin = dice.randint(0, 3 * mix.period)
    for index in range(begin, begin + 20):
        part, own = mix.place(index)
        assert mix.sample(index).tolist() == parts[part].sample(own).tolist()
        assert mix.pieces(index) == parts[part].pieces(own)
    return EQUAL


def packed(dice: random.Random) -> str:
    """Document ids, ends, positions and masks, token by token."""
    rows, length = dice.randint(1, 3), dice.randint(1, 9)
    tokens = [[dice.choice([0, 1, 2]) for _ in range(length)] for _ in range(rows)]
    ids = mp.document_ids(torch.tensor(tokens), end_of_document=0)
    ends = mp.layers.document_ends(ids)
    causal, window = dice.choice([(False, None), (True, None), (True, 1), (True, 2), (True, 5)])
    positions = mp.layers.document_positions(ends, rows, length)
    seen = visible_keys(rows, length, torch.device("cpu"), ends, causal, window)
    starts = [row * length + t for row in range(rows) for t in range(length) if t == 0 or tokens[row][t - 1] == 0]
    assert ends[: len(starts)].tolist() == starts
    assert set(ends[len(starts) :].tolist()) == {rows * length}
    for row, t in itertools.product(range(rows), range(length)):
        begin = max((i for i in range(1, t + 1) if tokens[row][i - 1] == 0), default=0)
        end = next((i for i in range(t, length) if tokens[row][i] == 0), length - 1)
        assert (int(ids[row, t]), int(positions[row, t])) == (tokens[row][:t].count(0), t - begin)
        for k in range(length):
            want = begin <= k <= end and (k <= t or not causal) and (window is None or t - k < window)
            assert bool(seen[row, t, k]) == want, (tokens, causal, window, row, t, k)
    return EQUAL


def ramp(dice: random.Random) -> str:
    """The first sample after many steps is that of one step after the other."""
    start, increment, stages = dice.randint(1, 9), dice.randint(1, 9), dice.randint(0, 6)
    sizes = Ramp(start, start + increment * stages, stages, dice.randint(1, 300))
    sample, steps = 0, dice.randint(0, 60)
    for _ in range(steps):
        size = sizes.size(sample)
        want = start + increment * min(sample * stages // sizes.samples, stages)
        assert size == want
        sample += size
    assert sizes.after(0, steps) == sample
    return EQUAL


# --- placement --------------------------------------------------------------------------------------------------------


def draw_sharding(dice: random.Random, shape: tuple[int, ...], dim: int, rank: int, runs: tuple) -> Sharding:
    axis = Axis(len(runs), rank, None, "tp")
    return Sharding(shape, (Shard(axis, dim, runs),))


def draw_runs(dice: random.Random, length: int, ranks: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Runs that hold all of a dimension, some of it on several ranks; a rank may hold nothing."""
    cuts = sorted({0, length, *(dice.randint(0, length) for _ in range(dice.randint(0, 6)))})
    held: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for run in itertools.pairwise(cuts):
        for rank in dice.sample(range(ranks), dice.choice([1, 1, 1, min(2, ranks)])):
            held[rank].append(run)
    for runs in held:
        dice.shuffle(runs)
    return tuple(map(tuple, held))


def slices(dice: random.Random) -> str:
    """What ranks of one layout write tiles the logical tensor; ranks of any other read their part of it."""
    shape = tuple(dice.randint(1, 7) for _ in range(dice.randint(1, 3)))
    dim = dice.randrange(len(shape))
    full = torch.randn(shape, generator=torch.Generator().manual_seed(dice.randrange(2**31)))
    chunks, stored, times = [], {}, torch.zeros(shape, dtype=torch.int64)
    runs = draw_runs(dice, shape[dim], dice.randint(1, 5))
    for rank in range(len(runs)):
        lies = draw_sharding(dice, shape, dim, rank, runs)
        axis = lies.shards[0].axis
        local = lies.take(full)
        assert tuple(local.shape) == lies.local_shape
        for box in _held("x", local.contiguous(), lies, Mesh(tp=axis)).boxes:
            if box.owned:
                key = str(len(chunks))
                chunks.append(Chunk("file", key, box.start, box.shape, 0))
                stored[key] = box.of(local).clone()
                times[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))] += 1
    assert bool((times == 1).all()), times
    entry, dim = Entry(shape, "F32", tuple(chunks)), dice.randrange(len(shape))
    runs = draw_runs(dice, shape[dim], dice.randint(1, 5))
    for rank in range(len(runs)):
        lies = draw_sharding(dice, shape, dim, rank, runs)
        local = torch.full(lies.local_shape, torch.nan)
        held = _held("x", local, lies, Mesh(tp=lies.shards[0].axis))
        fill([(held, entry)], lambda _, chunk: stored[chunk.key])
        parts = [full.narrow(dim, a, b - a) for a, b in runs[rank]]
        assert torch.equal(local, torch.cat(parts, dim) if parts else full.narrow(dim, 0, 0))
    return EQUAL


def layout(dice: random.Random) -> str:
    """Groups of each axis are those of the rank's coordinates, by the formula."""
    sizes = {axis: dice.choice([1, 1, 2, 3, 4]) for axis in ("tp", "cp", "pp", "dp", "ep")}
    world = dice.choice([math.prod(sizes[a] for a in ("tp", "cp", "pp", "dp")), dice.randint(1, 48)])
    etp = dice.choice([None, 1, 2, sizes["tp"]])
    try:
        found = mesh_shape(world, **sizes, etp=etp)
    except ValueError:
        inner = sizes["tp"] * sizes["cp"] * sizes["dp"]
        fits = inner * sizes["pp"] == world and inner % ((etp or sizes["tp"]) * sizes["ep"]) == 0
        assert not fits or (etp in (None, sizes["tp"]) and sizes["dp"] * sizes["cp"] % sizes["ep"])
        return REFUSED
    tp, cp, pp, ep, dp, etp = (found[name] for name in ("tp", "cp", "pp", "ep", "dp", "etp"))
    edp = tp * cp * dp // (etp * ep)
    groups = mesh_ranks(**found)
    for axes, names in (((pp, dp, cp, tp), ("pp", "dp", "cp", "tp")), ((pp, edp, ep, etp), ("", "edp", "ep", "etp"))):
        for at, name in enumerate(names):
            if not name:
                continue
            want: dict[tuple[int, ...], list[int]] = {}
            for rank, place in enumerate(itertools.product(*map(range, axes))):
                want.setdefault((*place[:at], *place[at + 1 :]), []).append(rank)
            assert sorted(groups[name]) == sorted(want.values()), name
    return EQUAL


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
            "MASTER_PORT": "2000", "TORCHELASTIC_RUN_ID": "x"}  # fmt: skip
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2",
         "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2,1",
         "SLURM_STEP_NODELIST": "a[08-09]"}  # fmt: skip


def launch(dice: random.Random) -> str:
    """Variables of a launcher, of which some are others: refused in words, or a rank of a world."""
    right = dice.choice([TORCHRUN, SLURM, {k: v for k, v in TORCHRUN.items() if k[0] != "T"}])
    variables, names = dict(right), [*TORCHRUN, *SLURM, "GROUP_WORLD_SIZE", "SLURM_GPUS_ON_NODE"]
    for name in dice.sample(names, dice.choice([0, 1, 1, 2, 3])):
        variables[name] = dice.choice(
            ["0", "1", "2", "4", "-1", "", "x", "a[", "2(x2)", "1(x3),1", "70000", " 3", "1e3"]
        )
    try:
        found = read_launch(variables)
    except ValueError as error:
        assert variables != right
        return REFUSED if said(error) else ""
    alone = found.local_size == 1 and found.local_rank == found.rank  # nothing tells
    assert 0 <= found.rank < found.world_size, variables
    assert alone or 0 <= found.local_rank < found.local_size, variables
    return EQUAL


# --- pipelines --------------------------------------------------------------------------------------------------------


def runs_to_its_end(schedule: Schedule) -> bool:
    """Each rank does its next action as soon as what it needs is done; False if all wait."""
    done: set[Action] = set()
    at = [0] * len(schedule.ranks)
    backward = {(a.stage, a.micro_batch): a for row in schedule.ranks for a in row if a.kind in "BI"}
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.ranks):
            while at[rank] < len(row):
                kind, s, m = row[at[rank]].kind, row[at[rank]].stage, row[at[rank]].micro_batch
                needs = {"W": [Action("I", s, m)], "F": [Action("F", s - 1, m)] if s else []}.get(kind)
                if needs is None:
                    needs = [Action("F", s, m), *([backward[s + 1, m]] if s + 1 < schedule.stages else [])]
                if not done.issuperset(needs):
                    break
                done.add(row[at[rank]])
                at[rank] += 1
                moved = True
    return all(i == len(row) for i, row in zip(at, schedule.ranks, strict=True))


def schedule(dice: random.Random) -> str:
    """What is built is proved, with messages too; files keep it; a changed one is proved if and only if it ends."""
    name, P, M = dice.choice(NAMES), dice.randint(1, 5), dice.choice([1, 2, 3, 4, 6, 8, 10, 12])
    V = dice.choice([1, 1, 2, 2, 3, 0])
    words = refused(lambda: check_schedule(name, P, M, V))
    if words is not None:
        assert refused(lambda: build_schedule(name, P, M, V)) == words
        return REFUSED
    built = build_schedule(name, P, M, V)
    assert prove(built).makespan > 0
    assert prove(with_messages(built)).makespan > 0
    with tempfile.TemporaryDirectory() as folder:
        write_csv(built, f"{folder}/a.csv")
        assert read_csv(f"{folder}/a.csv").ranks == built.ranks
    rows = [list(row) for row in built.ranks]
    row = dice.choice(rows)
    change = dice.choice(["swap", "swap", "move", "drop", "twice", "other rank"])
    i, j = dice.randrange(len(row)), dice.randrange(len(row))
    if change == "swap":
        row[i], row[j] = row[j], row[i]
    elif change == "move":
        row.insert(j, row.pop(i))
    elif change == "twice":
        row.insert(j, row[i])
    else:
        taken = row.pop(i)
        if change == "other rank":
            dice.choice(rows).insert(0, taken)
    other = Schedule("other", tuple(map(tuple, rows)), built.stages, built.micro_batches)
    words = refused(lambda: prove(other))
    whole = sorted(map(str, itertools.chain(*rows))) == sorted(map(str, itertools.chain(*built.ranks)))
    placed = [{a.stage for a in r} for r in rows]
    sound = whole and not any(x & y for x, y in itertools.combinations(placed, 2)) and runs_to_its_end(other)
    assert (words is None) == sound, (name, P, M, V, change, words)
    return EQUAL if words is None else REFUSED


def cut_blocks(dice: random.Random) -> str:
    """The slowest stage is as fast as in the best of all cuts."""
    costs = [dice.choice([0.0, 1.0, 2.0, 5 * dice.random()]) for _ in range(dice.randint(0, 12))]
    stages, first, last = dice.randint(0, 5), dice.choice([0.0, 1.5]), dice.choice([0.0, 2.5, -1.0, math.nan])
    try:
        found = partition(costs, stages, first=first, last=last)
    except ValueError:
        assert stages < 1 or len(costs) < stages or not last >= 0
        return REFUSED
    n = len(costs)
    assert [i for part in found for i in part] == list(range(n))
    assert all(len(part) for part in found)

    def slowest(ends: Sequence[int]) -> float:
        pairs = list(itertools.pairwise([0, *ends, n]))
        return max(sum(costs[a:b]) + first * (a == 0) + last * (b == n) for a, b in pairs)

    best = min(slowest(ends) for ends in itertools.combinations(range(1, n), stages - 1))
    assert math.isclose(slowest([part.stop for part in found[:-1]]), best, abs_tol=1e-12)
    return EQUAL


# --- commands and files of others -------------------------------------------------------------------------------------


def command(dice: random.Random) -> str:
    """The words of a launcher."""
    known = [
        "torchrun", "srun", "python", "-m", "--nnodes", "--nproc-per-node", "-n", "-N", "2", "1:4", "x", "--",
        "--nnodes=2", "--nproc-per-node=8", "a.b", "a.b:c", "torch.distributed.run", "--ntasks=3", "-m", "",
    ]  # fmt: skip
    words = [dice.choice(known) for _ in range(dice.randint(0, 9))]
    try:
        found = read_command(words)
    except ValueError as error:
        return REFUSED if said(error) else ""
    assert found.target in ("x", "a.b", "a.b:c", "torchrun", "srun", "python", "2", "1:4", ""), words
    assert found.ranks is None or found.ranks >= 0
    return EQUAL


SIZES = {"vocab_size": 53, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3,
         "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 32}  # fmt: skip
ODD = (None, True, False, 0, -1, 1, 2, 3, 7, 1.5, 1e30, math.inf, math.nan, "", "silu", "x", [], [1], {}, {"type": "x"})


def config(dice: random.Random) -> str:
    """A config.json of any content: refused in words, or a model whose own config.json is read as the same."""
    values: dict[str, Any] = {"model_type": dice.choice(list(ARCHITECTURES)), **SIZES, "hidden_act": "silu"}
    try:
        more = config_to_hf(config_from_hf(dict(values), spec=SPEC), spec=SPEC, first=values["model_type"])
        values = {**values, **more}
    except ValueError:
        pass  # an architecture with fields of its own
    for _ in range(dice.choice([0, 1, 1, 2])):
        name = dice.choice([*values, "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "odd"])
        values[name] = dice.choice(ODD)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values))
        try:
            found = read_config(folder, spec=SPEC)
        except ValueError as error:
            return REFUSED if said(error) else ""
    kind = values["model_type"]
    written = refused(lambda: config_to_hf(found, spec=SPEC, first=kind))
    if written is None:
        again = config_from_hf(config_to_hf(found, spec=SPEC, first=kind), spec=SPEC)
        assert again == found, (found, again)
    return EQUAL


class Net(nn.Module):
    """Linear layers, norms and a table, as a plan may name them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(12, 8), nn.LayerNorm(8)
        self.up, self.gate, self.down, self.head = (nn.Linear(*each) for each in ((8, 12), (8, 12), (12, 8), (8, 12)))

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, 12]."""
        x = self.table(tokens)
        h = self.norm(x)
        x = x + self.down(self.up(h).tanh() * self.gate(h))
        return self.head(x)


STYLES = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "replicate", "vocab", "sideways")
PARTS = ("table", "norm", "up", "gate", "down", "head")
RIGHT = {"table": "vocab", "up": "colwise", "gate": "colwise", "down": "rowwise", "head": "colwise_gather_output"}


def with_plan(chosen: dict[str, str], tokens: Tensor) -> dict[str, Tensor]:
    """Output and gradients of the model with a plan; `chosen` {}: as it is."""
    torch.manual_seed(0)
    model = Net().double()
    mesh = mp.build_mesh(tp=torch.distributed.get_world_size(), device_type="cpu") if chosen else Mesh()
    if chosen:
        mp.parallelize(model, chosen, mesh.tp)
    out = model(tokens)
    out.square().sum().backward()
    mp.gradients.reduce_gradients(model, mesh)
    declared = mp.sharding.shardings(model)
    if out.shape[-1] < 12:  # a colwise head: each rank has its features
        out = declared["head.bias"].assemble(out.movedim(-1, 0)).movedim(0, -1)
    grads = {n: declared[n].assemble(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {"": out.detach(), **grads}


def plan(dice: random.Random) -> str:
    """A plan of any styles: refused in words, or the same model."""
    chosen = {name: dice.choice(STYLES) for name in PARTS if dice.random() < 0.3}
    chosen = {**RIGHT, **chosen} if dice.random() < 0.7 else chosen or {"up": "colwise"}
    for name in dice.sample(PARTS, dice.choice([0, 0, 1])):
        chosen.pop(name, None)
    tokens = torch.tensor([[dice.randrange(12) for _ in range(3)] for _ in range(2)])
    want = with_plan({}, tokens)
    try:
        ranks = simulate(with_plan, chosen, tokens, ranks=dice.choice([2, 2, 3]))
    except RankError as error:
        if chosen == RIGHT or not isinstance(error.__cause__, ValueError):
            raise
        return REFUSED if said(error.__cause__) else ""
    for got in ranks:
        assert got.keys() == want.keys()
        for name, value in got.items():
            torch.testing.assert_close(value, want[name], rtol=1e-9, atol=1e-9, msg=f"{name} of {chosen}")
    return EQUAL


KINDS: dict[str, Callable[[random.Random], str]] = {
    "corpus": corpus, "blend": blend, "packed": packed, "ramp": ramp, "slices": slices, "layout": layout,
    "launch": launch, "schedule": schedule, "partition": cut_blocks, "command": command, "config": config, "plan": plan,
}  # fmt: skip


def check(kind: str, seeds: range) -> None:
    """Try cases of a kind; a refusal that takes longer than SLOW_S is a failure too."""
    for seed in seeds:
        began = time.monotonic()
        assert KINDS[kind](random.Random(f"{kind} {seed}")) in (EQUAL, REFUSED), (kind, seed)
        assert time.monotonic() - began < SLOW_S, (kind, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_cases_of_functions_hold(kind):
    check(kind, range(4 if kind == "plan" else 20))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_eight_hundred_cases_of_functions_hold(kind):
    check(kind, range(50_000, 50_800))
