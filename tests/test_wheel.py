"""The wheel: what it holds, and that it works alone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.test_floors import LIBRARY, ROOT
from tests.test_readme import PRINTED, PROGRAM

FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md")
HOOKS = """
import sys
from setuptools import build_meta
print("", getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def build(hook: str, folder: Path) -> Path:
    """Call a hook of the build backend in a copy of the checkout; returns the file or folder that it made."""
    copy = folder / "copy"
    for package in ("mpcore", "kernels"):
        shutil.copytree(ROOT / package, copy / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    return call(hook, folder, copy)


def call(hook: str, folder: Path, source: Path) -> Path:
    words = [sys.executable, "-c", HOOKS, hook, str(folder)]
    done = subprocess.run(words, cwd=source, check=True, capture_output=True, text=True, timeout=120)
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("build_wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_every_module_and_three_profiles(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {name for name in names if name.endswith(".py")}
    assert {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in modules} == LIBRARY.keys()
    profiles = {f"mpcore/tools/analysis/profiles/{name}.json" for name in ("a100-80", "h100", "h200")}
    assert names - modules == {"mpcore/py.typed", *profiles}


def test_readmes_program_runs_with_the_wheel_alone(wheel, tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    (tmp_path / "losses.py").write_text(f"{PROGRAM}\nassert mp.__file__.startswith({str(tmp_path)!r}), mp.__file__\n")
    done = subprocess.run(
        [sys.executable, "losses.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == (PRINTED, 0), done.stderr
