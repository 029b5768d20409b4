"""Sphinx makes the site from these pages and from the docstrings: `make docs`."""

import importlib
from pathlib import Path

import mpcore

project = "mpcore"
author = "the mpcore authors"
copyright = "the mpcore authors, Apache-2.0"
release = mpcore.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 4
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": False}
python_maximum_signature_line_length = 100
napoleon_use_rtype = False
napoleon_use_ivar = True
suppress_warnings = ["ref.python"]  # a name that two packages export is one object
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
default_role = "code"  # single backticks in docstrings
exclude_patterns = ["_build", "records"]
html_theme = "furo"
html_title = "mpcore"
html_show_sphinx = False
html_css_files = ["wide.css"]
html_static_path = ["_static"]

PACKAGES = {
    "mpcore.training": "The front door",
    "mpcore.mesh": "Mesh and launch",
    "mpcore.layers": "Layers",
    "mpcore.layers.attention": "Attention",
    "mpcore.layers.moe": "Mixture of experts",
    "mpcore.interop.parallelize": "Models made elsewhere",
    "mpcore.interop.hugging_face": "Hugging Face folders",
    "mpcore.interop.lora": "LoRA adapters",
    "mpcore.optim": "Optimizers",
    "mpcore.parallel": "Data parallelism, recompute, offload, FP8",
    "mpcore.pipeline": "Pipelines",
    "mpcore.gradients": "Gradients",
    "mpcore.checkpoint": "Checkpoints",
    "mpcore.tools.verify": "Proof",
    "mpcore.tools.analysis": "Memory, bytes and plans",
    "mpcore.tools.fault_tolerance": "Fault tolerance",
    "mpcore.tools.invariant": "The same bits on every mesh",
    "mpcore.sharding": "Sharding",
    "mpcore.collectives": "Collectives",
    "mpcore.random": "Randomness",
}


def setup(app: object) -> None:
    """Write a page of the reference for each package; its public names are those that its `__init__` lists."""
    folder = Path(__file__).parent / "reference"
    folder.mkdir(exist_ok=True)
    listed_before: set[int] = set()
    for package, title in PACKAGES.items():
        members = vars(importlib.import_module(package)).items()
        others = {name for name, x in members if not getattr(x, "__module__", "").startswith("mpcore")}
        skipped = ", ".join(sorted(others | {name for name, x in members if id(x) in listed_before}))
        directive = f".. automodule:: {package}\n   :imported-members:\n   :exclude-members: {skipped}\n"
        (folder / f"{package}.md").write_text(f"# {title}\n\n```{{eval-rst}}\n{directive}```\n")
        listed_before |= {id(x) for _, x in members}
    listed = "\n".join(PACKAGES)
    (folder / "index.md").write_text(f"# Reference\n\n```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n")
