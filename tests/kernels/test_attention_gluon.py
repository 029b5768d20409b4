"""The forward pass for Hopper on a simulated machine, what it compiles to, and what is launched."""

import random
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import attention_cases
import laws
import pytest
import torch
import triton
from attention_cases import mask, seen
from fake_gpu import fake_gpu
from hopper_simulator import simulate

from mpcore.kernels import _attention_gluon
from mpcore.kernels import attention as module
from mpcore.kernels.attention import attention, attention_reference

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ops = torch.ops.mpcore


draw = partial(attention_cases.draw, dtype=BF16)


@pytest.fixture
def hopper(monkeypatch):
    """Launches of the kernel go to a simulated machine; returns what sets its schedule."""
    monkeypatch.setattr(module, "_chosen", lambda impl, *given: impl)

    def schedule(seed):
        def run(kernel, grid, tensors, scalars, constants, num_warps, descriptors):
            assert num_warps == 4
            simulate(kernel, grid, descriptors, tensors, scalars, constants, seed)

        monkeypatch.setattr(_attention_gluon, "launch", run)

    schedule(0)
    return schedule


def gluon(**arguments):
    return attention(**arguments, impl="gluon")


def check(inputs, layout="contiguous", **options):
    laws.check_errors(seen(gluon), seen(attention_reference), inputs, layout, gradients=False, **options)


# --- laws, on the simulated machine -------------------------------------------------------------------------------


MASKS = ["causal", "full", "window", "packed", "packed full", "bounds"]


@pytest.mark.parametrize(
    ("T", "name"),
    [
        *((700, name) for name in MASKS),
        (1, "bounds"),
        *(pytest.param(T, name, marks=pytest.mark.slow) for T in (1, 37, 130) for name in MASKS),
    ],
)
def test_errors_of_every_mask(name, T, hopper):
    heads = {"H": 32, "groups": 16} if T == 1 else {}  # of a lone row the reference's error is luck
    check(draw(T, **heads), **mask(name, T))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("K", [128, 256])
@pytest.mark.parametrize("name", ["causal", pytest.param("full", marks=pytest.mark.slow), "bounds"])
def test_errors_of_every_head_dimension(name, K, dtype, hopper):
    check(draw(261, K=K, dtype=dtype), **mask(name, 261))


@pytest.mark.parametrize("K", [64, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("softcap", [0.5, pytest.param(20.0, marks=pytest.mark.slow)])
def test_errors_with_softcap(softcap, K, hopper):
    check(draw(150, K=K), softcap=softcap, scale=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_errors_of_any_shape_mask_tile_and_schedule(seed, hopper, monkeypatch):
    generator = random.Random(seed)
    name = generator.choice(["causal", "full", "window", "packed", "packed full", "bounds"])
    T, K, (H, groups) = generator.randint(30, 500), generator.choice([64, 128]), generator.choice([(2, 1), (4, 2)])
    keys = generator.randint(1, 600) if name in ("full", "bounds") else T
    tile = generator.choice([32, 64, 128]), generator.randint(1, 4), generator.choice([True, False])
    monkeypatch.setattr(_attention_gluon, "TILES", {K: _attention_gluon.Tile(*tile)})
    monkeypatch.setattr(_attention_gluon, "SECTION_BYTES", generator.choice([1, 100_000, 2**25]))
    monkeypatch.setattr(_attention_gluon, "multiprocessors", lambda device: 1 + seed % 5)
    hopper(seed)
    inputs, options = draw(T, H, groups, K, keys=keys), {**mask(name, T, keys), "scale": 0.2}
    for found, wanted in zip(
        seen(gluon)(**inputs, **options), seen(attention_reference)(**inputs, **options), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(("H", "groups"), [(4, 4), (6, 2), (3, 1)])
def test_errors_of_grouped_heads_in_a_batch(H, groups, hopper):
    for name in ("causal", "bounds"):
        check(draw(150, H, groups, B=2), scale=0.3, **mask(name, 150))


@pytest.mark.parametrize(("T", "keys"), [(37, 700), (700, 37), (1, 70), (130, 1)])
def test_errors_of_other_keys_than_queries(T, keys, hopper):
    heads = {"H": 64, "groups": 64} if T == 1 else {"H": 2}
    check(draw(T, **heads, keys=keys), **mask("bounds", T, keys))
    check(draw(T, **heads, keys=keys), causal=False)


@pytest.mark.parametrize("layout", ["strided rows", "strided columns"])
def test_errors_of_strided_tensors(layout, hopper):
    check(draw(150, B=2), layout)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_errors_of_an_output_in_another_dtype(dtype, hopper):
    """It is rounded once, from the same float32."""
    inputs, options = draw(150, B=2), mask("bounds", 150)
    exact, lse = gluon(**inputs, **options, out_dtype=F32)
    found, same_lse = gluon(**inputs, **options, out_dtype=dtype)
    assert torch.equal(lse, same_lse)
    assert torch.equal(found, exact.to(dtype))


def test_errors_of_a_packed_projection(hopper):
    packed = torch.randn(2, 150, 6, 64).to(BF16)
    views = dict(zip(("query", "key", "value"), packed.split([4, 1, 1], 2), strict=True))
    for found, want in zip(gluon(**views), gluon(**{n: x.contiguous() for n, x in views.items()}), strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize(("B", "T", "H", "keys"), [(0, 4, 2, 4), (1, 0, 2, 3), (1, 3, 2, 0), (1, 3, 0, 3)])
def test_nothing_in_gives_nothing_out(B, T, H, keys, hopper):
    check(draw(T, H, min(H, 1), keys=keys, B=B), causal=False)


SCHEDULES = [(name, seed) for name in ("causal", "full", "bounds") for seed in range(1, 41)]


@pytest.mark.parametrize(
    ("name", "seed"), [pytest.param(n, s, marks=() if s < 3 else pytest.mark.slow) for n, s in SCHEDULES]
)
def test_no_schedule_changes_a_bit(name, seed, hopper):
    inputs = draw(650, 1)
    wanted = gluon(**inputs, **mask(name, 650))
    hopper(seed)
    for found, want in zip(gluon(**inputs, **mask(name, 650)), wanted, strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("section", [1, pytest.param(2**25, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 132))])
@pytest.mark.parametrize("name", ["causal", "full"])
def test_however_programs_share_the_tiles(name, count, section, hopper, monkeypatch):
    inputs = draw(300, 6, 2, B=2)
    wanted = gluon(**inputs, **mask(name, 300))
    monkeypatch.setattr(_attention_gluon, "multiprocessors", lambda device: count)
    monkeypatch.setattr(_attention_gluon, "SECTION_BYTES", section)
    for found, want in zip(gluon(**inputs, **mask(name, 300)), wanted, strict=True):
        assert torch.equal(found, want)


def test_compiles_in_one_graph(hopper):
    torch._dynamo.reset()
    compiled = torch.compile(gluon, fullgraph=True, backend="aot_eager")
    inputs = draw(40)
    for found, want in zip(compiled(**inputs), gluon(**inputs), strict=True):
        assert torch.equal(found, want)


# --- what it compiles to ------------------------------------------------------------------------------------------


SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in ((64, "full"), (128, "bounds"), (256, "causal"))]


@pytest.fixture(scope="module", params=[(128, "causal"), *SLOW], ids=str)
def compiled(request):
    """K, and the kernel."""
    K, name = request.param
    q, k = torch.empty(1, 300, 8, K, dtype=BF16), torch.empty(1, 300, 2, K, dtype=BF16)
    bound = torch.zeros(300, dtype=torch.int32) if name == "bounds" else None
    with fake_gpu("sm_90") as launches:
        ops.attention_forward(q, k, k, bound, bound, name == "causal", 0.1, 0.0, "gluon", None)
    return K, launches[0].kernel


@pytest.fixture(scope="module")
def instructions(compiled):
    """The machine code, without what predicates its instructions."""
    nvdisasm = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled[1].asm["cubin"])
        cubin.flush()
        code = subprocess.run([nvdisasm, "-c", cubin.name], capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", code)


def test_warps_are_those_of_a_producer_and_two_consumers(compiled):
    K, kernel = compiled
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.num_warps == 12  # the producer's warpgroup has 1 of its 4
    assert kernel.metadata.shared <= 232448
    assert "setmaxnreg.inc.sync.aligned.u32 \t240" in ptx
    assert "setmaxnreg.dec.sync.aligned.u32 \t24;" in ptx
    # A box is as wide as 64 columns: those of queries (two halves), keys and values.
    assert ptx.count("cp.async.bulk.tensor.4d.shared") >= 4 * K // 64


def test_all_warps_of_a_consumer_are_done_before_one_thread_says_so(compiled):
    """On the simulated machine a partition is one; on the real one its warps wait where the compiler makes them."""
    names = r"bar\.sync|mbarrier\.arrive\.shared|wgmma\.wait_group|wgmma\.mma_async|stmatrix|bulk\.wait_group"
    steps = re.findall(names, compiled[1].asm["ptx"])
    arrivals = [i for i, step in enumerate(steps) if step == "mbarrier.arrive.shared"]
    assert len(arrivals) >= 2 * 5
    assert all(steps[i - 1] == "bar.sync" for i in arrivals)
    outputs = [i for i, step in enumerate(steps) if step == "stmatrix" and steps[i - 1] != "stmatrix"]
    assert [steps[i - 2 : i] for i in outputs] == 2 * [["bulk.wait_group", "bar.sync"]]


def test_exponentials_are_taken_between_the_scores_and_the_product_before(compiled, instructions):
    """The compiler is free to wait for the product first, and does so if nothing keeps it."""
    steps = " ".join(re.findall(r"HGMMA|MUFU\.EX2|DEPBAR\.LE gsb0, 0x\d", "\n".join(instructions)))
    overlaps = re.findall(r"DEPBAR.LE gsb0, 0x1((?: MUFU.EX2)*) DEPBAR.LE gsb0, 0x0", steps)
    assert len(overlaps) == len(re.findall("gsb0, 0x1", steps)) >= 2  # of either consumer
    assert all(found.count("EX2") >= _attention_gluon.TILES[compiled[0]].keys // 2 for found in overlaps)


def touched(instructions):
    """Instructions that write to registers of products that are under way, or read what these have not written yet."""
    groups, found = [[]], []  # of products, the last one still being issued

    def register(text):
        name = re.match(r"[-|~]*R(\d+)", text)
        return int(name[1]) if name else None

    for instruction in instructions:
        name, _, rest = instruction.partition(" ")
        operands = [text.strip() for text in rest.split(",")]
        if name.startswith("HGMMA"):
            width, result, left = int(name.split("x")[1]), register(operands[0]), register(operands[1])
            read = set() if left is None else set(range(left, left + 4))
            groups[-1].append((set(range(result, result + width // 2)), read))
            groups += [[]] if "gsb0" in operands else []
        elif "DEPBAR.LE gsb0" in instruction:
            groups = groups[-1 - int(operands[1], 16) :]
        else:
            to = register(operands[0])
            stores = to is None or name.startswith(("ST", "RED"))
            size = 4 if "128" in name else 2 if "64" in name or "WIDE" in name else 1
            written = set() if stores else set(range(to, to + size))
            used = {register(text) for text in operands[0 if stores else 1 :]}
            for result, read in (product for group in groups for product in group):
                if written & (result | read) or used & result:
                    found.append(instruction)
    return found


def test_registers_of_products_under_way_are_let_alone(instructions):
    """They read their left operand, and write their result, until they are waited for."""
    assert touched(instructions) == []
    at = next(i for i, text in enumerate(instructions) if re.search(r"HGMMA.* R\d+, R\d+, gdesc", text))
    result, left = re.findall(r"R\d+", instructions[at])[:2]
    for fault in (f"FADD {left}, R1, R2", f"FADD R1, {result}, R2"):
        assert touched([*instructions[: at + 1], fault, *instructions[at + 1 :]]) == [fault]


# --- launches -----------------------------------------------------------------------------------------------------


def launched(query, key, value, low=None, high=None, causal=True, out_dtype=None):
    """Arguments of a launch, which goes nowhere."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_attention_gluon, "launch", lambda *given: found.append(given))
        ops.attention_forward(query, key, value, low, high, causal, 0.1, 0.0, "gluon", out_dtype)
    return found


def test_views_of_a_packed_projection_are_not_copied():
    packed = torch.empty(2, 300, 12, 64, dtype=BF16)
    views = packed.split([8, 2, 2], 2)
    ((_, grid, tensors, scalars, constants, _, descriptors),) = launched(*views)
    assert grid == (1, 1, 1)  # of a machine with one multiprocessor
    assert (scalars[:5], constants[:2]) == ((300, 300, 8, 4, 16), (64, "causal"))
    for descriptor, view, rows in zip(descriptors, views, (64, 128, 128), strict=False):
        assert descriptor.base.data_ptr() == view.data_ptr()
        assert list(descriptor.shape) == [2, view.shape[2], 300, 64]
        assert list(descriptor.strides) == [300 * 12 * 64, 64, 12 * 64, 1]
        assert list(descriptor.block_shape) == [1, 1, rows, 64]
    assert descriptors[3].base.data_ptr() == tensors[1].data_ptr()


def test_there_are_no_more_programs_than_multiprocessors_or_tiles(monkeypatch):
    x = torch.empty(2, 300, 4, 64, dtype=BF16)
    for stays, count, programs in ((True, 7, 7), (True, 132, 24), (False, 7, 24)):
        monkeypatch.setattr(_attention_gluon, "STAYS", stays)
        monkeypatch.setattr(_attention_gluon, "multiprocessors", lambda device, count=count: count)
        assert launched(x, x, x)[0][1] == (programs, 1, 1)


def test_heads_that_share_keys_are_of_one_section(monkeypatch):
    """As many as the cache holds, but no less than a group and no more than there are."""
    monkeypatch.setattr(_attention_gluon, "SECTION_BYTES", 2 * 2 * 1024 * 64 * 2)
    for keys, section in ((1024, 2 * 4), (4096, 4), (2, 32)):
        key = torch.empty(1, keys, 8, 64, dtype=BF16)
        ((_, _, _, scalars, *_),) = launched(torch.empty(1, 8, 32, 64, dtype=BF16), key, key, causal=False)
        assert scalars[5] == section


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mT.contiguous().mT,  # columns apart
        lambda x: torch.empty(2, 300, 2, 65, dtype=BF16)[..., :64],  # rows that start anywhere
        lambda x: torch.empty(2 * 300 * 2 * 64 + 1, dtype=BF16)[1:].view(2, 300, 2, 64),  # a start that is odd
        lambda x: x[:, :, :1].expand(-1, -1, 2, -1),  # heads at one place
    ],
)
def test_what_the_copy_engine_cannot_address_is_copied(change):
    query = torch.empty(2, 300, 2, 64, dtype=BF16)
    key = change(query)
    ((*_, descriptors),) = launched(query, key, query)
    assert descriptors[1].base.is_contiguous()
    assert descriptors[1].base.data_ptr() != key.data_ptr()
    assert descriptors[2].base.data_ptr() == query.data_ptr()


def test_strides_of_lone_dimensions_do_not_matter():
    query = torch.empty(300 * 64, dtype=BF16).as_strided((1, 300, 1, 64), (3, 64, 7, 1))
    ((*_, descriptors),) = launched(query, query, query)
    assert descriptors[0].base.data_ptr() == query.data_ptr()
    assert list(descriptors[0].strides) == [64, 64, 64, 1]


def test_an_output_of_another_dtype_is_not_for_the_copy_engine():
    x = torch.empty(1, 300, 2, 64, dtype=BF16)
    ((_, _, tensors, *_, descriptors),) = launched(x, x, x, out_dtype=F32)
    assert descriptors[3] is None
    assert tensors[1].dtype == F32


@pytest.mark.slow
def test_launches_of_other_boxes_are_other_kernels():
    """What a launch remembers is by dtype and box, and by whether there is an output to copy."""
    for K, dtype, out_dtype in ((64, BF16, None), (64, F16, None), (64, BF16, F32)):
        x = torch.empty(1, 40, 1, K, dtype=dtype)
        with fake_gpu("sm_90") as launches:
            for _ in range(2):
                ops.attention_forward(x, x, x, None, None, False, 0.1, 0.0, "gluon", out_dtype)
        assert launches[0].kernel is launches[1].kernel
        assert (
            launches[0].kernel.src.signature["q_desc"].startswith("tensordesc<" + ("bf16" if dtype == BF16 else "fp16"))
        )
        assert (launches[0].arguments["o_desc"] is None) == (out_dtype is not None)


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"K": 96}, {}, r"no kernel of head dimensions \(96, 96\), only of \(64, 128, 256\); use impl='triton'"),
        ({"V": 128}, {}, r"no kernel of head dimensions \(64, 128\), only of two that are the same"),
        ({"dtype": F32}, {}, "no torch.float32 kernel"),
        ({"K": 256}, {"out_dtype": F32}, "no registers for an output of torch.float32 at head dimension 256"),
        ({}, {}, r"impl='gluon' is for GPUs of compute capability 9\.0, not for cpu; use impl='triton'"),
    ],
)
def test_what_it_cannot_do_is_refused(change, options, message):
    with pytest.raises(ValueError, match=message):
        gluon(**draw(8, **change), **options)


def test_a_triton_without_its_names_is_refused(monkeypatch):
    monkeypatch.delitem(sys.modules, "mpcore.kernels._attention_gluon")
    monkeypatch.delattr("triton.experimental.gluon.language.nvidia.hopper.warpgroup_mma")
    with pytest.raises(ValueError, match=r"needs the Gluon of Triton 3\.6 or 3\.7: .*warpgroup_mma.*use impl='triton'"):
        gluon(**draw(8))


def test_where_it_was_measured_to_be_fastest_it_runs_if_it_can(monkeypatch):
    found = SimpleNamespace(name="H", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(module, "FASTEST", {("H", BF16, 64, 64, "causal"): "gluon"})
    q, _, v = draw(8).values()
    assert module._chosen(None, q, v, "causal") == module._chosen("gluon", q, v, "full") == "gluon"
    assert module._chosen(None, q, v, "full") == "triton"
    found.major = 10
    assert module._chosen(None, q, v, "causal") == "triton"
    with pytest.raises(ValueError, match=r"capability 9\.0, not for H of compute capability 10\.0"):
        module._chosen("gluon", q, v, "causal")


# --- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
)
class TestGpu:
    @pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
    @pytest.mark.parametrize("K", [64, 128, 256])
    @pytest.mark.parametrize("name", ["causal", "full", "window", "packed", "packed full", "bounds"])
    @pytest.mark.parametrize("T", [1, 37, 700, 2048])
    def test_it_errs_as_the_portable_kernel(self, name, T, K, dtype):
        """At most twice as much, against the reference in float64."""
        inputs = {n: x.cuda() for n, x in draw(T, 8, 2, K, dtype=dtype).items()}
        options = {
            n: tuple(t.cuda() for t in x) if n == "bounds" else x.cuda() if isinstance(x, torch.Tensor) else x
            for n, x in mask(name, T).items()
        }
        exact = seen(attention_reference)(**{n: x.double() for n, x in inputs.items()}, **options)
        found, portable = (seen(attention)(**inputs, **options, impl=impl) for impl in ("gluon", "triton"))
        for ours, plain, want in zip(found, portable, exact, strict=True):
            granted = torch.finfo(ours.dtype).eps * want.abs().max()
            assert (ours - want).abs().max() <= 2 * max((plain - want).abs().max(), granted)

    def test_it_repeats_bit_for_bit(self):
        inputs = {n: x.cuda() for n, x in draw(4096, 16, 4, 128).items()}
        wanted, _ = gluon(**inputs)
        for _ in range(50):
            assert torch.equal(gluon(**inputs)[0], wanted)

    def test_a_cuda_graph_captures_it(self):
        inputs = {n: x.cuda() for n, x in draw(512, 8, 2, 128).items()}
        wanted, _ = gluon(**inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found, _ = gluon(**inputs)
        found.zero_()
        graph.replay()
        assert torch.equal(found, wanted)
