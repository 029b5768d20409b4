"""The page tells what the tests here hold."""

from __future__ import annotations

from tests.peers.__main__ import DOCS, MARKS, written


def test_the_page_of_proofs_has_the_table_of_peers():
    page = (DOCS / "proofs.md").read_text()
    assert MARKS[0] in page
    assert written(page) == page, "python -m tests.peers --write"
