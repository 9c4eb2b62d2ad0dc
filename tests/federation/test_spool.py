"""Messages of a round, in memory and on disk."""

from __future__ import annotations

import pytest
import torch

from protofed import tree
from protofed.federation.spool import Spool


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_spool_gives_slots_back(limit: int) -> None:
    spool = Spool(limit)
    spool.put("a", {"model": {"w": torch.ones(2)}, "p": {"m": torch.zeros(1)}, "none": {}})
    spool.put("b", {"model": {"w": torch.zeros(2)}})
    assert spool.get("a", "model")["w"].tolist() == [1, 1]
    assert spool.get("b", "model")["w"].tolist() == [0, 0]
    assert spool.get("b", "p") == {}
    assert spool.get("a", "none") == {}, "an empty slot and an absent one are the same"
    spool.close()


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_a_message_that_comes_twice_is_not_anothers(limit: int) -> None:
    spool = Spool(limit)
    for name, value in (("a", 1.0), ("a", 2.0), ("b", 3.0)):
        spool.put(name, {"model": {"w": torch.full((2,), value)}})
    assert [spool.get(n, "model")["w"].tolist() for n in "ab"] == [[2, 2], [3, 3]]
    spool.close()


def test_a_second_message_of_a_client_replaces_the_first() -> None:
    size = tree.nbytes({"model": {"w": torch.ones(2)}})
    for limit in (0, size, 1 << 30):  # both on disk, one in memory, both in memory
        spool = Spool(limit)
        for value in (1.0, 2.0):
            spool.put("a", {"model": {"w": torch.full((2,), value)}})
        assert spool.get("a", "model")["w"].tolist() == [2, 2]
        spool.close()
