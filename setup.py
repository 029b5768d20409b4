"""The parts of the metadata that need the repository's address, `repository-code:` of CITATION.cff, if it is there."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]*)\)")  # of a file of the repository


def find(pattern: str, file: str) -> str:
    """Return the first group of a line of a file, or ""."""
    found = re.search(pattern, (HERE / file).read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


address = find(r'^repository-code: "?([^"\s]+)', "CITATION.cff").rstrip("/")
version = find(r'^version = "(.*)"', "pyproject.toml")
ref = "HEAD" if "dev" in version else f"v{version}"


def absolute(link: re.Match[str]) -> str:
    """Return a link that works on a package index; without an address, its text."""
    image, text, target = link.groups()
    if not address:
        return "" if image else text
    return f"{image}[{text}]({address}/{'raw' if image else 'blob'}/{ref}/{target})"


PAGES = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
setup(
    long_description=LINK.sub(absolute, (HERE / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    project_urls={"Repository": address, "Issues": f"{address}/issues"}
    | {name: f"{address}/blob/{ref}/{page}" for name, page in PAGES.items()}
    if address
    else {},
)
