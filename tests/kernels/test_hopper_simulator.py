"""The simulated machine sees what is wrong with a kernel: ways to break that for Hopper, and what is said of it."""

import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hopper_simulator import MachineError, simulate

from mpcore.kernels import _attention_gluon
from mpcore.kernels.attention import attention_reference


class Fault(NamedTuple):
    """What is wrong, a text of the source, what stands in its place, and what is said ("wrong" of a result)."""

    what: str
    old: str
    new: str
    said: str
    always: bool = True  # else only in a schedule that is unlucky


FAULTS = [
    Fault(
        "keys are read before they are there",
        "        mbarrier.wait(k_full.index(stage), parity)\n"
        "        if TURNS:\n"
        "            mbarrier.wait(turns.index(WHICH), (now",
        "        if TURNS:\n            mbarrier.wait(turns.index(WHICH), (now",
        r"product of partition \d \(consume\) with k_smem\[1\] reads k_smem\[1\] and has not waited for the copy",
    ),
    Fault(
        "values are read before they are there",
        "        mbarrier.wait(v_full.index(stage_before), parity_before)\n        v =",
        "        v =",
        r"reads v_smem\[0\] and has not waited for the copy",
    ),
    Fault(
        "queries are read before they are there",
        "        mbarrier.wait(q_full, turn & 1)\n",
        "",
        r"reads q_smem\[\d\] and has not waited|writes over q_smem",
    ),
    Fault(
        "queries are those of the tile before",
        "        mbarrier.wait(q_full, turn & 1)\n",
        "        mbarrier.wait(q_full, 0)\n",
        r"reads q_smem\[\d\] and has not waited|writes over q_smem|nobody can go on",
    ),
    Fault(
        "the parity is that of the other phase",
        "        mbarrier.wait(k_full.index(stage), parity)\n"
        "        if TURNS:\n"
        "            mbarrier.wait(turns.index(WHICH), (now",
        "        mbarrier.wait(k_full.index(stage), parity ^ 1)\n"
        "        if TURNS:\n"
        "            mbarrier.wait(turns.index(WHICH), (now",
        "reads k_smem|nobody can go on",
    ),
    Fault(
        "the producer waits for the wrong parity",
        "mbarrier.wait(k_empty.index(stage), parity ^ 1)",
        "mbarrier.wait(k_empty.index(stage), parity)",
        r"nobody can go on: .*partition 2 \(produce\) waits for the end of a phase of parity 0 of k_empty\[0\]",
    ),
    Fault(
        "the producer begins each tile with the first buffer",
        "stage, parity = (done + i) % STAGES, (done + i) // STAGES & 1",
        "stage, parity = i % STAGES, i // STAGES & 1",
        r"nobody can go on|writes over k_smem|reads k_smem",
    ),
    Fault(
        "keys are given back while products read them",
        "        scores = warpgroup_mma_wait(1, deps=[scores])\n"
        "        mbarrier.arrive(k_empty.index(stage), count=1)\n",
        "        mbarrier.arrive(k_empty.index(stage), count=1)\n"
        "        scores = warpgroup_mma_wait(1, deps=[scores])\n",
        r"a copy into k_smem\[\d\] writes over k_smem\[\d\], which .* (still reads|may still read)",
    ),
    Fault(
        "values are given back while products read them",
        "        acc, p_next, _ = warpgroup_mma_wait(0, deps=[acc, p_next, p])\n"
        "        mbarrier.arrive(v_empty.index(stage_before), count=1)\n",
        "        mbarrier.arrive(v_empty.index(stage_before), count=1)\n"
        "        acc, p_next, _ = warpgroup_mma_wait(0, deps=[acc, p_next, p])\n",
        r"a copy into v_smem\[\d\] writes over v_smem\[\d\], which .* (still reads|may still read)",
    ),
    Fault(
        "values are never given back",
        "        mbarrier.arrive(v_empty.index(stage_before), count=1)\n",
        "",
        r"nobody can go on: .* of v_empty\[0\]",
    ),
    Fault(
        "the last values are never given back",
        "        mbarrier.arrive(v_empty.index(stage), count=1)\n",
        "",
        r"nobody can go on: .* of v_empty\[\d\]",
    ),
    Fault(
        "queries are given back before the products that read them",
        "        scores = warpgroup_mma_wait(0, deps=[scores])\n",
        "        scores = warpgroup_mma_wait(0, deps=[scores])\n        mbarrier.arrive(q_empty, count=1)\n",
        r"writes over q_smem\[\d\], which .* (still reads|may still read)|reads q_smem\[\d\] and has not",
    ),
    Fault(
        "queries are never given back",
        "        if OWN_OUTPUT:\n            mbarrier.arrive(q_empty, count=1)\n",
        "",
        r"nobody can go on: .*partition 2 \(produce\) waits for .* of q_empty\[0\]",
    ),
    Fault(
        "one consumer is enough to give keys back",
        "mbarrier.init(k_empty.index(i), count=2)",
        "mbarrier.init(k_empty.index(i), count=1)",
        r"writes over k_smem\[\d\], which|nobody can go on",
    ),
    Fault(
        "one consumer is enough to give queries back",
        "mbarrier.init(q_empty, count=2)",
        "mbarrier.init(q_empty, count=1)",
        r"a copy into q_smem\[\d\] writes over q_smem\[\d\], which|nobody can go on|may still read",
    ),
    Fault(
        "the scores are taken before they are there",
        "scores = warpgroup_mma_wait(1, deps=[scores])",
        "scores = warpgroup_mma_wait(2, deps=[scores])",
        r"the result of a product of partition \d \(consume\) with k_smem\[\d\] is used before a warpgroup_mma_wait",
    ),
    Fault(
        "the output is taken before it is there",
        "acc, p_next, _ = warpgroup_mma_wait(0, deps=[acc, p_next, p])",
        "acc, p_next, _ = warpgroup_mma_wait(1, deps=[acc, p_next, p])",
        r"the result of a product of partition \d \(consume\) with v_smem\[\d\] is used before",
    ),
    Fault(
        "no fence after the barriers are made",
        "    fence_async_shared()\n    queries, keys, values =",
        "    queries, keys, values =",
        r"may see k_full\[0\] before it is initialised: fence_async_shared is missing",
    ),
    Fault(
        "no fence before the output is copied",
        "            fence_async_shared()\n            tma",
        "            tma",
        r"a copy out of o_smem\[\d\] reads o_smem\[\d\], which partition \d .*: fence_async_shared is missing",
    ),
    Fault(
        "nobody waits for the last output to be copied",
        "            mbarrier.arrive(q_empty, count=1)\n    tma.store_wait(0)\n",
        "            mbarrier.arrive(q_empty, count=1)\n",
        r"ends without waiting for a copy out of o_smem",
    ),
    Fault(
        "an output is written over the one before",
        "            tma.store_wait(0)  # for the output of the tile before\n",
        "",
        r"a store of partition \d \(consume\) writes over o_smem\[\d\], which a copy out of o_smem\[\d\] still reads",
    ),
    Fault(
        "too few bytes are expected",
        "mbarrier.expect(q_full, 2 * q_desc",
        "mbarrier.expect(q_full, 1 * q_desc",
        r"brings \d+ bytes, but q_full\[0\] was not told to expect as many|writes over q_smem",
    ),
    Fault(
        "too many bytes are expected",
        "mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)",
        "mbarrier.expect(v_full.index(stage), 2 * v_desc.block_type.nbytes)",
        r"nobody can go on: .*v_full\[0\] \(phase 0, 0 more arrivals and \d+ more bytes to come\)",
    ),
    Fault(
        "a ring has one buffer more than there are",
        "stage, parity = now % STAGES, now // STAGES & 1",
        "stage, parity = now % (STAGES + 1), now // STAGES & 1",
        "k_full has 4 buffers, but number 4 is asked for|reads k_smem|nobody can go on",
    ),
    Fault(
        "the keys announce the values",
        "v_full.index(stage), v_smem.index(stage))",
        "k_full.index(stage), v_smem.index(stage))",
        r"a copy into v_smem\[0\] brings \d+ bytes, but k_full\[0\] was not told|reads v_smem|still coming",
    ),
    Fault(
        "a consumer does not pass its turn on",
        "        if TURNS:\n"
        "            mbarrier.arrive(turns.index(1 - WHICH), count=1)\n"
        "        scores = warpgroup_mma_wait(1",
        "        if TURNS and WHICH == 0:\n            mbarrier.arrive(turns.index(1 - WHICH), count=1)\n"
        "        scores = warpgroup_mma_wait(1",
        r"nobody can go on: .* of turns\[0\]",
    ),
    Fault(
        "turns are told apart by the wrong parity",
        "(now + WHICH + 1) & 1",
        "(now + WHICH) & 1",
        "nobody can go on: .* of turns|middle of a phase",
        always=False,
    ),
    Fault(
        "a barrier is not made",
        "        mbarrier.init(v_full.index(i), count=1)\n",
        "",
        r"v_full\[0\], which was not initialised",
    ),
    Fault(
        "a barrier is made twice",
        "    mbarrier.init(q_full, count=1)\n",
        "    mbarrier.init(q_full, count=1)\n    mbarrier.init(q_full, count=1)\n",
        r"q_full\[0\] is initialised twice",
    ),
    Fault(
        "what came before is not shrunk",
        "acc = acc * gl.convert_layout(shrink",
        "acc = acc * gl.convert_layout(1 + 0 * shrink",
        "wrong",
    ),
    Fault("the sum is not shrunk", "total * shrink + gl.sum", "total + gl.sum", "wrong"),
    Fault("the scale gets lost", "_scores_of(scores, scale, SOFTCAP)", "_scores_of(scores, 1.0, SOFTCAP)", "wrong"),
    Fault("lse forgets its sum", " + gl.log(total)", "", "wrong"),
    Fault("the other consumer's rows", "rows = start + WHICH * 64", "rows = start + (1 - WHICH) * 64", "wrong"),
    Fault("a tile is left out", "rounds + gl.where(", "rounds + 0 * gl.where(", "wrong"),
    Fault(
        "rounds in reverse are off by one",
        "gl.where(turn & 1 == 0, program, programs - 1 - program)",
        "gl.where(turn & 1 == 0, program, programs - program)",
        "wrong",
    ),
]


def broken(old, new, folder):
    """The kernel's module with one text for another."""
    source = Path(_attention_gluon.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
    file = folder / "broken.py"
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("mpcore.kernels._broken", file)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def draw():
    """Three tiles, which two programs share, of more blocks than a ring has buffers."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, 1, 64, generator=generator).to(torch.bfloat16) for n in (300, 700, 700)]


def run(kernels, query, key, value, seed):
    """Attention of all keys by the kernel of a module, in the schedule of a seed."""

    def launch(kernel, grid, tensors, scalars, constants, num_warps, descriptors):
        simulate(kernel, grid, descriptors, tensors, scalars, constants, seed)

    output, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:3], torch.nan).transpose(1, 2).contiguous()
    kernels.launch, kernels.multiprocessors = launch, lambda device: 2
    kernels.forward((output, lse), query, key, value, None, None, False, 0.3, 0.0)
    return output, lse


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 12), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_is_seen_in_every_schedule(fault, seeds, tmp_path):
    """Not always the same is said, as one fault leads to another."""
    kernels = broken(fault.old, fault.new, tmp_path)
    inputs = draw()
    wanted = attention_reference(*inputs, causal=False, scale=0.3)
    seen = []
    for seed in seeds:
        try:
            found = run(kernels, *inputs, seed)
            right = all(torch.allclose(a, b, rtol=2e-2, atol=2e-2) for a, b in zip(found, wanted, strict=True))
            seen.append("right" if right else "wrong")
        except MachineError as error:
            seen.append(str(error))
    assert any(re.search(fault.said, text) for text in seen), seen
    assert "right" not in seen or not fault.always, seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_said_of_a_kernel_without_faults(seed, tmp_path):
    inputs = draw()
    wanted = attention_reference(*inputs, causal=False, scale=0.3)
    found = run(broken("STAYS = True", f"STAYS = {seed % 2 == 0}", tmp_path), *inputs, seed)
    assert all(torch.allclose(a, b, rtol=2e-2, atol=2e-2) for a, b in zip(found, wanted, strict=True))
