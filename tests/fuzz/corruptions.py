"""Bit flips, truncation and the like in every file of a run: the same result, or a refusal."""

from __future__ import annotations

import functools
import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import protofed
from protofed.errors import ProtofedError
from protofed.methods import WITHOUT_FILES
from protofed.runs.folder import RunFolder
from protofed.runs.result import load_run
from tests.fuzz import tiny
from tests.fuzz.folders import read, study_text
from tests.fuzz.harness import Fault, Guard, Tally, Wrong, judged, trials

SIZE = 12
KINDS = ("flip",) * 8 + ("cut off", "cut off", "hole", "lost byte", "empty", "another's", "lost")
MAY_BE_LOST = ("checkpoint", "model", "clients/")


def damaged(content: bytes, kind: str, rng: random.Random, other: bytes) -> bytes:
    at = rng.randrange(len(content)) if content else 0
    if kind == "flip" and content:
        return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    if kind == "hole":
        return content[:at] + bytes(min(64, len(content) - at)) + content[at + 64 :]
    return {"cut off": content[:at], "lost byte": content[:at] + content[at + 1 :],
            "another's": other}.get(kind, b"")  # fmt: skip


def batch(number: int, folder: Path) -> Tally:
    """All corruptions of a batch are of one method's run."""
    tally, names = Tally(), WITHOUT_FILES
    method = names[number % len(names)]
    rng = random.Random(f"corruptions:{number}")
    with Guard.off():
        good = tiny.reference(method, folder)
        other = tiny.reference("moon" if method == "fedbn" else "fedbn", folder)
    for _ in range(SIZE):
        finished = rng.random() < 0.5
        source = good.whole if finished else good.cut
        files = sorted(p.relative_to(source) for p in source.rglob("*") if p.is_file())
        file, kind = rng.choice(files), rng.choice(KINDS)
        if kind == "lost" and not str(file).startswith(MAY_BE_LOST):
            kind = "flip"
        theirs = (other.whole if finished else other.cut) / file
        content = (source / file).read_bytes()
        changed = damaged(content, kind, rng, theirs.read_bytes() if theirs.is_file() else b"")
        if changed == content and kind != "lost":
            continue
        if kind == "another's" and file.name == "rounds.jsonl" and _same(changed, content):
            continue  # in a tiny run, one method's rounds may be another's but for their times
        tally.tried += 1
        what = f"{method}, {'finished' if finished else 'stopped'}: {kind} in {file}"
        with tiny.emptied(folder / "damaged") as pool, warnings.catch_warnings(action="ignore"):
            run = Path(shutil.copytree(source, pool / "run"))
            (pool / "study").mkdir()
            (pool / "study" / "study.toml").write_text(study_text(folder, method))
            if kind == "lost":
                (run / file).unlink()
            else:
                (run / file).write_bytes(changed)
            attempt = functools.partial(_try, method, run, pool, folder, finished)
            fault = judged(attempt, tally)
        if fault is not None:
            tally.add(Fault("corruptions", f"corruptions:{number}", f"{fault[0]} ({_name(file)})",
                            what, fault[1]))  # fmt: skip
    return tally


def _same(a: bytes, b: bytes) -> bool:
    """Whether rounds are the same but for their times."""
    dropped = ("seconds", "checksum")
    one, other = (
        [{k: v for k, v in json.loads(line).items() if k not in dropped} for line in x.splitlines()]
        for x in (a, b)
    )
    return one == other


def _name(file: Path) -> str:
    return f"{file.parent}/" if len(file.parts) > 1 else file.name


def _try(method: str, run: Path, pool: Path, folder: Path, finished: bool) -> None:
    """Every way to read it and to resume it; an error of the last one counts as a refusal."""
    refused = None
    if finished:
        for reader in ("load", "show", "table", "collect", "verify"):
            try:
                _require_same(reader, method, run, pool, folder)
            except ProtofedError as error:
                refused = error
    protofed.run(tiny.loaded(folder), config=tiny.config(method, folder), out=run, resume=True)
    if what := tiny.difference(tiny.numbers(run), _numbers(method, folder)):
        raise Wrong(f"the resumed run has another {what}")
    if refused is not None:
        raise refused


def _require_same(reader: str, method: str, run: Path, pool: Path, folder: Path) -> None:
    good = _seen(method, folder)
    found = read(reader, run, pool)
    if reader == "verify":
        if hasattr(RunFolder, "damage") and not found and _refuses(run):
            raise Wrong("verify finds nothing in a run that cannot be read")
    elif reader == "load":
        whole = load_run(run)
        if not whole.lean and _content(run) != good["content"]:
            raise Wrong("load_run gives another result")
    elif reader == "table":
        text = str(found)
        if text != good["table"] and "—" not in text and "No run is there yet" not in text:
            raise Wrong("the table has another number")
    elif repr(found).replace(str(run), "") != good[reader]:
        raise Wrong(f"{reader} gives another result")


def _refuses(run: Path) -> bool:
    try:
        load_run(run)
    except ProtofedError:
        return True
    return False


def _content(run: Path) -> tuple[Any, ...]:
    found = load_run(run)
    slots = {"model": found.model, **{f"client {n}": s for n, s in found.client_models.items()}}
    bits = {f"{s} {n}": t.numpy().tobytes() for s, slot in slots.items() for n, t in slot.items()}
    return repr([found.config, found.rounds, found.summary, found.facts]), bits


@functools.cache
def _seen(method: str, folder: Path) -> dict[str, Any]:
    """What the undamaged run looks like, read from a copy at the same place."""
    with Guard.off(), tiny.emptied(folder / "sound") as pool:
        run = Path(shutil.copytree(tiny.reference(method, folder).whole, pool / "run"))
        (pool / "study").mkdir()
        (pool / "study" / "study.toml").write_text(study_text(folder, method))
        found: dict[str, Any] = {
            reader: repr(read(reader, run, pool)).replace(str(run), "")
            for reader in ("show", "collect")
        }
        found["table"] = str(read("table", run, pool))
        found["content"] = _content(run)
    assert "—" not in found["table"], found["table"]
    return found


@functools.cache
def _numbers(method: str, folder: Path) -> dict[str, Any]:
    return tiny.numbers(tiny.reference(method, folder).whole)


trials("corruptions", "corruptions", SIZE, batch)
