"""Bytes of storages that are alive: of views once, of freed ones never."""

from __future__ import annotations

import pytest
import torch

from mpcore._torch.fake import fake_tensors
from mpcore.memory_footprint import PeakTracker, StorageTracker


@pytest.mark.parametrize("fake", [False, True])
def test_storages_made_inside_are_counted_once_while_they_live(fake):
    with fake_tensors() if fake else torch.no_grad():
        before = torch.ones(100)
        with StorageTracker() as storages:
            assert storages.held() == 0
            x = torch.ones(10)
            y = x + 1
            view, other = y.view(2, 5), y[3:]
            before.add_(1)
            inside = before[5:]
            assert storages.held() == 80, "no views, and nothing that was there before"
            assert storages.held([view]) == 40
            assert storages.held([x, other, before]) == 0
            del y, view
            assert storages.held() == 80, "another view lives"
            del other
            assert storages.held() == 40
        z = torch.ones(1000)
        assert storages.held() == 40, "made outside"
        del x
        assert storages.held() == 0
        assert storages.made == {}, "what is freed is forgotten"
        del z, inside


def test_the_peak_is_the_most_that_was_held_since_its_beginning():
    with PeakTracker() as storages:
        assert (storages.most, storages.begin()) == (0, 0)
        x = torch.ones(10)
        y = x + x
        assert storages.most == 80
        del y
        z = x * 2
        assert storages.most == 80
        torch.mul(x + z, 2)  # the sum is held with x and z, and then the product too
        assert storages.most == 160
        assert storages.begin() == 80
        assert storages.most == 80
        z.add_(1)
        z.view(2, 5)
        assert storages.most == 80, "no new storage"
        torch.sub(x, 1)
        assert storages.most == 120
