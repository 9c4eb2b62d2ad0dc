"""A task and runs so small that thousands of them can be killed, damaged and compared."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import protofed
from protofed import tree
from protofed.data import Task, load_task
from protofed.methods import METHODS
from protofed.runs.folder import RunFolder
from protofed.runs.records import without_times
from protofed.tree import Tree
from tests.fuzz.harness import Guard

SETTINGS: dict[str, str] = {
    "model": "cnn2", "width": "2", "rounds": "4", "epochs": "1", "batch": "8", "clients": "2",
    "samples": "10", "image_size": "8", "checkpoint_every": "1", "device": "cpu",
    "precision": "fp32", "protocol": "fpl",
}  # fmt: skip
PATIENCE_SECONDS = 120
KILLED = "killed by the fuzzer"


def shared(folder: Path) -> Path:
    """What all workers share: the images, and runs that nothing happened to."""
    return folder.parent / "shared"


def pictures(folder: Path) -> Path:
    """Two domains of two classes, 8×8 pixels."""
    root = shared(folder) / "tiny"
    if not root.exists():
        rng, new = np.random.default_rng(5), shared(folder) / f".tiny-{os.getpid()}"
        for d, domain in enumerate(("left", "right")):
            for k, name in enumerate("ab"):
                (new / domain / name).mkdir(parents=True)
                for i in range(14):
                    pixels = rng.integers(0, 100, (8, 8, 3), np.uint8)
                    pixels[4 * k : 4 * k + 4, :, d] += 120
                    Image.fromarray(pixels).save(new / domain / name / f"{i:02}.png")
        with contextlib.suppress(OSError):  # another worker was faster
            new.rename(root)
        shutil.rmtree(new, ignore_errors=True)
    return root


def options(folder: Path, **more: object) -> list[str]:
    """The options of a tiny run."""
    given = {"task": f"folder:{pictures(folder)}", **SETTINGS, **more}
    return [part for n, v in given.items() for part in (f"--{n.replace('_', '-')}", str(v))]


@functools.cache
def loaded(folder: Path) -> Task:
    return load_task(f"folder:{pictures(folder)}", image_size=8)


# ---- processes ----------------------------------------------------------------------------------


class Forked:
    """A ``protofed`` command in a process that is a copy of this one: PyTorch is loaded already.

    Stands in for ``subprocess.Popen`` where a study starts its runs.
    """

    def __init__(
        self,
        command: list[str],
        *,
        stdin: object = None,
        stderr: Any = None,
        before: Callable[[], None] = lambda: None,
        session: bool = False,
    ) -> None:
        arguments = command[command.index("protofed") + 1 :]
        sys.stdout.flush()
        sys.stderr.flush()
        with Guard.off():
            self.pid = os.fork()
        if self.pid == 0:
            _become(arguments, stderr, before, session)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or 1e9)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.002)
        return code

    def terminate(self) -> None:
        self.send(signal.SIGTERM)

    def send(self, number: int, group: bool = False) -> None:
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)


def _become(arguments: list[str], stderr: Any, before: Callable[[], None], session: bool) -> None:
    """What a new process does: run the command line, and end."""
    code = 70
    try:
        Guard.root = ""
        if session:
            os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.dup2(stderr.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        before()
        from protofed.cli.app import main
        from protofed.studies import execution

        namespace: Any = types.SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)
        execution.subprocess = namespace  # type: ignore[attr-defined]
        execution.POLL_SECONDS, execution.RETRY_SECONDS = 0.02, 0.1
        sys.argv = ["protofed", *arguments]
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(bool(end.code))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


class Fresh(Forked):
    """The same in a new interpreter."""

    def __init__(self, command: list[str], *, stderr: Any, **_: object) -> None:
        path = f"{Path(protofed.__file__).parents[1]}"
        with Guard.off():
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        self.pid, self.returncode = self.process.pid, None


def count_writes(root: Path, act: Callable[[int], None]) -> None:
    """Call back before every file that this process, or a copy of it, changes below a folder."""
    start, seen = f"{root}{os.sep}", 0
    kinds = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}

    def see(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in kinds and str(args[0]).startswith(start):
            if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
            seen += 1
            act(seen)

    sys.addaudithook(see)


# ---- runs that nothing happened to --------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """A finished run, the same run stopped in its last round, and what it took."""

    whole: Path
    cut: Path
    seconds: float
    writes: int


def reference(method: str, folder: Path) -> Reference:
    """The undisturbed run of a method; the first worker that needs it makes it."""
    root = shared(folder) / "references" / method
    if not root.exists():
        new = shared(folder) / f".{method}-{os.getpid()}"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        log, began, counter = new / "log", time.monotonic(), new / "writes"

        def note() -> None:
            count_writes(new / "whole", lambda n: os.truncate(counter, n))

        counter.touch()
        command = ["protofed", "run", "--quiet", "--method", method, "--out", f"{new / 'whole'}"]
        command += options(folder, engine="loop")
        with log.open("wb") as errors:
            code = Forked(command, stderr=errors, before=note).wait(PATIENCE_SECONDS)
        if code:
            raise RuntimeError(f"{method} fails undisturbed: {log.read_text()}")
        facts = {"seconds": time.monotonic() - began, "writes": counter.stat().st_size}
        shutil.copytree(new / "whole", new / "cut")
        _stop_in_last_round(method, new / "cut", folder)
        (new / "facts.json").write_text(json.dumps(facts))
        root.parent.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):  # another worker was faster
            new.rename(root)
        shutil.rmtree(new, ignore_errors=True)
    facts = json.loads((root / "facts.json").read_text())
    return Reference(root / "whole", root / "cut", facts["seconds"], facts["writes"])


def _stop_in_last_round(method: str, out: Path, folder: Path) -> None:
    """Run it again, and stop it when three of its four rounds are complete."""
    from protofed.federation.simulation import Observer

    class Stop(Observer):
        def client(self, round: int, done: int, total: int) -> None:
            if (round, done) == (4, 1):
                raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        protofed.run(loaded(folder), config=config(method, folder), out=out, overwrite=True,
                     observers=[Stop()])  # fmt: skip


@functools.cache
def config(method: str, folder: Path) -> protofed.Config:
    words = ("model", "device", "precision", "protocol")
    given: dict[str, Any] = {n: v if n in words else int(v) for n, v in SETTINGS.items()}
    return protofed.make_config(
        f"folder:{pictures(folder)}", METHODS[method](), engine="loop", **given
    )


def numbers(run: Path) -> dict[str, Any]:
    """All that has to be the same in two runs: records, model, state of server and clients."""
    folder = RunFolder(run)
    checkpoint = folder.checkpoint()
    assert checkpoint is not None
    states: Mapping[str, Tree] = {
        name: folder.client_state(file) for name, file in checkpoint.clients.items()
    }
    return {
        "records": without_times(folder.records()),
        "model": folder.model(),
        "round": checkpoint.round,
        "state": checkpoint.state,
        "clients": states,
        "summary": {k: v for k, v in folder.summary().items() if k not in _VARIES},
    }


_VARIES = ("seconds", "finished", "engine", "versions")


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """In what two runs differ; empty if in nothing."""
    for name in ("records", "round", "summary"):
        if json.dumps(a[name]) != json.dumps(b[name]):
            return name
    pairs: list[tuple[str, Tree, Tree]] = [("state", a["state"], b["state"])]
    if a["clients"].keys() != b["clients"].keys():
        return "clients"
    pairs += [("clients", a["clients"][n], b["clients"][n]) for n in a["clients"]]
    if a["model"].card != b["model"].card:
        return "model card"
    models = [{"model": m.model, **m.clients, **m.received} for m in (a["model"], b["model"])]
    pairs.append(("model", models[0], models[1]))
    return next((name for name, x, y in pairs if not _equal(x, y)), "")


def _equal(a: Tree, b: Tree) -> bool:
    """A client's name may have a slash in it, which a slot's may not."""
    clean = [{k.replace("/", "|"): v for k, v in t.items()} for t in (a, b)]
    return tree.equal(clean[0], clean[1])


@contextlib.contextmanager
def emptied(path: Path) -> Iterator[Path]:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
