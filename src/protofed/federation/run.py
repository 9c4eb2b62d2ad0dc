"""A run: rounds from a configuration, its folder, checkpoints, and what comes out of it."""

from __future__ import annotations

import base64
import io
import json
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from protofed import keys
from protofed.config import DTYPES, Config, make_config, read_config
from protofed.data import Images, Share, Task, load_task, split
from protofed.engines.loop import Loop
from protofed.errors import ProtofedError
from protofed.federation import tree
from protofed.federation.local import Setup, Site, Training, entry_list, one_thread
from protofed.federation.records import (
    SELECTION,
    Record,
    Records,
    last_mean,
    line,
    read_records,
)
from protofed.federation.server import Server
from protofed.federation.store import ClientStore, Index
from protofed.federation.tree import Slot, Tree
from protofed.files import write_atomic
from protofed.methods.base import Method, Sizes
from protofed.models import Network, build
from protofed.version import __version__


class Observer:
    """Watches a run; it sees everything and changes nothing."""

    def start(self, federation: Federation, records: Records) -> None:
        """Called before the first round, with the records of earlier rounds if resumed."""

    def client(self, round: int, done: int, total: int) -> None:
        """Called when a client of the round has finished."""

    def round(self, record: Record) -> None:
        """Called after each round."""

    def end(self, result: Result) -> None:
        """Called when the run is complete."""


class Federation:
    """A run in memory: the task split into clients, the server, the engine."""

    def __init__(
        self, config: Config, task: Task | None = None, folder: Path | None = None
    ) -> None:
        self.config = config
        self.task = task or load_task(config.task)
        self.method = config.method
        self.shares = split(self.task, config.clients, config.samples, config.seed)
        device, dtype = torch.device(config.device), DTYPES[config.precision]
        network = initial_network(config, self.task)
        model = tree.copy({"model": network.state_dict()})["model"]
        network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.sizes = Sizes(len(self.task.classes), network.features, self.task.image_size)
        self.setup = Setup(
            self.method,
            self.sizes,
            self.task.augment,
            Training(config.batch, config.epochs, config.lr, config.momentum, config.weight_decay),
            config.rounds,
            config.seed,
            dtype,
        )
        self.sites = {s.name: _site(self.task, s, device) for s in self.shares}
        self.tests = {
            name: Images(d.test.x.to(device), d.test.y.to(device))
            for name, d in self.task.domains.items()
        }
        self.server = Server(
            self.method,
            network,
            self.sizes,
            list(self.sites),
            rounds=config.rounds,
            seed=config.seed,
            participation=config.participation,
            average=config.average,
        )
        self.store = ClientStore(
            lambda: self.server.initial_client(model), folder / "clients" if folder else None
        )
        self.engine = Loop(self.setup, network)
        self.batchnorm = batchnorm_policy(network, self.method)

    def run_round(self, observers: Sequence[Observer] = ()) -> Record:
        """One round: broadcast, local training, upload, aggregate, evaluate."""
        began = time.perf_counter()
        server, round = self.server, self.server.round
        names, received = server.sample(), server.broadcast()
        down = tree.nbytes(received) * len(names)
        up = 0
        losses: dict[str, float] = {}
        steps = 0
        sites = [self.sites[n] for n in names]
        replies = self.engine.train(sites, received, self.store.get, round)
        for done, (name, reply) in enumerate(replies, start=1):
            server.accept(name, reply)
            self.store.stage(name, reply.mine, round)
            up += tree.nbytes(reply.message)
            steps += reply.steps
            for term, value in reply.losses.items():
                losses[term] = losses.get(term, 0.0) + value * reply.steps
            for observer in observers:
                observer.client(round, done, len(names))
        server.finish()
        self.store.accept()
        trained = time.perf_counter()
        accuracy = self.evaluate()
        return {
            "round": round,
            "accuracy": {d: round_to(a, 4) for d, a in accuracy.items()},
            "average": round_to(sum(accuracy.values()) / len(accuracy), 4),
            "loss": {term: value / steps for term, value in losses.items()},
            "bytes_up": up,
            "bytes_down": down,
            "clients": len(names),
            "steps": steps,
            "seconds": {
                "train": round_to(trained - began, 3),
                "evaluate": round_to(time.perf_counter() - trained, 3),
            },
        }

    def evaluate(self) -> dict[str, float]:
        """Accuracy per domain: of the global model, or of each domain's clients' own models."""
        received, round = self.server.broadcast(), self.server.round
        if self.method.evaluates == "global":
            return self.engine.evaluate(received, {}, self.tests, round)
        own: dict[str, list[float]] = {}
        for site in self.sites.values():
            tests = {site.domain: self.tests[site.domain]}
            scores = self.engine.evaluate(received, self.store.get(site.name), tests, round)
            own.setdefault(site.domain, []).append(scores[site.domain])
        return {domain: sum(a) / len(a) for domain, a in own.items()}

    @property
    def model(self) -> Slot:
        """The global model."""
        return self.server.state["model"]

    def table(self) -> list[dict[str, Any]]:
        """The client-to-domain table."""
        return [{"client": s.name, "domain": s.domain, "samples": len(s.rows)} for s in self.shares]


@dataclass
class Result:
    """What a run gave. In a notebook it shows its table and its curves."""

    config: Config
    rounds: Records
    model: Slot
    summary: dict[str, Any]
    folder: Path | None = None

    @property
    def accuracy(self) -> dict[str, float]:
        """Accuracy per domain and ``average``: means of the last five rounds."""
        return last_mean(self.rounds)

    def network(self) -> Network:
        """The trained network, in evaluation mode."""
        task = load_task(self.config.task)
        network = initial_network(self.config, task)
        network.load_state_dict(self.model)
        return network.eval()

    def plot(self) -> bytes:
        """The accuracy curves as PNG."""
        from protofed.report.curves import curves  # matplotlib is slow to import

        buffer = io.BytesIO()
        curves([self], buffer)
        return buffer.getvalue()

    def __repr__(self) -> str:
        shown = ", ".join(f"{d} {a:.1f}" for d, a in self.accuracy.items())
        return f"<{self.summary['method']} on {self.config.task}, seed {self.config.seed}: {shown}>"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{d}</th>" for d in self.accuracy)
        body = "".join(f"<td>{a:.2f}</td>" for a in self.accuracy.values())
        picture = base64.b64encode(self.plot()).decode()
        return (
            f"<p><b>{self.summary['method']}</b> on <b>{self.config.task}</b>, seed "
            f"{self.config.seed}, {len(self.rounds)} rounds; {SELECTION}</p>"
            f"<table><thead><tr>{head}</tr></thead><tbody><tr>{body}</tr></tbody></table>"
            f'<img alt="accuracy per domain over rounds" src="data:image/png;base64,{picture}">'
        )


def run(
    task: str | Task = "glyphs",
    method: str | Method = "fedavg",
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
    the task's protocol. ``config`` is a ready ``Config`` or a TOML file, over which ``settings``
    win. With ``out`` the run keeps a folder, from which ``resume`` goes on after a crash.
    """
    if isinstance(config, (str, Path)):
        given = read_config(Path(config))
        config = make_config(**{"task": task, "method": method, **given, **settings})
    elif config is None:
        config = make_config(task, method, options, **settings)
    folder = Path(out) if out is not None else None
    given_task = task if isinstance(task, Task) else None
    with one_thread():
        return _run(config, given_task, folder, resume, overwrite, observers)


def _run(
    config: Config,
    task: Task | None,
    folder: Path | None,
    resume: bool,
    overwrite: bool,
    observers: Sequence[Observer],
) -> Result:
    checkpoint = _open_folder(config, folder, resume, overwrite) if folder else None
    federation = Federation(config, task, folder)
    server, records = federation.server, Records()
    if folder is not None:
        if checkpoint is not None:
            server.state, metadata = checkpoint
            server.round = metadata["round"]
            federation.store.restore(metadata["clients"])
            records = Records(read_records(folder / "rounds.jsonl")[: server.round])
            if len(records) != server.round:
                raise ProtofedError(
                    f"'{folder}' has a checkpoint of round {server.round} but records of "
                    f"{len(records)} rounds",
                    "use --overwrite to start anew",
                )
        write_atomic(folder / "config.toml", config.toml())
        write_atomic(folder / "rounds.jsonl", "".join(map(line, records)))
    for observer in observers:
        observer.start(federation, records)
    done: tuple[int, Tree, Index] = (server.round, server.state, federation.store.accept())
    try:
        while server.round < config.rounds:
            record = federation.run_round(observers)
            records.append(record)
            if folder is not None:
                with (folder / "rounds.jsonl").open("a", encoding="utf-8") as file:
                    file.write(line(record))
            done = (server.round, server.state, federation.store.accept())
            if folder and server.round % config.checkpoint_every == 0:
                _checkpoint(folder, config, federation.store, done)
            for observer in observers:
                observer.round(record)
    except BaseException:
        # Ctrl-C, a diverging client, a full disk: what is complete is kept, and only that
        if folder is not None and done[0]:
            _checkpoint(folder, config, federation.store, done)
        raise
    result = Result(config, records, federation.model, _summary(federation, records), folder)
    if folder is not None:
        _checkpoint(folder, config, federation.store, done)
        tree.save({"model": result.model}, folder / "model.safetensors", {"hash": config.hash})
        text = json.dumps(result.summary, indent=2, ensure_ascii=False)
        write_atomic(folder / "summary.json", text + "\n")
    for observer in observers:
        observer.end(result)
    return result


def load_run(folder: str | Path) -> Result:
    """A finished run, read back from its folder."""
    folder = Path(folder)
    if not (folder / "summary.json").is_file():
        raise ProtofedError(f"'{folder}' holds no finished run", "finish it with --resume")
    config = make_config(**read_config(folder / "config.toml"))
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    model, _ = tree.load(folder / "model.safetensors")
    return Result(config, read_records(folder / "rounds.jsonl"), model["model"], summary, folder)


def is_finished(folder: Path, config: Config) -> bool:
    """Whether this very run is complete in that folder."""
    try:
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return bool(summary.get("hash") == config.hash)


def initial_network(config: Config, task: Task) -> Network:
    """The network with the keyed initial weights that all clients start from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keys.key(config.seed, config.model, "init"))
        classes = len(task.classes)
        backbone = build(config.model, classes, task.image_size, config.width, config.norm)
        sizes = Sizes(classes, backbone.features, task.image_size)
        return config.method.network(backbone, sizes).to(DTYPES[config.precision])


def batchnorm_policy(network: Network, method: Method) -> str:
    """What happens to BatchNorm between clients, in words."""
    ways = {method.shared(e) for e in entry_list(network) if e.kind == "bn"}
    if not ways:
        return "the model has no BatchNorm"
    words = {
        "both": "averaged like weights, running statistics included",
        "down": "set by the server",
        "no": "kept by each client",
    }
    return "; ".join(words[w] for w in sorted(ways))


def round_to(value: float, digits: int) -> float:
    """``round`` under a name that does not hide behind the word for a communication round."""
    return round(value, digits)


def _site(task: Task, share: Share, device: torch.device) -> Site:
    images = task.domains[share.domain].train
    own = Images(images.x[share.rows].to(device), images.y[share.rows].to(device))
    return Site(share.name, share.domain, own)


def _open_folder(
    config: Config, folder: Path, resume: bool, overwrite: bool
) -> tuple[Tree, dict[str, Any]] | None:
    """Make the folder ready; returns the checkpoint to go on from. Touches nothing on error."""
    if folder.exists() and not folder.is_dir():
        raise ProtofedError(f"'{folder}' is a file, not a run's folder", "choose another --out")
    used = folder.is_dir() and any(folder.iterdir())
    if used and not overwrite:
        if not (folder / "config.toml").is_file():
            raise ProtofedError(f"'{folder}' is not a run's folder", "choose another --out")
        if not resume:
            raise ProtofedError(
                f"'{folder}' already holds a run",
                "--resume goes on with it, --overwrite starts anew, --out takes another folder",
            )
        checkpoint = folder / "checkpoint.safetensors"
        if checkpoint.is_file():
            state, metadata = tree.load(checkpoint)
            if metadata.get("hash") != config.hash:
                raise ProtofedError(
                    f"'{folder}' holds a checkpoint of another configuration "
                    f"({metadata.get('hash')}, not {config.hash})",
                    f"compare with {folder / 'config.toml'}, or choose another --out",
                )
            return state, metadata
    if used and overwrite:
        if not (folder / "config.toml").is_file():
            raise ProtofedError(
                f"'{folder}' is not a run's folder: it is not overwritten", "choose another --out"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return None


def _checkpoint(
    folder: Path, config: Config, store: ClientStore, done: tuple[int, Tree, Index]
) -> None:
    """Write state after a complete round; the clients' files take effect with this one file."""
    round, state, index = done
    files = store.save(index, round)
    metadata = {"round": round, "hash": config.hash, "clients": files}
    tree.save(state, folder / "checkpoint.safetensors", metadata)
    store.clean(files)


def _summary(federation: Federation, records: Records) -> dict[str, Any]:
    config, method = federation.config, federation.method
    return {
        "task": config.task,
        "data": federation.task.note,
        "method": method.name,
        "hyper_parameters": method.options(),
        "protocol": config.protocol,
        "seed": config.seed,
        "hash": config.hash,
        "accuracy": last_mean(records),
        "selection": SELECTION,
        "evaluated": method.evaluates,
        "rounds": len(records),
        "bytes_up": sum(r["bytes_up"] for r in records),
        "bytes_down": sum(r["bytes_down"] for r in records),
        "seconds": round_to(sum(sum(r["seconds"].values()) for r in records), 3),
        "batchnorm": federation.batchnorm,
        "average": config.average,
        "precision": config.precision,
        "device": config.device,
        "clients": federation.table(),
        "versions": {
            "protofed": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
