"""The pages tell what the tests here hold, and what differs."""

from __future__ import annotations

import pytest

from tests.peers.__main__ import DOCS, MARKS, conventions, properties, written
from tests.peers.differences import DIFFER, MISSING, PAGES
from tests.peers.sources import AREAS


def test_the_page_of_proofs_has_the_table_of_peers():
    page = (DOCS / "proofs.md").read_text()
    assert MARKS[0] in page
    assert written(page) == page, "python -m tests.peers --write"


@pytest.mark.parametrize("peer", PAGES)
def test_each_convention_is_on_the_peers_page(peer):
    assert conventions(peer) == [each.theirs for each in DIFFER if each.peer == peer]


def test_no_property_is_counted_twice():
    found = [(each.peer.partition("@")[0], each.source) for each in properties()]
    assert len(found) == len(set(found)), sorted({each for each in found if found.count(each) > 1})
    assert {each.area for each in (*DIFFER, *MISSING)} <= {*AREAS}
