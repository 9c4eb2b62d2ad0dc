"""Turns what the user typed into values."""

from __future__ import annotations

import pytest

from protofed.cli.parse import assignments, by_method, parse_setting, parse_shard, value, words
from protofed.errors import ProtofedError


def test_values() -> None:
    assert [value(v) for v in ("1", "0.5", "true", "word", "[1, 2]", "1e-3")] == [
        1, 0.5, True, "word", [1, 2], 0.001,
    ]  # fmt: skip


def test_settings() -> None:
    assert parse_setting("clients", "scan=4,print=3") == {"scan": 4, "print": 3}
    assert parse_setting("clients", "equal") == "equal"
    assert parse_setting("samples", "0.2") == 0.2
    assert parse_setting("model", "cnn3,cnn2") == "cnn3,cnn2"
    assert parse_setting("keep_rounds", "1,10,last") == [1, 10, "last"]
    assert parse_setting("keep_rounds", "none") == "none"
    assert parse_setting("lr", 0.1) == 0.1


def test_hyper_parameters() -> None:
    assert assignments(["tau=0.05", "variant = reference"]) == {"tau": 0.05, "variant": "reference"}
    assert assignments(None) == {}
    names = {"fpl": "fpl", "mine": "a.py:Mine"}
    assert by_method({"fpl.tau": 1, "mine.x": 2}, names) == {
        "fpl": {"tau": 1},
        "a.py:Mine": {"x": 2},
    }


def test_parts() -> None:
    assert parse_shard(None) is None
    assert parse_shard("2/5") == (2, 5)
    for text in ("", "2", "0/5", "6/5", "1/0", "-1/5", "1/x"):
        with pytest.raises(ProtofedError, match="cannot read --shard"):
            parse_shard(text)


def test_names_with_commas_can_be_typed() -> None:
    known = ["FPL", "FPL, GroupNorm", "FedAvg"]
    assert words("FedAvg, FPL, GroupNorm", known) == ("FedAvg", "FPL, GroupNorm")
    assert words("FPL,fedavg", known) == ("FPL", "fedavg")
    assert words(None) == ()
