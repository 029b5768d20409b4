"""What a launch remembers of the one before, and the device it goes to."""

import contextlib

import compile_table
import pytest
import torch
from fake_gpu import fake_gpu

from mpcore.kernels import _triton
from mpcore.kernels._rows import _sum_partials_kernel
from mpcore.kernels._triton import decorated, launch
from mpcore.kernels.moe_permute import _fill_kernel

X = torch.empty(2, 2)


def sum_partials(P=4, D=64, offset=0, dtype=torch.float32):
    partials, out = torch.empty(P * D + offset)[offset:], torch.empty(D, dtype=dtype)
    sizes = {"P": P, "D": D, "ACCUMULATE": False, "BLOCK_P": 64, "BLOCK_D": 32}
    tensors = {"partials_ptr": partials, "first_ptr": out, "second_ptr": None}
    launch(_sum_partials_kernel, (2, 1, 1), num_warps=4, **dict(reversed(sizes.items())), **tensors)


def compiled():
    return _triton._readers(decorated(_sum_partials_kernel).fn)[-1]


def test_a_second_launch_does_not_ask_triton(monkeypatch):
    with fake_gpu() as launches:
        sum_partials()
        monkeypatch.setattr(type(decorated(_sum_partials_kernel)), "run", lambda *args, **kwargs: pytest.fail("asked"))
        sum_partials(P=5)
    first, second = launches
    assert first.kernel is second.kernel
    assert (first.grid, first.arguments["P"], second.arguments["P"]) == ((2, 1, 1), 4, 5)
    assert first.arguments["partials_ptr"] is not second.arguments["partials_ptr"]


@pytest.mark.parametrize("change", [{"D": 32}, {"offset": 1}, {"dtype": torch.bfloat16}, {"P": 1}, {"P": 16}])
def test_whatever_changes_the_code_is_compiled_anew(change):
    with fake_gpu() as launches:
        sum_partials()
        sum_partials(**change)
    assert launches[0].kernel is not launches[1].kernel


def test_a_missing_and_a_misspelt_argument_are_named():
    with pytest.raises(TypeError, match="_fill_kernel and its launch don't share the arguments BLOCK_D, BLOK_D, R"):
        launch(_fill_kernel, (1, 1, 1), num_warps=4, out_ptr=X, filled_ptr=X, D=2, BLOCK_R=16, BLOK_D=16)


def test_on_amd_triton_is_asked_each_time():
    with fake_gpu("gfx942") as launches:
        sum_partials()
        assert (len(launches), compiled()) == (1, {})


class Elsewhere(torch.Tensor):
    """A CPU tensor that says it is on the second GPU."""

    device = torch.device("cuda", 1)


def test_the_launch_goes_to_the_tensors_device(monkeypatch):
    current = [0]

    @contextlib.contextmanager
    def device(wanted):
        current.append(wanted.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    seen = []

    class Kernel(dict):
        fn = staticmethod(lambda x_ptr: None)

    kernel = Kernel({(1, 1, 1): lambda *args, num_warps: seen.append(current[-1])})
    launch(kernel, (1, 1, 1), num_warps=4, x_ptr=torch.empty(2).as_subclass(Elsewhere))
    assert (seen, current) == ([1], [0])


def test_what_a_key_names_lives_as_long_as_the_key():
    with fake_gpu():
        sum_partials()
        ((key, (held, _)),) = compiled().items()
        assert id(held[0]) == key[0]


def test_a_loop_gets_three_stages_where_two_buffers_fit():
    x = torch.empty(1)
    for target, elements, expected in (("sm_90", 9000, 3), ("sm_80", 9000, 2), ("sm_80", 6000, 3), ("sm_90", 10000, 2)):
        with fake_gpu(target):
            assert _triton.stages(elements, x, None, x, x) == expected


EMPTY = [
    *((norm, sizes) for norm in ("rms_norm", "add_rms_norm", "layer_norm") for sizes in ("M=0 D=8", "M=8 D=0")),
    *((f, sizes) for f in ("swiglu", "geglu", "relu_squared") for sizes in ("M=0 F=8", "M=8 F=0")),
    ("quantize_fp8 both ways", "M=0 K=4"), ("quantize_fp8 both ways", "M=4 K=0"), ("dropout_add", "B=0 D=8"),
    ("dropout_add", "B=2 D=0"), ("cross_entropy", "M=0 V=8"), ("adamw", "n=0"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "sizes"), [*EMPTY, ("rms_norm", "M=1 D=8")])
def test_nothing_is_launched_for_empty_tensors(kernel, sizes):
    """In both passes; something is for a single row."""
    with fake_gpu() as launches:
        compile_table.launch(f"{sizes} bf16", kernel, dict, "", {})
    assert (launches == []) == ("=0" in sizes)
