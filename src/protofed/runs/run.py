"""A run: rounds from a config, kept in a folder, with checkpoints to resume from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from protofed import tree
from protofed.config import Config, merged_config, task_settings
from protofed.data import Task, load_task
from protofed.errors import Diverged, ProtofedError
from protofed.federation.bounds import recorded
from protofed.federation.client_state import Index
from protofed.federation.cpu import one_thread
from protofed.federation.facts import discover
from protofed.federation.simulation import Federation, Observer
from protofed.method import Method
from protofed.runs.artifacts import ArtifactWriter
from protofed.runs.folder import Checkpoint, RunFolder
from protofed.runs.model_file import ModelCard, StoredModel
from protofed.runs.records import Records, stops_early
from protofed.runs.result import Result
from protofed.runs.summary import pretrained, summarize
from protofed.tree import Tree

LOADING = ("image_size", "flip", "test_split", "augment")
"""Settings that count only while a task is loaded."""


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
    the task's protocol. ``config`` is a ready ``Config``, or a TOML file; everything given here
    overrides the file. With ``out`` the run keeps a folder, from which ``resume`` continues after
    a crash, or with more ``rounds`` than before.
    """
    if isinstance(config, Config):
        if settings or options or method is not None or isinstance(task, str):
            raise ProtofedError("a ready Config takes no further settings", "use make_config")
    else:
        config = merged_config(config, task, method, options, settings)
        if isinstance(task, Task):
            own = {"image_size": task.image_size, "flip": task.augment.flip}
            late = [name for name in LOADING if settings.get(name) not in (None, own.get(name))]
            if late:
                raise ProtofedError(
                    f"{late[0]} has no effect on a task that is already loaded",
                    f"give it to load_task, or name the task: task={task.name!r}",
                )
    loaded = task if isinstance(task, Task) else load_task(config.task, **task_settings(config))
    asked, config = config, config.settled(loaded.info)
    folder = RunFolder(out) if out is not None else None
    facts = discover(config, loaded)
    if not (resume and folder is not None and folder.has_checkpoint):
        for observer in observers:
            observer.prepare(asked, loaded)
    with one_thread(), tf32(facts.precision == "tf32"), memory_errors_in_words():
        # the federation first: if the split is impossible, no folder is made or cleared
        states = folder.client_states if folder is not None else None
        federation = Federation(config, loaded, states, facts)
        if folder is None:
            with closing(federation.engine):
                return _rounds(federation, None, None, observers)
        found = {**facts.to_dict(), "run": federation.hash, "config": asked.hash}
        complete = config.for_task(loaded.info)
        with (
            closing(federation.engine),
            folder.open(
                config,
                federation.hash,
                found,
                resume=resume,
                overwrite=overwrite,
                hash_of=lambda rounds: facts.run_hash(replace(complete, rounds=rounds)),
            ) as checkpoint,
        ):
            return _rounds(federation, folder, checkpoint, observers)


def _rounds(
    federation: Federation,
    folder: RunFolder | None,
    checkpoint: Checkpoint | None,
    observers: Sequence[Observer],
) -> Result:
    config, server, records, saved = federation.config, federation.server, Records(), 0
    domains = {share.name: share.domain for share in federation.shares}
    artifacts = ArtifactWriter(folder, config, federation.hash, federation.task.classes, domains)
    if folder is not None:
        if checkpoint is not None:
            server.state = tree.copy(checkpoint.state, server.device)
            server.round = checkpoint.round
            records = folder.records()
            if server.bounds is not None:
                server.bounds.restore(recorded(records))
            older = folder.older_checkpoint()
            federation.store.restore(checkpoint.clients, older.clients if older else {})
            saved = checkpoint.round if checkpoint.hash == federation.hash else 0
        folder.save_clients(federation.table())
    for observer in observers:
        observer.start(federation, records)
    done: tuple[int, Tree, Index] = (server.round, server.state, federation.store.accept())

    def save() -> None:
        nonlocal saved
        if folder is not None and done[0] > saved:
            _checkpoint(folder, federation, done)
            saved = done[0]

    try:
        while server.round < config.rounds and not stops_early(records, config.patience):
            record = federation.run_round((artifacts, *observers))
            records.append(record)
            artifacts.write(server, last=stops_early(records, config.patience))
            if folder is not None:
                folder.append_record(record)
            done = (server.round, server.state, federation.store.accept())
            if server.round % config.checkpoint_every == 0:
                save()
            for observer in observers:
                observer.round(record)
    except BaseException as error:
        # Ctrl-C, a diverging client, a full disk: what is complete is kept, and only that
        save()
        if folder is not None and isinstance(error, Diverged):
            folder.mark_diverged(str(error))
        for observer in observers:
            observer.stopped()
        raise
    summary = _summary(federation, records)
    stored = _trained(federation, summary)
    path = folder.path if folder is not None else None
    facts = federation.facts.to_dict()
    result = Result(federation.asked, records, summary, stored, path, facts)
    save()
    if folder is not None:
        folder.save_model(stored)
        folder.finish(summary)
    for observer in observers:
        observer.end(result)
    return result


def _trained(federation: Federation, summary: Mapping[str, Any]) -> StoredModel:
    """The trained model, with the clients' own: their entries, to be overlaid with the model's."""
    clients, holds = federation.own_models(), "the global model"
    if federation.method.evaluates != "global":
        holds = "each client's own entries (client/NAME/...), and what all share (model/...)"
        if not clients:
            holds = "what all clients share (model/...); their own entries are in clients/"
    config, task = replace(federation.config, rounds=summary["rounds"]), federation.task
    table, accuracy = summary["clients"], summary["accuracy"]
    card = ModelCard.of(config, task, federation.hash, table, accuracy, holds)
    return StoredModel.of(card, federation.server.broadcast(), federation.method, clients)


def _checkpoint(folder: RunFolder, federation: Federation, done: tuple[int, Tree, Index]) -> None:
    """Write the state after a complete round; the clients' files count with the checkpoint."""
    round, state, index = done
    files = federation.store.save(index, round)
    rounds = federation.config.rounds
    folder.save_checkpoint(Checkpoint(federation.hash, round, state, files, rounds=rounds))
    federation.store.clean(files)


@contextmanager
def memory_errors_in_words() -> Iterator[None]:
    """Say what to do when memory runs out: it is something a user can fix."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        text = str(error).partition(" Including")[0].partition("\n")[0].rstrip(".")
        hint = "use a smaller --batch or --model, --device cpu, or a GPU with more free memory"
        raise ProtofedError(f"out of GPU memory: {text}", hint) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        hint = "use a smaller --batch, --image-size or --model, or fewer --workers"
        raise ProtofedError("out of memory", hint) from error


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Turn TF32 convolutions on or off; PyTorch's default is on.

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
    config, facts = federation.config, federation.facts
    validated = {name: len(images) for name, images in federation.validation.items()}
    return summarize(
        config,
        records,
        hash=federation.hash,
        data=federation.task.note,
        skipped=federation.task.skipped,
        batchnorm=federation.batchnorm,
        weights=federation.weights,
        engine=f"{facts.engine} ({facts.engine_reason})",
        tested={name: len(images) for name, images in federation.tests.items()},
        clients=federation.table(),
        versions=facts.versions,
        **pretrained(config, facts),
        **({"public": public.counts} if (public := federation.setup.public) else {}),
        **({"examined": federation.examined} if federation.examined else {}),
        **({"validated": validated} if validated else {}),
        **({"privacy": words} if (words := federation.setup.privacy.words(config.method)) else {}),
    )
