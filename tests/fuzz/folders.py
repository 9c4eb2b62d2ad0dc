"""Fuzzers of run folders from elsewhere: records, settings, summaries, packed runs, tensors.

The files are sound in their notation, and carry no checksum that would give the change away, as
those of earlier formats do not: what is tried is what comes after the checksum.
"""

from __future__ import annotations

import functools
import gzip
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save as serialize

from protofed import tree
from protofed.report.collect import collect
from protofed.runs.folder import RunFolder
from protofed.runs.pool import PACKED, Pool
from protofed.runs.result import load_run
from protofed.studies.folder import StudyFolder, to_text
from protofed.studies.show import lines
from tests.fuzz import mutate, tiny
from tests.fuzz.harness import Choices, Guard, Wrong, inputs

METHOD = "fedbn"  # it has client states, and clients' own entries in its model
JSON = ("rounds.jsonl", "summary.json", "facts.json", "clients.json")
READERS = ("load", "show", "table", "collect", "verify")


@functools.cache
def _base(folder: Path) -> dict[str, Any]:
    """The files of a sound run: text of the config, data of the others."""
    with Guard.off():
        run = tiny.reference(METHOD, folder).whole
    plain = ("format", "checksum")
    found: dict[str, Any] = {}
    for name in JSON:
        rows = [json.loads(line) for line in (run / name).read_text().splitlines()] if (
            name == "rounds.jsonl") else [json.loads((run / name).read_text())]  # fmt: skip
        rows = [{k: v for k, v in row.items() if k not in plain} for row in rows]
        found[name] = rows if name == "rounds.jsonl" else rows[0]
    text = (run / "config.toml").read_text()
    kept = [n for n in text.splitlines() if n and not n.startswith(("#", "format"))]
    found["config.toml"] = ["format = 1", *kept]
    return found


class Received(NamedTuple):
    file: str
    content: bytes
    reader: str


def _received(choices: Choices) -> Received:
    file = choices.pick((*JSON[:2], *JSON, "config.toml"))
    base = _base(HOME[0])[file]
    if file == "config.toml":
        from tests.fuzz.texts import _CONFIG_KEYS, GOOD

        content = mutate.toml(base, _CONFIG_KEYS, choices, GOOD)
    else:
        data = mutate.changed(base, choices)
        rows = data if file == "rounds.jsonl" and isinstance(data, list) else [data]
        content = b"".join(mutate.json_text(row) + b"\n" for row in rows)
        if choices.chance(8):
            content = mutate.mutated(content, choices)
    return Received(file, content, choices.pick(READERS))


HOME: list[Path] = []
"""The worker's folder; what is made of choices has to know where the sound run is."""


@functools.cache
def _pool(folder: Path) -> Path:
    """A pool with one run, as earlier versions wrote it, and a study over it."""
    pool, base = folder / "pool", _base(folder)
    with Guard.off():
        shutil.rmtree(pool, ignore_errors=True)
        shutil.copytree(tiny.reference(METHOD, folder).whole, pool / "run")
        for name in (*JSON, "config.toml"):
            (pool / "run" / name).write_bytes(_sound(base, name))
        (pool / "study").mkdir()
        (pool / "study" / "study.toml").write_text(study_text(folder, METHOD))
        mutate.plant(pool / "run")
    return pool


def study_text(folder: Path, method: str) -> str:
    """A study that a tiny run of the method answers."""
    words = ("model", "device", "precision", "protocol")
    given = [f'{n} = "{v}"' if n in words else f"{n} = {v}" for n, v in tiny.SETTINGS.items()]
    task = f"folder:{tiny.pictures(folder)}"
    return "\n".join(
        ["seeds = 1", "[settings]", *given, "[tasks.tiny]", f'task = "{task}"', "[rows]",
         f'row = "{method}"']
    )  # fmt: skip


def _sound(base: dict[str, Any], name: str) -> bytes:
    if name == "config.toml":
        return "\n".join(base[name]).encode() + b"\n"
    rows = base[name] if name == "rounds.jsonl" else [base[name]]
    return b"".join(mutate.json_text(row) + b"\n" for row in rows)


def _try_received(given: Received, folder: Path) -> None:
    pool = _pool(folder)
    run = pool / "run"
    (run / given.file).write_bytes(given.content)
    try:
        read(given.reader, run, pool)
    finally:
        (run / given.file).write_bytes(_sound(_base(folder), given.file))


def read(reader: str, run: Path, pool: Path) -> object:
    """What a person sees of a run, by one of the ways to see it."""
    if reader == "load":
        found = load_run(run)
        return repr(found), found.accuracy, found.found_config, found.rounds.rows()
    if reader == "show":
        return lines(run)
    if reader == "table":
        study = StudyFolder.open(pool / "study")
        made = study.tables()
        return "\n".join(to_text(study.study, made, form) for form in ("markdown", "csv"))
    if reader == "collect":
        groups = collect([run]).groups
        return [(g.title, g.rows, g.seeds, g.histories, g.looks) for g in groups]
    check = getattr(RunFolder(run), "damage", None)
    return check() if check is not None else RunFolder(run).checkpoint()


inputs("run folder", _received, _try_received)


# ---- packed runs --------------------------------------------------------------------------------


class PackedLine(NamedTuple):
    content: bytes
    squeezed: bool


def _packed(choices: Choices) -> PackedLine:
    base = _base(HOME[0])
    config = dict(_settings(HOME[0]))
    held = {name.partition(".")[0]: base[name] for name in JSON[:3]}
    line = {"name": "run", "config": config, "analysis": None, **held}
    content = mutate.json_text(mutate.changed(line, choices)) + b"\n"
    if choices.chance(8):
        content = mutate.mutated(content, choices)
    return PackedLine(content, choices.chance(16))


@functools.cache
def _settings(folder: Path) -> dict[str, Any]:
    return RunFolder(tiny.reference(METHOD, folder).whole).settings()


def _try_packed(given: PackedLine, folder: Path) -> None:
    path = folder / "packed"
    path.mkdir(exist_ok=True)
    content = gzip.compress(given.content, 1)
    (path / PACKED).write_bytes(content[: len(content) // 2] if given.squeezed else content)
    study = path / "study.toml"
    if not study.is_file():
        study.write_text(study_text(folder, METHOD))
    for run in Pool(path).runs:
        if run.finished:
            found = run.result()
            _ = repr(found), found.accuracy, found.rounds.rows(), run.settings
    made = StudyFolder.open(path)
    to_text(made.study, made.tables(), "markdown")


inputs("packed runs", _packed, _try_packed)


# ---- tensors ------------------------------------------------------------------------------------

_DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8, torch.bfloat16)
_KEYS = ("model/a", "model/", "/", "a", "model/a/b", "client/x/y", "é/\0", "", "server/round")


class TensorFile(NamedTuple):
    name: str
    content: bytes


@functools.cache
def _card(folder: Path) -> dict[str, Any]:
    with Guard.off():
        path = tiny.reference(METHOD, folder).whole / "model.safetensors"
    return tree.load(path)[1]


@functools.cache
def _entries(folder: Path) -> tuple[str, ...]:
    with Guard.off():
        found, _ = tree.load(tiny.reference(METHOD, folder).whole / "model.safetensors")
    return tuple(f"{slot}/{name}" for slot, entries in found.items() for name in entries)


def _tensors(choices: Choices) -> TensorFile:
    file = choices.pick(("checkpoint.safetensors", "model.safetensors"))
    held = {}
    for _ in range(choices.number(4)):
        shape = choices.pick(((), (1,), (0,), (2, 3), (2, 0, 3)))
        held[choices.pick((*_KEYS, *_entries(HOME[0])))] = torch.zeros(
            shape, dtype=choices.pick(_DTYPES)
        )
    about: Any = {"round": 2, "hash": "0123456789", "clients": {"left-0": "left-0-2.safetensors"}}
    if file.startswith("model"):
        about = _card(HOME[0])
    if not choices.chance(4):
        about = mutate.changed({**about, "pending": None}, choices)
    content = serialize(held, {"protofed": json.dumps(about)})
    return TensorFile(file, mutate.mutated(content, choices) if choices.chance(2) else content)


def _try_tensors(given: TensorFile, folder: Path) -> None:
    run = folder / "tensors"
    run.mkdir(exist_ok=True)
    path = run / given.name
    path.write_bytes(given.content)
    found, _ = tree.load(path)
    if not all(isinstance(t, torch.Tensor) for slot in found.values() for t in slot.values()):
        raise Wrong("a tensor file holds something else")
    if given.name.startswith("model"):
        model = RunFolder(run).model()
        if model.card.width == int(tiny.SETTINGS["width"]):  # others may take gigabytes
            for client in model.clients or (None,):
                model.network(client)
        return
    checkpoint = RunFolder(run).checkpoint()
    if checkpoint is None or not isinstance(checkpoint.records, int):
        raise Wrong("a checkpoint without a round")
    for file in checkpoint.clients.values():
        RunFolder(run).client_state(file)


inputs("tensors", _tensors, _try_tensors)
