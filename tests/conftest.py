"""What all tests share: the pool of ranks, and memory that is NaN until written."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.beside import ASKS, Beside, is_whole_suite
from tests.pool import BEFORE_2_13, CRASHES, Pool, Simulated, start_pool, strict_memory
from tests.quick import mark_quick

strict_memory()
torch.set_num_threads(1)
settings.register_profile("suite", deadline=None)  # the processes of the suite take turns on few cores
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test draws the same numbers alone, in its file and in the whole suite; the pool does so for its ranks."""
    torch.manual_seed(0)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Seed what a test module draws at its import: it has the same numbers in every process."""
    torch.manual_seed(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--simulate", action="store_true", help="ranks are threads of this process, not a pool's")


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Pool | Simulated]:
    """`ranks(n, check, *args)`: call a top-level function on n gloo ranks, and return the n results."""
    if request.config.getoption("simulate"):
        yield Simulated()
        return
    pool = start_pool()
    yield pool
    pool.stop()
    pool.folder.cleanup()


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Pool]:
    """As `ranks`, for layouts that only the long proofs try."""
    pool = start_pool(8)
    yield pool
    pool.stop()
    pool.folder.cleanup()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_quick(items)
    items.sort(
        key=lambda item: item.path.parent.name == "examples"
    )  # a broken layer is named before the runs it breaks


def pytest_sessionstart(session: pytest.Session) -> None:
    if is_whole_suite(session.config):
        session.config.stash[Beside.KEY] = Beside(session.config, whole=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if Beside.KEY in config.stash and collection_path in config.stash[Beside.KEY].paths else None


def pytest_collection_finish(session: pytest.Session) -> None:
    asks = [item for item in session.items if item.name == ASKS]
    if asks and not session.config.option.collectonly:
        session.items.sort(key=lambda item: item in asks)
        if Beside.KEY not in session.config.stash:
            session.config.stash[Beside.KEY] = Beside(session.config, whole=False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if Beside.KEY in session.config.stash:
        session.config.stash[Beside.KEY].stop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for summary in config.stash[Beside.KEY].summaries if Beside.KEY in config.stash else ():
        terminalreporter.write_line(f"beside these: {summary}")
    for crash in CRASHES:
        terminalreporter.write_line(f"repeated after a crash in native code: {crash}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """What the library refuses because torch is too old is skipped there."""
    report = yield
    if BEFORE_2_13 and report.failed and "need torch 2.13" in str(report.longrepr):
        report.outcome, report.longrepr = "skipped", (str(item.path), None, "needs torch 2.13")
    return report
