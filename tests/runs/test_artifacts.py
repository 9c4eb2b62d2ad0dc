"""What a run keeps of single rounds: the right things, of the right rounds; no number changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs.diary import At, ctrl_c

from protofed import analysis, tree
from protofed.config import make_config, read_config
from protofed.errors import ProtofedError
from protofed.federation.simulation import Federation, Observer
from protofed.files import Damaged
from protofed.runs.artifacts import ArtifactWriter, prototype_entries, rounds_to_keep
from protofed.runs.folder import RunFolder
from protofed.runs.records import without_times
from protofed.runs.result import Result
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")

QUICK: dict[str, Any] = {**TINY, "epochs": 1, "samples": 8, "task": tiny_task()}


def rounds(**settings: Any) -> list[int]:
    return sorted(rounds_to_keep(make_config(device="cpu", **settings)))


def files(folder: Path) -> list[str]:
    return [
        f"{kind}/{round}"
        for kind in ("prototypes", "snapshots")
        for round in RunFolder(folder).artifact_rounds(kind)
    ]


def test_the_rounds_that_are_kept() -> None:
    assert rounds(rounds=100, keep_rounds=[1, 10, "last"]) == [1, 10, 100]
    assert rounds(rounds=5, keep_rounds=[3, 9]) == [3]
    assert rounds(rounds=4, keep_rounds="all") == [1, 2, 3, 4]
    assert rounds(rounds=4, keep_rounds="last") == [4]
    assert rounds(rounds=4, keep_rounds=2) == [2]
    assert rounds(rounds=4, keep_rounds="none") == rounds(rounds=4, keep_rounds=[]) == []
    assert rounds(rounds=100) == [1, *range(10, 101, 10)]
    assert rounds(rounds=3) == [1, 2, 3]
    assert rounds(rounds=1) == [1]


@pytest.mark.parametrize("bad", [0, [0], ["first"], [1.5], [True], {"a": 1}, "1,2"])
def test_other_rounds_are_refused(bad: object) -> None:
    with pytest.raises(ProtofedError, match="keep_rounds must be"):
        make_config(keep_rounds=bad)


def test_it_survives_the_config_file_and_is_not_in_the_hash(tmp_path: Path) -> None:
    for given, read in (([1, "last"], [1, "last"]), ([], []), (None, None)):
        config = make_config(keep_rounds=given)
        (tmp_path / "c.toml").write_text(config.toml(), "utf-8")
        assert read_config(tmp_path / "c.toml").get("keep_rounds") == read
        assert make_config(**read_config(tmp_path / "c.toml")) == config
        assert config.hash == make_config().hash


def test_what_is_kept_changes_no_number(tmp_path: Path) -> None:
    results = [
        run(**QUICK, method="fpl", out=tmp_path / str(i), keep_rounds=kept)
        for i, kept in enumerate((None, "none", "all"))
    ]
    results.append(run(**QUICK, method="fpl"))
    for other in results[1:]:
        assert without_times(other.rounds) == without_times(results[0].rounds)
        assert tree.equal({"model": other.model}, {"model": results[0].model})
    assert files(tmp_path / "0") == ["prototypes/1", "prototypes/2", "prototypes/3"]
    assert files(tmp_path / "1") == []
    assert files(tmp_path / "2") == [
        *(f"prototypes/{i}" for i in (1, 2, 3)),
        *(f"snapshots/{i}" for i in (1, 2, 3)),
    ]


class Spy(Observer):
    """The server's state and the messages, as they come by."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, Any]] = {}

    def start(self, federation: Federation, records: object) -> None:
        self.federation = federation
        accept = federation.server.accept

        def spied(name: str, reply: Any) -> None:
            of_round = self.seen.setdefault(federation.server.round + 1, {})
            of_round[name] = tree.copy(reply.message)["prototypes"]
            accept(name, reply)

        federation.server.accept = spied  # type: ignore[method-assign]

    def round(self, record: Any) -> None:
        self.seen[record["round"]]["state"] = tree.copy(self.federation.server.state)


def test_the_files_hold_messages_broadcast_and_model(tmp_path: Path) -> None:
    spy = Spy()
    kept: dict[str, Any] = {"keep_rounds": [2, "last"], "out": tmp_path}
    result = run(**QUICK, method="fpl", observers=[spy], participation=0.5, **kept)
    assert files(tmp_path) == ["prototypes/2", "prototypes/3", "snapshots/2", "snapshots/3"]
    for round in (2, 3):
        seen = dict(spy.seen[round])
        state = seen.pop("state")
        slots, metadata = RunFolder(tmp_path).artifact("prototypes", round)
        names = [row["client"] for row in metadata["clients"]]
        assert names == [n for n in spy.federation.server.clients if n in seen]
        assert [row["domain"] for row in metadata["clients"]] == [n[:-2] for n in names]
        assert metadata["round"] == round and metadata["hash"] == result.summary["hash"]
        assert metadata["classes"] == ["a", "b", "c", "d"]
        for i, name in enumerate(names):
            for entry, t in seen[name].items():
                assert torch.equal(slots[f"up{i}"][f"prototypes.{entry}"], t)
        for entry, t in state["cluster"].items():
            assert torch.equal(slots["down"][f"cluster.{entry}"], t)
        model, metadata = RunFolder(tmp_path).artifact("snapshots", round)
        assert tree.equal(model, {"model": state["model"]})
        assert metadata == {"round": round, "hash": result.summary["hash"]}
    assert tree.equal(model, {"model": result.model})


def test_files_that_belong_elsewhere_are_refused(tmp_path: Path) -> None:
    result = run(**QUICK, method="fpl", keep_rounds="all", out=tmp_path)
    folder, kept = RunFolder(tmp_path), tmp_path / "prototypes"
    (kept / "²").with_suffix(".safetensors").write_bytes(b"")  # a digit, but no number
    assert folder.artifact_rounds("prototypes") == [1, 2, 3]
    (kept / "²").with_suffix(".safetensors").unlink()
    shutil.copy(kept / "1.safetensors", kept / "2.safetensors")
    shutil.copy(tmp_path / "model.safetensors", kept / "3.safetensors")
    for round, why in {2: "it is from round 1", 3: "it lacks round, clients"}.items():
        with pytest.raises(Damaged, match=why):
            analysis.prototypes(result, round)
    assert [*folder.damage()] == ["prototypes/2.safetensors", "prototypes/3.safetensors"]


def test_a_method_without_prototypes_keeps_models_only(tmp_path: Path) -> None:
    run(**QUICK, method="fedavg", out=tmp_path, keep_rounds=["last"])
    assert files(tmp_path) == ["snapshots/3"]


def test_after_a_crash_the_files_are_those_of_a_whole_run(
    tmp_path: Path, digests: Callable[[Path], dict[str, str]]
) -> None:
    def go(name: str, **more: Any) -> Result:
        settings = {**QUICK, "keep_rounds": "all", "checkpoint_every": 2}
        return run(method="fpl", out=tmp_path / name, **settings, **more)

    go("whole")
    for at in ((0, 2), (1, 1), (2, 4)):
        cut = f"cut{at[0]}"
        with pytest.raises(KeyboardInterrupt):
            go(cut, observers=[At(*at, ctrl_c)])
        go(cut, resume=True)
        for kind in ("prototypes", "snapshots"):
            assert digests(tmp_path / cut / kind) == digests(tmp_path / "whole" / kind)
            assert len(digests(tmp_path / cut / kind)) == 3


def test_overwrite_forgets_what_was_kept(tmp_path: Path) -> None:
    run(**QUICK, method="fpl", out=tmp_path, keep_rounds="all")
    run(**QUICK, method="fpl", out=tmp_path, keep_rounds="none", overwrite=True)
    assert files(tmp_path) == []


def test_large_prototypes_are_kept_of_the_last_round_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protofed.runs.artifacts.DEFAULT_MAX_BYTES", 100)
    run(**QUICK, method="fpl", out=tmp_path / "unasked")
    run(**QUICK, method="fpl", out=tmp_path / "asked", keep_rounds=[1])
    assert files(tmp_path / "unasked") == ["prototypes/3"]
    assert files(tmp_path / "asked") == ["prototypes/1", "snapshots/1"]


def test_only_prototypes_count_as_prototypes() -> None:
    mean, ragged = torch.zeros(4, 3), torch.zeros(4, 2, 3)
    message = {
        "model": {"mean": torch.zeros(7), "head.weight": torch.zeros(4, 3)},
        "control": {"w": torch.zeros(4, 3)},
        "prototypes": {"mean": mean, "count": torch.ones(4), "other": torch.ones(1)},
        "cluster": {"mean": ragged, "mask": torch.ones(4, 2)},
    }
    assert set(prototype_entries(message, 4)) == {
        "prototypes.mean", "prototypes.count", "cluster.mean", "cluster.mask",
    }  # fmt: skip
    assert prototype_entries(message, 5) == {}
    assert ArtifactWriter(None, make_config(), "", "abcd", {}).rounds == frozenset()
