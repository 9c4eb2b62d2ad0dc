"""The first moments of ``protofed``: what it imports, and Ctrl-C while it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.studies.made_runs import make_runs, study

import protofed
from protofed.studies.folder import StudyFolder

SOURCE = Path(protofed.__file__).parents[1]
INTERRUPTS = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
"""A module during whose import the user presses Ctrl-C."""


def python(*arguments: str, first: Path = SOURCE) -> subprocess.CompletedProcess[str]:
    """Python in a new process, which looks for modules in the folder ``first``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (first, SOURCE)))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)


@pytest.mark.parametrize("given", [["--help"], ["--version"]])
def test_what_needs_no_pytorch_does_not_import_it(given: list[str]) -> None:
    call = f"import sys; from protofed.cli import main; sys.argv[1:] = {given}"
    check = "assert not {'torch', 'numpy', 'protofed.config'} & sys.modules.keys()"
    done = python("-c", f"{call}\ntry: main()\nfinally: {check}")
    assert (done.returncode, done.stderr) == (0, "") and "protofed" in done.stdout


@pytest.mark.parametrize(
    ("module", "given"), [("typer", ["--version"]), ("torch", ["methods"]), ("torch", ["run"])]
)
def test_ctrl_c_during_imports_is_quiet(module: str, given: list[str], tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(INTERRUPTS)
    done = python("-m", "protofed", *given, first=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_after_the_last_line_is_quiet(tmp_path: Path) -> None:
    at_exit = f"import atexit; atexit.register(lambda: exec({INTERRUPTS!r}))"
    (tmp_path / "sitecustomize.py").write_text(at_exit)
    done = python("-m", "protofed", "--version", first=tmp_path)
    assert "protofed" in done.stdout and "Traceback" not in done.stderr
    assert done.returncode != 0


@pytest.mark.parametrize("given", [["--help"], ["methods", "fpl"], ["study", "table", "{study}"]])
def test_a_closed_pipe_is_no_traceback(given: list[str], tmp_path: Path) -> None:
    """As in ``protofed methods | head -1``."""
    made = study(seeds=1)
    StudyFolder.create(tmp_path / "it", made, tmp_path)
    make_runs(made, tmp_path)
    words = [word.format(study=tmp_path / "it") for word in given]
    command = [sys.executable, "-m", "protofed", *words, *["--format", "csv"] * ("study" in given)]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=100
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_ignored_ctrl_c_stays_ignored(tmp_path: Path) -> None:
    """As in a script's background jobs."""
    ignore = "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    (tmp_path / "sitecustomize.py").write_text(ignore)
    interrupted = "import os, signal; os.kill(os.getpid(), signal.SIGINT); raise SystemExit(7)"
    (tmp_path / "typer.py").write_text(interrupted)
    assert python("-m", "protofed", "--version", first=tmp_path).returncode == 7
