"""adamw without a GPU: the reference, random rounding, bad input, and what would be launched. And with one."""

import math
import weakref

import fake_gpu
import laws
import pytest
import torch

import mpcore
from mpcore.kernels import adamw as module
from mpcore.kernels.adamw import AdamWState, adamw_foreach, adamw_now, round_at_random, rounding_bits

BETAS = (0.9, 0.95)
adamw = laws.adamw
OPTIONS = {"betas": BETAS, "eps": 1e-8, "weight_decay": 0.1}


def state(n=6, dtype=torch.float32, device="cpu"):
    x = torch.linspace(-1, 1, n, device=device).to(dtype)
    return [x.clone(), x.flip(0).clone(), x / 2, x.square()]


def now(t=1.0, lr=0.01, device="cpu"):
    return adamw_now(torch.tensor([t], device=device), lr, BETAS)[0]


def test_the_reference_is_the_formula():
    p, g, m, v = before = [x.double() for x in state()]
    after = [x.clone() for x in before]
    adamw(*after, now(3.0), **OPTIONS, scale=torch.tensor(0.5))
    m, v = 0.9 * m + 0.1 * g / 2, 0.95 * v + 0.05 * (g / 2) ** 2
    p = p * (1 - 0.001) - 0.01 * (m / (1 - 0.9**3)) / ((v / (1 - 0.95**3)).sqrt() + 1e-8)
    for got, want in zip(after, (p, before[1], m, v), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


def test_now_holds_the_bias_corrections():
    rows = adamw_now(torch.tensor([1.0, 1000.0]), torch.tensor(0.5), BETAS)
    want = [[0.5, 1 - 0.9**t, math.sqrt(1 - 0.95**t), t] for t in (1, 1000)]
    torch.testing.assert_close(rows, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=0)


def test_random_rounding_goes_to_a_neighbour_and_keeps_the_mean():
    x = torch.tensor([1 + 2**-9, -3.3, 1e-30, 7e8, 1.0, 0.0, math.inf, -math.inf, math.nan])[:, None].expand(-1, 2**16)
    found = round_at_random(x, torch.arange(2**16).expand_as(x))  # every bit pattern once
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found[:4].double().mean(1), x[:4, 0].double(), rtol=1e-6, atol=0)
    for row, value in zip(found[:4], x[:4, 0], strict=True):
        low, high = row.float().min(), row.float().max()
        assert low <= value <= high
        assert (high - low) <= 2**-7 * value.abs()
    torch.testing.assert_close(found[4:], x[4:].bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_rounding_bits_are_philox_words_of_index_and_step():
    indices = torch.tensor([0, 5, 2**33 + 5])
    first, second, third = rounding_bits(2**40 + 1, indices, torch.tensor(7))
    for i, index in enumerate(indices.tolist()):
        words = module.philox(2**40 + 1, *(torch.tensor(c) for c in (index % 2**32, index // 2**32, 7, 0)))
        want = words[0] % 65536, words[0] // 65536, words[1] % 65536
        assert (first[i], second[i], third[i]) == want
    assert len({*first.tolist(), *second.tolist(), *third.tolist()}) == 9


def states_of(sizes, dtype=torch.bfloat16, offset=0, **optional):
    rows = adamw_now(torch.ones(len(sizes)), 0.01, BETAS).unbind()
    held = ([torch.zeros(n + offset, dtype=dtype)[offset:] for _ in range(4)] for n in sizes)
    return [AdamWState(*tensors, row, **optional) for tensors, row in zip(held, rows, strict=True)]


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(module, "runs_triton", lambda *given: True)
    with fake_gpu.fake_gpu() as launches:
        yield launches


def test_one_launch_a_list(on_a_gpu):
    states = states_of([10**6 + 1, 0, 5, 3000])
    adamw_foreach(states, **OPTIONS)
    (update,) = on_a_gpu
    assert (update.name, update.grid) == ("adamw_kernel", (977 + 0 + 1 + 3, 1, 1))
    arguments = update.arguments
    assert arguments["tiles_ptr"].tolist() == [0] * 977 + [2] + [3] * 3
    for i, (row, state) in enumerate(zip(arguments["table_ptr"].tolist(), states, strict=True)):
        addresses = [x.data_ptr() for x in (*state.tensors.values(), state.now)]
        n = state.param.numel()
        assert row == [*addresses, 0, 0, 0, n, n, n, (0, 977, 977, 978)[i]]
    assert (arguments["ROUND"], arguments["ALIGNED"], arguments["beta2"]) == (False, True, 0.95)
    assert arguments["weight1"] == pytest.approx(0.1)
    assert all(arguments[f"{name}_ptr"] is None for name in ("master", "scale", "rows"))


def test_where_somebody_wrote_to_the_parameter_its_value_counts():
    master = torch.tensor([1 + 2.0**-12, 2.0, 3.0])
    param = master.bfloat16()
    param[1] = 7.0
    assert module.followed(master, param).tolist() == [1 + 2.0**-12, 7.0, 3.0]


def test_one_launch_for_each_kind_of_tensors_and_none_for_nothing(on_a_gpu):
    place = (torch.zeros(10, dtype=torch.int64),) * 2
    kinds = [states_of([100, 200]), states_of([100], master=torch.zeros(100)), states_of([100], torch.float32),
             states_of([100], offset=1), states_of([100], key=2**62), states_of([100], key=5, place=place)]  # fmt: skip
    adamw_foreach([state for kind in kinds for state in kind], **OPTIONS, scale=torch.ones(()))
    adamw_foreach(states_of([0]), **OPTIONS)
    adamw_foreach([], **OPTIONS)
    launches = on_a_gpu
    tables = [launch.arguments["table_ptr"].tolist() for launch in launches]
    assert list(map(len, tables)) == [2, 1, 1, 1, 1, 1]
    assert [launch.arguments["ALIGNED"] for launch in launches] == [True, True, True, False, True, True]
    assert [launch.arguments["ROUND"] for launch in launches] == [False] * 4 + [True] * 2
    assert [row[0][9:11] for row in tables[4:]] == [[100, 2**62], [10, 5]]


def test_the_optimizer_steps_all_its_parameters_in_one_launch(on_a_gpu):
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(3)))
    optimizer = mpcore.AdamW(model, groups=[{"params": list(model.parameters())}])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(scale=0.5)
    (launch,) = on_a_gpu
    assert launch.grid == (6, 1, 1)
    assert launch.arguments["scale_ptr"] == 0.5


def test_a_captured_table_stays_and_is_no_other_launchs(on_a_gpu, monkeypatch):
    """A graph copies the host's table when it is replayed: many other tables later, and never before."""
    states = states_of([3000, 5])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    found = []
    for capturing in (True, False, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        adamw_foreach(states, **OPTIONS)
        found.append(on_a_gpu.pop().arguments["table_ptr"])
    captured, second, third = found
    assert captured is not second is third
    assert torch.equal(captured, second)
    table, values = weakref.ref(captured), captured.tolist()
    del captured, found
    for n in range(200):
        adamw_foreach(states_of([n + 1]), **OPTIONS)
    assert table().tolist() == values


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_it_is_the_reference_and_repeats(dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = []
    for impl in ("reference", "triton", "triton"):
        tensors = state(10**5 + 7, dtype, "cuda")
        master = tensors[0].float()
        adamw(*tensors, now(2.0, device="cuda"), **OPTIONS, master=master, key=2**40, impl=impl)
        found.append([*tensors, master])
    for reference, first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, reference, rtol=2 * torch.finfo(first.dtype).eps, atol=1e-7)
    graph, (p, g, m, v) = torch.cuda.CUDAGraph(), state(1000, device="cuda")
    row = now(device="cuda")
    adamw(p, g, m, v, row, **OPTIONS)
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        adamw(p, g, m, v, row, **OPTIONS)
    with torch.cuda.stream(stream):  # where the table is that only a replay fills
        adamw(p, g, m, v, row, **OPTIONS)
    torch.cuda.synchronize()
    for n in range(200):  # other tables, and other numbers where the graph's was
        adamw(*state(n + 1, device="cuda"), row, **OPTIONS)
        torch.full((1024,), n).pin_memory()
    for _ in range(2):
        graph.replay()
    other = state(1000, device="cuda")
    for _ in range(4):
        adamw(*other, row, **OPTIONS)
    assert torch.equal(other[0], p)


@pytest.mark.gpu
def test_on_a_gpu_products_are_added_to_main_gradients_in_float32():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from mpcore import ColumnParallelLinear
    from mpcore.gradients import main_gradients

    layer = main_gradients(ColumnParallelLinear(64, 32, dtype=torch.bfloat16, device="cuda"))
    x, dy = (torch.randn(128, n, device="cuda", dtype=torch.bfloat16) for n in (64, 32))
    for _ in range(2):
        layer(x).backward(dy)
    torch.testing.assert_close(layer.weight.main_grad, 2 * (dy.float().t() @ x.float()), rtol=1e-4, atol=1e-3)
