"""``python -m tests.fuzz``: the fuzzing job. CONTRIBUTING.md says what it is for."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tests.fuzz import corruptions, files, folders, harness, kills, texts  # noqa: F401
from tests.fuzz.driver import GOALS, State, fuzz, settle, table, workplace
from tests.fuzz.harness import FUZZERS, Tally

SECONDS = 180.0
SHORT = {"inputs": 1, "corruptions": 1, "kills": 1}
"""Batches of the short form."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, help=f"how long; default: {SECONDS:.0f}")
    goals = "until the goals are reached, over as many runs as it takes"
    parser.add_argument("--long", action="store_true", help=goals)
    parser.add_argument("--short", action="store_true", help="as in CI: little of everything")
    parser.add_argument("--batches", type=int, help="that many batches of each fuzzer")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    counts = "where the counts add up; default: build/fuzz.json"
    parser.add_argument("--state", type=Path, default=Path("build/fuzz.json"), help=counts)
    parser.add_argument("--only", default="", help=f"of {', '.join(FUZZERS)}")
    parser.add_argument("--repeat", metavar="FUZZER:WHICH", help="one fault, as it was reported")
    given = parser.parse_args()
    if given.repeat:
        return repeat(given.repeat)
    if given.short:
        harness.EXAMPLES = 5
    batches = dict.fromkeys(GOALS, given.batches) if given.batches else None
    limited = given.long or given.short or given.batches
    state = fuzz(
        jobs=given.jobs,
        seconds=given.seconds if given.seconds or limited else SECONDS,
        state=None if given.short else given.state,
        names=[name for name in given.only.split(",") if name],
        to_goals=given.long,
        batches=SHORT if given.short else batches,
        tell=lambda text: print(text, flush=True),
    )
    return report(state)


def report(state: State) -> int:
    runs = len(state.before) + 1
    print(f"\n{table(state)}\n")
    if state.path is not None:
        print(f"{runs} run{'s' * (runs > 1)} of the job, in {state.path}")
    for fault in state.faults.values():
        print(f"\nFAULT {fault.signature} ({fault.hits} times)\n  input: {fault.input[:600]}")
        print(f"  repeat: python -m tests.fuzz --repeat '{fault.repeat}'\n{fault.trace[-1500:]}")
    faults = sum(state.total(name).faults for name in FUZZERS)
    print(f"\n{faults} faults: lost runs, wrong results, tracebacks, files outside their folder")
    return int(faults > 0)


def repeat(which: str) -> int:
    """A batch by its number, or the bytes of one draw."""
    name, _, what = which.rpartition(":")
    fuzzer, began = FUZZERS[name], time.monotonic()
    with workplace() as root:
        (root / "worker").mkdir()
        settle(root / "worker")
        if what.startswith("x") and fuzzer.repeat is not None:
            tally: Tally = fuzzer.repeat(bytes.fromhex(what[1:]), root / "worker")
        else:
            tally = fuzzer.batch(int(what), root / "worker")
        os.chdir("/")
    for fault in tally.faults.values():
        print(
            f"FAULT {fault.signature} ({fault.hits} times)\n  input: {fault.input}\n{fault.trace}"
        )
    seconds = time.monotonic() - began
    print(f"{tally.tried} tried in {seconds:.1f} s, {len(tally.faults)} kinds of faults")
    return int(bool(tally.faults))


if __name__ == "__main__":
    sys.exit(main())
