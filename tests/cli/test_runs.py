"""``protofed runs verify``, and what ``protofed run`` says of folders it resumes or stops in."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commands import TINY, Done, call, succeed
from tests.conftest import flipped
from tests.studies.made_runs import make_runs, study

from protofed.federation.simulation import Federation
from protofed.runs.folder import RunFolder
from protofed.runs.pool import PACKED, Pool, write_packed
from protofed.studies.folder import StudyFolder

Protofed = Callable[..., Done]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pool with a run of FedAvg of one round."""
    path = tmp_path_factory.mktemp("pool") / "runs"
    succeed("run", *TINY, "--quiet", "--runs", path)
    return path


# ---- verify --------------------------------------------------------------------------------------


def test_verify_runs_pools_and_studies(pool: Path, tmp_path: Path) -> None:
    (run,) = pool.iterdir()
    assert "runs verified: 1; damaged files: 0" in succeed("runs", "verify", run)
    copy = Path(shutil.copytree(pool, tmp_path / "runs"))
    (victim,) = copy.iterdir()
    StudyFolder.create(copy / "it", study(), copy)
    for name in ("model.safetensors", "rounds.jsonl"):
        content = (victim / name).read_bytes()
        (victim / name).write_bytes(flipped(content, 8 * len(content) - 80))
    (victim / "config.toml").unlink()
    for folder in (victim, copy, copy / "it"):
        done = call("runs", "verify", run, folder)
        assert (done.code, done.err) == (1, ""), folder
        assert "runs verified: 2; damaged files: 3" in done.out
        for name in ("model.safetensors", "rounds.jsonl", "config.toml"):
            (line,) = [line for line in done.out.splitlines() if name in line]
            assert victim.name in line


def test_verify_packed_runs(tmp_path: Path) -> None:
    make_runs(study(), tmp_path / "runs")
    packed = tmp_path / "packed" / PACKED
    write_packed(packed, [run.line() for run in Pool(tmp_path / "runs").runs])
    assert "runs verified: 4; damaged files: 0" in succeed("runs", "verify", packed.parent)
    content = packed.read_bytes()
    packed.write_bytes(flipped(content, 4 * len(content)))
    done = call("runs", "verify", packed.parent)
    assert done.code == 1 and PACKED in done.out


def test_verify_says_how_many_runs_carry_no_checksums(pool: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(pool, tmp_path / "runs"))
    (run,) = copy.iterdir()
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text("format = 1\n" + text.partition("format = 2\n")[2])
    assert "whose files have no checksums: 1" in succeed("runs", "verify", copy)
    assert "no checksums" not in succeed("runs", "verify", pool)


def test_verify_of_nothing_and_of_a_run_under_way(pool: Path, tmp_path: Path) -> None:
    done = call("runs", "verify", tmp_path)
    assert done.code == 2 and "holds no run" in done.err
    (run,) = pool.iterdir()
    with RunFolder(run)._locked():
        done = call("runs", "verify", run)
    assert done.code == 0 and "runs in progress, left out: 1" in done.out


# ---- damage is said wherever a run is read -------------------------------------------------------


@pytest.mark.parametrize("name", ["config.toml", "facts.json", "rounds.jsonl", "summary.json"])
def test_a_finished_run_that_was_altered_says_so(pool: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(pool, tmp_path / "runs"))
    (run,) = copy.iterdir()
    text = (run / name).read_text()
    digit = max(text.rfind(d) for d in "123456789")
    (run / name).write_text(text[:digit] + "0" + text[digit + 1 :])
    for command in (("show", run), ("report", run, "-o", tmp_path / "report.html")):
        done = call(*command)
        assert done.code == 2 and name in done.err and "is damaged" in done.err, command


def test_a_table_says_which_runs_it_had_to_leave_out(protofed: Protofed) -> None:
    Path("mine.toml").write_text(study(seeds=1).toml())
    runs = make_runs(study(seeds=1), Path("runs"))
    (runs["FPL", 0] / "facts.json").write_text("{")
    out = protofed("study", "table", "mine.toml").out
    assert "left out" in out and "facts.json" in out


# ---- resuming ------------------------------------------------------------------------------------


def test_resume_of_a_folder_that_is_not_there_says_so(protofed: Protofed) -> None:
    code, out, _ = protofed("run", *TINY, "--resume", "--out", "typo")
    assert code == 0 and "there is no run to resume in typo" in out


@pytest.mark.parametrize("out", [(), ("--out", "it")])
def test_a_finished_run_is_extended(protofed: Protofed, out: tuple[str, ...]) -> None:
    first = protofed("run", *TINY, "--quiet", *out)
    assert first.code == 0
    done = protofed("run", *TINY, "--rounds", 2, "--resume", *out)
    assert done.code == 0, done.err
    assert "rounds 1 → 2" in done.out and "resumed after round 1" in done.out
    protofed("run", *TINY, "--rounds", 2, "--quiet", "--out", "fresh")
    folders = [Path("it")] if out else sorted(Path("runs").iterdir())
    assert len(folders) == (1 if out else 2), "in the pool it is a new run"
    models = [(f / "model.safetensors").read_bytes() for f in folders]
    assert (Path("fresh") / "model.safetensors").read_bytes() in models
    assert all(not RunFolder(f).damage() for f in folders)


def test_fedproc_is_not_extended(protofed: Protofed) -> None:
    method = ("--method", "fedproc", "--quiet")
    assert protofed("run", *TINY, *method).code == 0
    done = protofed("run", *TINY, *method, "--rounds", 2, "--resume")
    assert done.code == 2 and "rounds 1 → 2: every round of fedproc depends" in done.err
    assert len(list(Path("runs").iterdir())) == 1
    assert protofed("run", *TINY, *method, "--rounds", 2).code == 0


def test_a_damaged_checkpoint_is_told_in_a_line(protofed: Protofed) -> None:
    given = ("run", *TINY, "--rounds", 3, "--checkpoint-every", 1, "--quiet", "--out", "it")
    assert protofed(*given).code == 0
    Path("it/summary.json").unlink()
    Path("it/checkpoint.safetensors").write_bytes(b"damaged")
    code, _, err = protofed(*given, "--resume")
    (line,) = err.splitlines()
    assert code == 0 and line.startswith("warning: 'it/checkpoint.safetensors' is damaged")
    assert line.endswith("resuming from the checkpoint before it, of round 2")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_run_with_a_checkpoint(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run_round, before = Federation.run_round, signal.getsignal(number)

    def signaled(self: Federation, *given: Any) -> Any:
        if self.server.round == 1:
            os.kill(os.getpid(), number)
        return run_round(self, *given)

    monkeypatch.setattr(Federation, "run_round", signaled)
    code, _, err = protofed("run", *TINY, "--rounds", 2, "--out", "it")
    assert code == 130 and "--resume" in err
    checkpoint = RunFolder("it").checkpoint()
    assert checkpoint is not None and checkpoint.round == 1
    assert signal.getsignal(number) is before


def test_sigterm_before_the_first_round(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def signaled(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("protofed.data.load_task", signaled)
    code, _, err = protofed("run", *TINY, "--out", "it")
    assert code == 130 and "stopped" in err and not Path("it").exists()
