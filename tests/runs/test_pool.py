"""The pool: which runs answer a config, and runs packed into one file."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.studies.made_runs import TINY, make_runs, study

from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.files import Damaged
from protofed.runs.pool import PACKED, Pool, write_packed
from protofed.runs.run import run
from protofed.studies.plan import plan

SETTINGS: dict[str, Any] = {**TINY, "samples": 10, "engine": "loop"}


def test_a_run_answers_the_config_it_was_asked_for_with(tmp_path: Path) -> None:
    asked = make_config("glyphs", "fpl", **SETTINGS)
    done = run(config=asked, out=tmp_path / "any name")
    (found,) = Pool(tmp_path).candidates(asked)
    assert found.name == "any name" and found.finished and not found.diverged
    assert found.facts["config"] == asked.hash
    assert found.hash == done.summary["hash"] != asked.hash
    assert found.records == done.rounds
    assert found.summary == done.summary
    assert found.settings["precision"] == "fp32" and found.settings["clients"]["scan"] == 1
    read = found.result()
    assert read.lean and read.accuracy == done.accuracy and read.config == asked
    # the same question asked in other words, and others
    same = make_config("glyphs", "fpl", **{**SETTINGS, "engine": "workers", "workers": 2})
    assert Pool(tmp_path).select([(same, ())])[0] is not None
    for other in ({"lr": 0.5}, {"seed": 1}, {"precision": "fp64"}, {"device": "cuda"}):
        config = make_config("glyphs", "fpl", **{**SETTINGS, **other})
        assert Pool(tmp_path).candidates(config) == [], other
    assert Pool(tmp_path).candidates(make_config("glyphs", "fedavg", **SETTINGS)) == []


def test_pools_merge_by_copying(tmp_path: Path) -> None:
    made = study()
    make_runs(made, tmp_path / "a", skip={("FPL", 0), ("FedAvg", 1)})
    make_runs(made, tmp_path / "b", skip={("FPL", 1), ("FedAvg", 0)})
    for pool in ("a", "b"):
        shutil.copytree(tmp_path / pool, tmp_path / "both", dirs_exist_ok=True)
    asked = [(run.config, ()) for run in plan(made)]
    assert [sum(r is not None for r in Pool(tmp_path / p).select(asked)) for p in "ab"] == [2, 2]
    assert all(Pool(tmp_path / "both").select(asked))


def test_images_tell_apart_what_a_config_does_not(tmp_path: Path) -> None:
    made = study(seeds=1, rows={"FedAvg": "fedavg"})
    for digest in ("cats", "dogs"):
        make_runs(made, tmp_path, digest=digest)
    ((config, _),) = asked = [(run.config, ()) for run in plan(made)]
    assert len(Pool(tmp_path).candidates(config)) == 2
    for digest in ("cats", "dogs"):
        (found,) = Pool(tmp_path).select([(config, [digest])])
        assert found is not None and found.facts["digest"] == digest
    assert Pool(tmp_path).select([(config, ["birds"])]) == [None]
    assert Pool(tmp_path).select(asked) != [None]


def test_of_several_answers_those_of_one_kind_are_taken(tmp_path: Path) -> None:
    made = study(settings={k: v for k, v in TINY.items() if k != "device"})
    make_runs(made, tmp_path, device="cuda", precision="bf16", skip={("FPL", 1)})
    make_runs(made, tmp_path, skip={("FedAvg", 0), ("FPL", 0)})
    found = Pool(tmp_path).select([(run.config, ()) for run in plan(made)])
    assert [r.facts["device"] for r in found if r] == ["cuda", "cuda", "cuda", "cpu"]


def test_what_is_unfinished_diverged_or_damaged(tmp_path: Path) -> None:
    made = study(seeds=1)
    runs = make_runs(made, tmp_path)
    (runs["FedAvg", 0] / "summary.json").unlink()
    (runs["FedAvg", 0] / "diverged.txt").write_text("'ce' is nan\n")
    asked = [(run.config, ()) for run in plan(made)]
    pool = Pool(tmp_path)
    assert [r is not None for r in pool.select(asked)] == [False, True]
    assert pool.candidates(asked[0][0])[0].diverged == "'ce' is nan"
    (runs["FPL", 0] / "summary.json").write_text("{")
    with pytest.raises(Damaged, match=r"summary\.json"):
        Pool(tmp_path).select(asked)
    # of another run: a folder that was copied over this one
    (runs["FPL", 0] / "summary.json").write_text(
        json.dumps(dict.fromkeys(("bytes_up", "bytes_down", "seconds"), 0)
                   | {"hash": "another", "method": "fpl", "accuracy": {},
                      "split": {"clients": {}, "samples": {}}})
    )  # fmt: skip
    with pytest.raises(Damaged, match=r"from another run than facts\.json"):
        Pool(tmp_path).select(asked)
    (runs["FPL", 0] / "facts.json").write_text("{")  # `protofed run` says so when it is run again
    assert Pool(tmp_path).candidates(asked[1][0]) == []
    assert Pool(tmp_path / "nowhere").runs == []


def test_packed_runs_answer_like_folders(tmp_path: Path) -> None:
    made = study(settings={**TINY, "data": "/somewhere/images"})
    runs = make_runs(made, tmp_path / "runs")
    asked = [(run.config, ()) for run in plan(made)]
    pool = Pool(tmp_path / "runs")
    assert not any("somewhere" in run.line() for run in pool.runs), "where the images lay"
    rounds = runs["FPL", 0] / "rounds.jsonl"
    before = rounds.read_text()
    by_client = '{"by_client": {"scan-0": {"loss": {"ce": 1.0}}}, '
    rounds.write_text("".join(by_client + line[1:] for line in before.splitlines(True)))
    lines = [run.line() for run in Pool(tmp_path / "runs").runs]
    assert not any("by_client" in line for line in lines), "too large to keep"
    rounds.write_text(before)
    write_packed(tmp_path / "packed" / PACKED, lines)
    packed = Pool(tmp_path / "packed")
    assert packed.packed and not pool.packed
    for ours, theirs in zip(packed.select(asked), pool.select(asked), strict=True):
        assert ours is not None and theirs is not None and ours.folder is None
        assert (ours.hash, ours.name, ours.summary) == (theirs.hash, theirs.name, theirs.summary)
        assert (ours.records, ours.settings) == (
            theirs.records,
            {k: v for k, v in theirs.settings.items() if k != "data"},
        )
        assert ours.result().accuracy == theirs.result().accuracy
        assert ours.line() == theirs.line()
    # in any order, the same bytes
    bits = (tmp_path / "packed" / PACKED).read_bytes()
    write_packed(tmp_path / "packed" / PACKED, reversed(lines))
    assert (tmp_path / "packed" / PACKED).read_bytes() == bits


@pytest.mark.parametrize("text", [b"{\n", b"[]\n", b"{}\n", None, b""])
def test_a_damaged_packed_file_is_named(tmp_path: Path, text: bytes | None) -> None:
    content = b"not gzip" if text is None else gzip.compress(text)
    (tmp_path / PACKED).write_bytes(content if text != b"" else content[:-4])
    with pytest.raises(Damaged, match=r"runs\.jsonl\.gz"):
        _ = Pool(tmp_path).runs


def test_a_packed_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / PACKED).write_bytes(gzip.compress(b'{"format": 3, "name": "x", "facts": {}}\n'))
    with pytest.raises(ProtofedError, match="newer version"):
        _ = Pool(tmp_path).runs
