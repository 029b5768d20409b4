"""Sphinx makes the site from these pages and from the docstrings: `make docs`."""

import html
import importlib
import re
from pathlib import Path
from typing import Any

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
exclude_patterns = ["_build", "_templates", "records"]
html_theme = "furo"
html_title = "mpcore"
html_show_sphinx = False
html_css_files = ["wide.css"]
html_static_path = ["_static"]
html_extra_path = ["one_loss.svg"]  # the picture of links to the site, at a fixed address

# GitHub's pages of the repository, if its address is known: the release workflow writes it into CITATION.cff
_address = re.search(
    r"^repository-code: \S*github\.com/([^/\s]+)/([^/\s\"]+)",
    (Path(__file__).parent.parent / "CITATION.cff").read_text(),
    re.MULTILINE,
)
html_baseurl = f"https://{_address[1].lower()}.github.io/{_address[2]}/" if _address else ""

# the version switch: these pages, and the pages of each release before, at its tag
templates_path = ["_templates"]
_changes = (Path(__file__).parent.parent / "CHANGELOG.md").read_text()
_releases = re.findall(r"^## ([\d.]+)(?: \((?!unreleased).*)?$", _changes, re.MULTILINE)
_tags = f"https://github.com/{_address[1]}/{_address[2]}/blob/v{{}}/docs/index.md" if _address else ""
html_context = {
    "versions": [(release, "")] + [(old, _tags.format(old)) for old in _releases if _tags and old != release]
}

PACKAGES = {
    "mpcore.training": "The front door",
    "mpcore.mesh": "Mesh and launch",
    "mpcore.layers": "Layers",
    "mpcore.layers.attention": "Attention",
    "mpcore.layers.moe": "Mixture of experts",
    "mpcore.interop.parallelize": "Models made elsewhere",
    "mpcore.interop.cut": "Stages of a model that is one module",
    "mpcore.interop.hugging_face": "Hugging Face folders",
    "mpcore.interop.lora": "LoRA adapters",
    "mpcore.optim": "Optimizers",
    "mpcore.parallel": "Data parallelism, recompute, offload, FP8",
    "mpcore.pipeline": "Pipelines",
    "mpcore.gradients": "Gradients",
    "mpcore.checkpoint": "Checkpoints",
    "mpcore.tools.verify": "Proof",
    "mpcore.tools.simulation": "Ranks in one process",
    "mpcore.tools.analysis": "Memory, bytes and plans",
    "mpcore.tools.fault_tolerance": "Fault tolerance",
    "mpcore.tools.invariant": "The same bits on every mesh",
    "mpcore.sharding": "Sharding",
    "mpcore.collectives": "Collectives",
    "mpcore.random": "Randomness",
}


def setup(app: Any) -> None:
    """Write a page of the reference for each package; its public names are those that its `__init__` lists."""
    folder = Path(__file__).parent / "reference"
    folder.mkdir(exist_ok=True)
    listed_before: set[int] = set()
    homes: dict[int, str] = {}
    for package, title in PACKAGES.items():
        module = importlib.import_module(package)
        members, inside = vars(module).items(), "mpcore" if hasattr(module, "__path__") else package
        others = {name for name, x in members if not getattr(x, "__module__", "").startswith(inside)}
        skipped = ", ".join(sorted(others | {name for name, x in members if id(x) in listed_before}))
        directive = f".. automodule:: {package}\n   :imported-members:\n   :exclude-members: {skipped}\n"
        (folder / f"{package}.md").write_text(f"# {title}\n\n```{{eval-rst}}\n{directive}```\n")
        homes = {id(x): f"{package}.{name}" for name, x in members if name not in others} | homes
        listed_before |= {id(x) for _, x in members}
    names = "\n".join(
        f"| {{py:obj}}`{name} <{homes[id(getattr(mpcore, name))]}>` | {_summary(getattr(mpcore, name))} |"
        for name in mpcore.__all__
    )
    listed = "\n".join(PACKAGES)
    head = "These names are at the top: `import mpcore as mp`, then `mp.prepare`. All others come from their package."
    tree = f"```{{toctree}}\n:caption: Packages\n:maxdepth: 1\n\n{listed}\n```\n"
    (folder / "index.md").write_text(f"# Reference\n\n{head}\n\n| name | what it does |\n|---|---|\n{names}\n\n{tree}")
    app.connect("html-page-context", add_tags)
    app.connect("build-finished", write_sitemap)


def _summary(x: object) -> str:
    """Return the first sentence of a docstring, for a cell of a table."""
    return (x.__doc__ or "").strip().partition("\n\n")[0].replace("\n", " ").replace("|", r"\|")


def add_tags(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Add what a link to the page shows in a chat; and to 404.html, which is served at every depth, its base."""
    text = doctree.next_node(lambda node: node.tagname == "paragraph") if doctree else None
    about = html.escape(re.sub(r"\s+", " ", text.astext())[:200]) if text else "The documentation of mpcore"
    title = re.sub(r"<[^>]*>", "", context.get("title") or "mpcore")
    tags = {"og:title": title, "og:description": about, "og:type": "website", "og:site_name": "mpcore"}
    if html_baseurl:
        tags |= {"og:url": f"{html_baseurl}{page}.html", "og:image": f"{html_baseurl}one_loss.svg"}
    base = f'<base href="{html_baseurl or "/"}">' if page == "404" else ""
    made = (f'<meta property="{name}" content="{value}">' for name, value in tags.items())
    context["metatags"] = (
        base + context.get("metatags", "") + "\n".join([f'<meta name="description" content="{about}">', *made])
    )


def write_sitemap(app: Any, error: Exception | None) -> None:
    """Write sitemap.xml, if the address of the site is known."""
    if error is None and html_baseurl and app.builder.format == "html":
        pages = "".join(
            f"<url><loc>{html_baseurl}{page}.html</loc></url>\n" for page in sorted(app.env.found_docs - {"404"})
        )
        text = f'<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{pages}</urlset>\n'
        (Path(app.outdir) / "sitemap.xml").write_text(text)
