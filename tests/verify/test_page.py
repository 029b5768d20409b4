"""The table, the page and the picture of `mpcore verify`, and its command line."""

from __future__ import annotations

import math
import types
from html.parser import HTMLParser

import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from mpcore.tools.verify import __main__ as command
from mpcore.tools.verify.judge import STAGES, Mismatch, Verdict
from mpcore.tools.verify.page import draw, page, result, table

RIGHT = Verdict("tp2", dict.fromkeys(STAGES, 0.0) | {"gradient": 12.345}, {"w": 1.5, "b": 0.0})
WRONG = Verdict("dp2zero3x", {"loss": math.inf}, {"b": 7e15, "w": 2e4}, Mismatch("gradient", "b", 7e15, "a < b"))
FAILED = Verdict("cp2", error="lost & gone")
ALL = [RIGHT, WRONG, FAILED]


def test_a_result_is_one_of_three_words():
    assert [result(verdict) for verdict in ALL] == ["equal", "DIFFERS", "FAILED"]


def test_the_table_has_a_line_for_each_layout_and_then_what_is_wrong():
    head, *lines = table(ALL).splitlines()
    widths = [9, *(max(8, len(stage)) for stage in STAGES)]

    def line(*cells: str) -> str:
        first, *others = cells
        return "  ".join([f"{first:<9}", *(f"{x:>{w}}" for x, w in zip(others, widths[1:], strict=False)), cells[-1]])

    assert head == line("layout", *STAGES, "result (largest ULPs)")
    numbers = dict.fromkeys(STAGES, "0") | {"gradient": "12.3"}
    blank = dict.fromkeys(STAGES, "-")
    assert lines == [
        line("tp2", *numbers.values(), "equal"),
        line("dp2zero3x", *(blank | {"loss": "inf"}).values(), "DIFFERS"),
        line("cp2", *blank.values(), "FAILED"),
        "dp2zero3x: gradient of b differs by 7e+15 ULPs: a < b",
        "cp2: lost & gone",
    ]
    assert table([RIGHT]).splitlines()[1].startswith("tp2       "), "a name has at least eight places"


class Rows(HTMLParser):
    """The texts of a page's cells, by row, and the class of each row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.kinds: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
            self.kinds.append(dict(attrs).get("class") or "")
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def test_the_page_has_the_table_and_counts_what_is_equal():
    text = page("a & b", ALL)
    assert "<title>a &amp; b</title>" in text
    assert "<h1>a &amp; b</h1><p>1 of 3 layouts equal the unsharded model." in text
    read = Rows(text)
    assert read.kinds == ["", "equal", "off", "off"]
    assert read.rows[0] == ["layout", *STAGES, "result"]
    assert read.rows[1] == ["tp2", *("12.3" if stage == "gradient" else "0" for stage in STAGES), "equal"]
    assert read.rows[2][0] == "dp2zero3x"
    assert read.rows[2][-1] == "gradient of b differs by 7e+15 ULPs: a < b"
    assert [cell.strip() for cell in read.rows[3]] == ["cp2", *"-" * len(STAGES), "lost & gone"]
    assert "script" not in read.tags


@pytest.fixture
def drawn(monkeypatch) -> list[tuple[Figure, dict]]:
    """The figures that are saved, and how."""
    found = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **how: found.append((self, {"path": path, **how})))
    return found


def test_the_picture_shades_each_gradient_by_its_ulps(drawn):
    draw(ALL, "x.png")
    ((figure, how),) = drawn
    assert how == {"path": "x.png", "dpi": 150}
    assert figure.get_size_inches().tolist() == [6.5, 1.8 + 0.26 * 2]
    (axes,) = figure.axes
    assert axes.get_xlim() == (-0.5, 2.5)
    assert axes.get_ylim() == (1.5, -0.5)
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["w", "b"]
    assert axes.get_yticks().tolist() == [0, 1]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["tp2\nequal", "dp2zero3x\nDIFFERS", "cp2\nFAILED"]
    cells = {(round(b.get_x() + 0.48, 9), round(b.get_y() + 0.47, 9)): b for b in axes.patches}
    assert list(cells) == [(x, y) for x in range(3) for y in range(2)]
    assert {(round(b.get_width(), 9), round(b.get_height(), 9)) for b in cells.values()} == {(0.96, 0.94)}
    by_hand = {}  # 0.1 ULPs or less is the darkest, a million or more the brightest, on a logarithmic scale
    for x, verdict in enumerate(ALL):
        for y, name in enumerate(("w", "b")):
            ulps = verdict.gradients.get(name)
            share = None if ulps is None else min(math.log10(max(ulps, 0.1) / 0.1) / 7, 1.0)
            by_hand[x, y] = share, to_rgba("#ffffff") if share is None else colormaps["cividis"](share)
    for bar, (_, want) in zip(cells.values(), by_hand.values(), strict=True):
        assert bar.get_facecolor() == pytest.approx(want)
    texts = {text.get_position(): text for text in axes.texts}
    assert {place: text.get_text() for place, text in texts.items()} == {
        (0, 0): "1.5", (0, 1): "0", (1, 0): "2e+04", (1, 1): "7e+15", (2, 0): "-", (2, 1): "-",
    }  # fmt: skip
    assert {place for place, text in texts.items() if text.get_weight() == "bold"} == {(1, 1)}
    dark = {place for place, (share, _) in by_hand.items() if share is not None and share <= 0.55}
    assert {place for place, text in texts.items() if text.get_color() == "white"} == dark
    assert dark == {(0, 0), (0, 1)}
    assert {(t.get_ha(), t.get_va(), t.get_fontsize()) for t in texts.values()} == {("center", "center", 7.0)}
    assert axes.get_title(loc="left").startswith("1 of 3 layouts equal the unsharded model")
    assert not any(spine.get_visible() for spine in axes.spines.values())


def test_the_picture_grows_with_layouts_and_parameters(drawn):
    draw([Verdict(f"tp{i}", gradients=dict.fromkeys("abcde", 1.0)) for i in range(9)], "x.png")
    draw([Verdict("tp2", gradients={"a": 0.2}), Verdict("tp3", gradients={"a": 9999.0, "b": 10000.0})], "x.png")
    draw([FAILED], "x.png")
    assert [figure.get_size_inches().tolist() for figure, _ in drawn] == [
        pytest.approx([3.5 + 0.8 * 9, 1.8 + 0.26 * 5]), pytest.approx([6.5, 1.8 + 0.26 * 2]),
        pytest.approx([6.5, 1.8 + 0.26]),
    ]  # fmt: skip
    assert [text.get_text() for text in drawn[1][0].axes[0].texts] == ["0.2", "-", "1e+04", "1e+04"]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch) -> list[dict]:
    """The calls of `verify`, which answer with `ALL`, and of `draw`."""
    found: list[dict] = []

    def verify(build: object, batch: object, layouts: object, **how: object) -> list[Verdict]:
        found.append({"build": build, "batch": batch, "layouts": layouts, **how})
        return ALL if layouts != ["tp2"] else [RIGHT]

    monkeypatch.setattr(command, "verify", verify)
    monkeypatch.setattr(command, "draw", lambda verdicts, path: found.append({"drawn": verdicts, "path": path}))
    return found


MODEL = "tests.verify_models:Encoder"


def test_the_commands_flags_reach_verify(asked, tmp_path, capsys):
    from tests import verify_models as models

    assert command.main([MODEL]) == 1
    usual = asked.pop()
    assert usual["build"] is models.Encoder
    assert usual["loss"] is models.loss
    assert torch.equal(usual["batch"]["x"], models.batch()["x"])
    assert (usual["layouts"], usual["dtype"], usual["seed"]) == (["tp2", "dp2"], torch.float64, 0)
    assert (usual["timeout"], usual["virtual"]) == (120.0, 0)
    assert capsys.readouterr().out == table(ALL) + "\n"
    usual["report"](WRONG)
    assert capsys.readouterr().err == "compared dp2zero3x\n"
    flags = ["--layouts", "tp2,", "--seed", "7", "--timeout", "3.5", "--bitwise", "8"]
    for name, dtype in {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
                        "float64": torch.float64}.items():  # fmt: skip
        assert command.main([MODEL, *flags, "--dtype", name]) == 0
        found = asked.pop()
        assert (found["layouts"], found["dtype"], found["seed"]) == (["tp2"], dtype, 7)
        assert (found["timeout"], found["virtual"]) == (3.5, 8)
    html, plot = tmp_path / "x.html", str(tmp_path / "x.png")
    assert command.main([MODEL, "--html", str(html), "--plot", plot]) == 1
    assert html.read_text() == page(f"{MODEL} under 3 layouts", ALL)
    assert asked[-1] == {"drawn": ALL, "path": plot}


def test_the_functions_of_a_module_are_found_by_their_names(monkeypatch):
    module = types.ModuleType("told")
    module.__dict__.update(build=len, other=sum, batch=lambda: {"x": 1})
    monkeypatch.setitem(command.sys.modules, "told", module)
    assert command.find("told") == (len, {"x": 1}, None)
    assert command.find("told:other") == (sum, {"x": 1}, None)
    module.__dict__["loss"] = max
    assert command.find("told:build") == (len, {"x": 1}, max)


def test_values_of_config_fields_are_json_or_text(asked, monkeypatch):
    made = []

    class Model:
        def __init__(self, path: str, changes: tuple) -> None:
            made.append((path, changes))

        def batch(self) -> dict:
            return {"x": 3}

    monkeypatch.setattr(command, "HuggingFaceModel", Model)
    sets = ["hidden_size=96", "tie_word_embeddings=false", "hidden_act=gelu", "note=a=b", "list=[1, 2]"]
    assert command.main(["--hf", "there", "--layouts", "tp2", *(w for each in sets for w in ("--set", each))]) == 0
    changes = (("hidden_size", 96), ("tie_word_embeddings", False), ("hidden_act", "gelu"), ("note", "a=b"))
    assert made == [("there", (*changes, ("list", [1, 2])))]
    found = asked.pop()
    assert type(found["build"]) is Model
    assert (found["batch"], found["loss"]) == ({"x": 3}, command.token_loss)


def test_a_command_with_two_models_or_none_is_refused(asked, capsys):
    for wrong in ([], [MODEL, "--hf", "there"], [MODEL, "--set", "a=1"]):
        assert command.main(wrong) == 2
        assert "give either package.module:build, or --hf PATH, and --set with --hf alone" in capsys.readouterr().err
    assert asked == []


def test_the_loss_of_tokens_is_the_sum_of_their_cross_entropies():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    target = torch.tensor([[0, 4, 2], [1, 1, 3]])
    want = sum(-logits[b, t, target[b, t]] + logits[b, t].exp().sum().log() for b in range(2) for t in range(3))
    assert command.token_loss({"logits": logits}, target, None).item() == pytest.approx(float(want))  # type: ignore[arg-type]
