"""A run: rounds from a configuration, kept in a folder, with checkpoints to go on from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from protofed import tree
from protofed.config import Config, merged_config
from protofed.data import Task
from protofed.errors import ProtofedError
from protofed.federation.client_state import Index
from protofed.federation.cpu import one_thread
from protofed.federation.simulation import Federation, Observer, initial_network
from protofed.files import write_atomic
from protofed.method import Method
from protofed.runs.folder import (
    append_record,
    complete_records,
    opened_folder,
    save_checkpoint,
)
from protofed.runs.records import Records, line
from protofed.runs.result import Result, is_finished, load_run, save_model
from protofed.runs.summary import summarize
from protofed.tree import Tree

__all__ = [
    "Federation",
    "Observer",
    "Result",
    "initial_network",
    "is_finished",
    "load_run",
    "run",
    "tf32",
]


def run(
    task: str | Task | None = None,
    method: str | Method | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    config: Config | str | Path | None = None,
    observers: Sequence[Observer] = (),
    **settings: Any,
) -> Result:
    """Run a federation and return its result.

    ``run(task="glyphs", method=protofed.methods.FPL(tau=0.05), rounds=20)``. ``settings`` are the
    fields of ``protofed.Config`` (rounds, seed, lr, clients, ...); what is not given comes from
    the task's protocol. ``config`` is a ready ``Config``, or a TOML file over which everything
    that is given here wins. With ``out`` the run keeps a folder, from which ``resume`` goes on
    after a crash.
    """
    if isinstance(config, Config):
        if settings or options or method is not None or isinstance(task, str):
            raise ProtofedError("a ready Config takes no further settings", "use make_config")
    else:
        config = merged_config(config, task, method, options, settings)
    folder = Path(out) if out is not None else None
    given_task = task if isinstance(task, Task) else None
    with one_thread(), tf32(config.precision == "tf32"), memory_errors_in_words():
        return _run(config, given_task, folder, resume, overwrite, observers)


def _run(
    config: Config,
    task: Task | None,
    folder: Path | None,
    resume: bool,
    overwrite: bool,
    observers: Sequence[Observer],
) -> Result:
    # first the federation: a split that cannot be neither makes a folder nor overwrites one
    federation = Federation(config, task, folder)
    opened = opened_folder(config, folder, resume, overwrite) if folder else nullcontext()
    with opened as checkpoint:
        return _rounds(federation, folder, checkpoint, observers)


def _rounds(
    federation: Federation,
    folder: Path | None,
    checkpoint: tuple[Tree, dict[str, Any]] | None,
    observers: Sequence[Observer],
) -> Result:
    config = federation.config
    server, records = federation.server, Records()
    if folder is not None:
        if checkpoint is not None:
            state, metadata = checkpoint
            server.state = tree.copy(state, server.device)
            server.round = metadata["round"]
            records = complete_records(folder, server.round, server.round)
            federation.store.restore(metadata["clients"])
        write_atomic(folder / "config.toml", config.toml())
        text = json.dumps(federation.table(), indent=2, ensure_ascii=False)
        write_atomic(folder / "clients.json", text + "\n")
        write_atomic(folder / "rounds.jsonl", "".join(map(line, records)))
    for observer in observers:
        observer.start(federation, records)
    done: tuple[int, Tree, Index] = (server.round, server.state, federation.store.accept())
    try:
        while server.round < config.rounds:
            record = federation.run_round(observers)
            records.append(record)
            if folder is not None:
                append_record(folder, record)
            done = (server.round, server.state, federation.store.accept())
            if folder and server.round % config.checkpoint_every == 0:
                save_checkpoint(folder, config, federation.store, done)
            for observer in observers:
                observer.round(record)
    except BaseException:
        # Ctrl-C, a diverging client, a full disk: what is complete is kept, and only that
        if folder is not None and done[0]:
            save_checkpoint(folder, config, federation.store, done)
        raise
    model = tree.copy({"model": federation.model}).get("model", {})
    own = federation.own_models()
    result = Result(config, records, model, _summary(federation, records), folder, clients=own)
    if folder is not None:
        save_checkpoint(folder, config, federation.store, done)
        save_model(result, folder)
        text = json.dumps(result.summary, indent=2, ensure_ascii=False)
        write_atomic(folder / "summary.json", text + "\n")
    for observer in observers:
        observer.end(result)
    return result


@contextmanager
def memory_errors_in_words() -> Iterator[None]:
    """A GPU that is too small, or that others use, is something a user can mend."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        text = str(error).partition(" Including")[0].partition("\n")[0].rstrip(".")
        hint = "use a smaller --batch or --model, --device cpu, or a GPU that has more of it free"
        raise ProtofedError(f"the GPU's memory is too short: {text}", hint) from error


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """TF32 convolutions, on or off: torch has them on unless told otherwise.

    Matrix products stay float32 either way: prototype terms must not lose digits, and the heads
    of these networks are too small to gain from it.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _summary(federation: Federation, records: Records) -> dict[str, Any]:
    return summarize(
        federation.config,
        records,
        data=federation.task.note,
        skipped=federation.task.skipped,
        batchnorm=federation.batchnorm,
        weights=federation.weights,
        engine=f"{federation.engine_name} ({federation.engine_reason})",
        tested={name: len(images) for name, images in federation.tests.items()},
        clients=federation.table(),
        **({"public": public.counts} if (public := federation.setup.public) else {}),
        **({"examined": federation.examined} if federation.examined else {}),
    )
