"""SIGKILL at random moments of ``run``, ``compare`` and ``study run``, resumed and compared.

A process is killed after a random time, or right before one of the changes it makes to a file; with
all its children, alone, or one of the runs that it started. Whatever happens, the same command
finishes it, with the bits of a run that was not killed, and repeats no round of a checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protofed.methods import WITHOUT_FILES
from protofed.runs.folder import RunFolder
from tests.fuzz import tiny
from tests.fuzz.harness import Fault, Guard, Tally, Wrong, judged, trials

ENGINES = ("loop", "workers")
COMMANDS = ("run", "run", "run", "run", "run", "compare", "run", "study")
MOST_KILLS = 4
FRESH_ONE_IN = 40
"""How many of the trials start new interpreters, which takes seconds."""


def batch(number: int, folder: Path) -> Tally:
    """One trial: a command that is killed up to four times and then finishes."""
    tally, rng = Tally(), random.Random(f"kills:{number}")
    names = WITHOUT_FILES
    method, engine = names[number % len(names)], ENGINES[number // len(names) % 2]
    command = rng.choice(COMMANDS)
    methods = [method] if command == "run" else [method, rng.choice(names)]
    what = f"{command} of {', '.join(methods)} with {engine}"
    killed = 0

    def attempt() -> None:
        nonlocal killed
        with Guard.off(), tiny.emptied(folder / "killed") as place:
            trial = Trial(command, methods, engine, place, folder, rng)
            try:
                trial.run()
            finally:
                killed = trial.kills
                trial.end()

    fault = judged_slowly(attempt, tally)
    tally.ok = killed if fault is None else 0
    tally.refused, tally.tried = 0, killed
    if fault is not None:
        tally.add(Fault("kills", f"kills:{number}", fault[0], what, fault[1]))
    return tally


def judged_slowly(attempt: Callable[[], None], tally: Tally) -> tuple[str, str] | None:
    from tests.fuzz import harness

    patience, harness.PATIENCE_SECONDS = harness.PATIENCE_SECONDS, 2 * tiny.PATIENCE_SECONDS
    try:
        return judged(attempt, tally)
    finally:
        harness.PATIENCE_SECONDS = patience


class Trial:
    """A command, and the folder in which it is killed and resumed."""

    def __init__(
        self,
        command: str,
        methods: list[str],
        engine: str,
        place: Path,
        folder: Path,
        rng: random.Random,
    ) -> None:
        self.command, self.methods, self.place, self.rng = command, methods, place, rng
        self.folder = folder
        self.references = {m: tiny.reference(m, folder) for m in methods}
        self.fresh = rng.randrange(FRESH_ONE_IN) == 0
        self.started: list[int] = []
        self.kills = 0
        options = tiny.options(folder, engine=engine, workers=2,
                               checkpoint_every=rng.choice((1, 1, 2, 3)))  # fmt: skip
        self.argv = {
            "run": ["run", "--quiet", "--method", methods[0], "--out", str(place / "run")],
            "compare": ["compare", "--methods", ",".join(dict.fromkeys(methods)), "--jobs", "2",
                        "--runs", str(place), "--out", str(place / "compared")],
            "study": ["study", "run", str(place / "mine.toml"), "--jobs", "2",
                      "--runs", str(place)],
        }[command]  # fmt: skip
        if command == "study":
            rows = "\n".join(f'{m} = "{m}"' for m in dict.fromkeys(methods))
            task = f"folder:{tiny.pictures(folder)}"
            (place / "mine.toml").write_text(
                f'seeds = 1\n[tasks.tiny]\ntask = "{task}"\n[rows]\n{rows}\n'
            )
            del options[:2]
        self.argv += options

    def run(self) -> None:
        for again in range(1 + self.rng.randrange(MOST_KILLS)):
            before = self.checkpointed()
            ended = self._killed(again > 0)
            self._require_kept(before)
            if ended:
                break
        before = self.checkpointed()
        code, text = self._finish()
        if code != 0:
            raise Wrong(f"lost: the command that resumes ends with {code}: {text[-300:]}")
        self._require_kept(before)
        self._compare()

    def _start(self, again: bool, before: Callable[[], None], log: Path) -> tiny.Forked:
        argv = [*self.argv, *(["--resume"] if again and self.command == "run" else [])]
        with log.open("ab") as errors:
            kind = tiny.Fresh if self.fresh else tiny.Forked
            process = kind(["protofed", *argv], stderr=errors, before=before, session=True)
        self.started.append(process.pid)
        return process

    def _killed(self, again: bool) -> bool:
        """Kill it once; whether it had ended before."""
        rng, log = self.rng, self.folder / "killed.log"
        log.unlink(missing_ok=True)
        log.touch()
        left = 1 - self._done()
        seconds = left * sum(r.seconds for r in self.references.values())
        writes = int(left * max(r.writes for r in self.references.values()))
        victim = rng.choice(("group", "leader", "run") if self.command != "run" else ("group",))
        at = rng.randrange(1, max(2, writes)) if not self.fresh and rng.random() < 0.6 else 0

        def before() -> None:
            leader = os.getpid()

            def act(count: int) -> None:
                alone = (os.getpid() == leader) == (victim == "leader")
                if count == at and (victim == "group" or alone):
                    os.write(2, f"{tiny.KILLED}\n".encode())
                    if victim == "group":
                        os.killpg(leader, signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)

            tiny.count_writes(self.place, act)

        process = self._start(again, before, log)
        if at:
            code = process.wait(tiny.PATIENCE_SECONDS)
        else:
            slower = 2 * seconds + 8 if self.fresh else seconds
            deadline = time.monotonic() + rng.uniform(0, slower)
            while (found := process.poll()) is None and time.monotonic() < deadline:
                time.sleep(0.001)
            process.send(signal.SIGKILL, group=victim != "leader")
            code = process.wait(tiny.PATIENCE_SECONDS) if found is None else found
        text = log.read_text(errors="replace")
        hit = code == -signal.SIGKILL or tiny.KILLED in text
        self.kills += hit
        if not hit and code != 0:
            raise Wrong(f"lost: the command that resumes ends with {code}: {text[-300:]}")
        return not hit

    def _finish(self) -> tuple[int, str]:
        log = self.folder / "finish.log"
        log.unlink(missing_ok=True)
        process = self._start(True, lambda: None, log)
        code = process.wait(tiny.PATIENCE_SECONDS)
        return code, log.read_text(errors="replace")

    def folders(self) -> list[RunFolder]:
        return [RunFolder(p.parent) for p in sorted(self.place.glob("*/config.toml"))]

    def checkpointed(self) -> dict[Path, list[Any]]:
        """The records, with their times, that the checkpoints count on."""
        found = {}
        for run in self.folders():
            checkpoint = run.checkpoint()
            if checkpoint is not None:
                found[run.path] = run.records()[: checkpoint.round]
        return found

    def _done(self) -> float:
        """Roughly, how much of the command's work is in its checkpoints; never all of it."""
        rounds = sum(len(records) for records in self.checkpointed().values())
        return min(0.8, rounds / int(tiny.SETTINGS["rounds"]) / len({*self.methods}))

    def _require_kept(self, before: dict[Path, list[Any]]) -> None:
        for path, records in before.items():
            now = RunFolder(path).records()[: len(records)]
            if json.dumps(now) != json.dumps(records):
                raise Wrong("lost: rounds of a checkpoint were run again")

    def _compare(self) -> None:
        found = {run.settings()["method"]: run.path for run in self.folders()}
        if found.keys() != {*self.methods}:
            raise Wrong(f"lost: there are runs of {sorted(found)}")
        for method, path in found.items():
            good = self.references[method].whole
            if what := tiny.difference(tiny.numbers(path), tiny.numbers(good)):
                raise Wrong(f"the resumed run has another {what}")
            if self.command == "run" and any(path.rglob("*.tmp")):
                raise Wrong("the resumed run leaves a temporary file")
        if self.command == "compare" and not (self.place / "compared" / "table.csv").is_file():
            raise Wrong("lost: there is no table")

    def end(self) -> None:
        """Nothing that was started goes on."""
        for pid in self.started:
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue


trials("kills", "kills", 2, batch)
