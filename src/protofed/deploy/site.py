"""A site's side: its images, its private states on its own disk, its answer to a message."""

from __future__ import annotations

import dataclasses
import re
import secrets
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict

from protofed import tree
from protofed.config import TASK_OPTIONS, Config
from protofed.data import Images, Share, Task, load_task
from protofed.data.info import FOLDER
from protofed.data.load import site_images
from protofed.data.sources.folder import folder_path
from protofed.deploy.members import FILE, Members, read_members
from protofed.deploy.messages import Answer, Request, read_request, write
from protofed.deploy.spec import unpack
from protofed.deploy.wire import Refused, add_tree, read_tree
from protofed.errors import ProtofedError, unknown
from protofed.federation.client_round import train_client
from protofed.federation.cpu import keep_freed_memory, one_thread
from protofed.federation.evaluation import evaluate
from protofed.federation.public_images import (
    PublicSampler,
    describe_digest,
    make_public_sampler,
    public_digest,
)
from protofed.federation.server import Server
from protofed.federation.setup import ClientData
from protofed.federation.simulation import initial_network, make_setup, make_shares
from protofed.method import PublicImages
from protofed.models.mixed import client_models
from protofed.runs.run import tf32
from protofed.tree import Tree
from protofed.version import __version__

SITE_FILE = "site.toml"
_KEYS = ("site", "data", "public", "device", "skip_bad")


@dataclass(frozen=True)
class Home:
    """A site's folder: its settings, the federation's, and where its states lie."""

    folder: Path
    name: str
    members: Members
    data: str | None
    device: str
    skip_bad: bool
    public: str | None = None
    """The folder of images that all sites have, for methods that need some."""


def open_home(folder: Path, data: str | None = None, public: str | None = None) -> Home:
    """Read a site's folder; ``data`` and ``public`` win over what its settings say."""
    path = folder / SITE_FILE
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ProtofedError(f"cannot read '{path}': {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProtofedError(f"'{path}' is not valid TOML: {error}") from None
    for key in raw:
        if key not in _KEYS:
            raise unknown(f"key in '{path}':", key, _KEYS)
    members = read_members(folder / FILE)
    name, device = raw.get("site"), raw.get("device", "auto")
    if name not in members.sites:
        raise unknown(f"site in '{path}':", name, members.sites)
    if device not in ("auto", "cpu", "cuda"):
        raise unknown(f"device in '{path}':", device, ("auto", "cpu", "cuda"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    skip_bad = bool(raw.get("skip_bad", False))
    for key in ("data", "public"):
        if not isinstance(raw.get(key, ""), str):
            raise ProtofedError(f"{key} in '{path}' must be a folder, got {raw[key]!r}")
    data, public = data or raw.get("data"), public or raw.get("public")
    return Home(folder, str(name), members, data, device, skip_bad, public)


def own_images(
    home: Home, config: Config, outline: Task
) -> tuple[Images, Images, PublicSampler | None]:
    """The site's training and test images, labeled as the run's task has its classes.

    And the run's public images, where its method needs some.
    """
    if home.members.task is None:
        train, test = folder_images(home, outline.classes, outline.image_size)
        return train, test, _public(home, config, outline, [])
    task = _built_in(home, config, outline)
    shares = {s.name: s for s in make_shares(config, task)}
    if home.name not in shares:
        raise ProtofedError(f"the run has no client '{home.name}'")
    share = shares[home.name]
    domain = task.domains[share.domain]
    train = Images(domain.train.x[share.rows], domain.train.y[share.rows])
    return train, domain.test, _public(home, config, task, list(shares.values()))


def folder_images(home: Home, classes: tuple[str, ...], size: int) -> tuple[Images, Images]:
    """Training and test images of the site's own folder."""
    if home.data is None:
        raise ProtofedError(
            f"site '{home.name}' has no images",
            f'say where they are: --data PATH, or data = "PATH" in {SITE_FILE}',
        )
    path = Path(home.data).expanduser().resolve()
    if not path.is_dir():
        raise ProtofedError(f"there is no folder '{path}'", "it has to be a tree class/image")
    with _advice_for_sites():
        found = site_images(path, size, home.skip_bad)
    for name in found.classes:
        if name not in classes:
            raise unknown(f"class of the federation (a folder in '{path}'):", name, classes)
    label = torch.tensor([classes.index(name) for name in found.classes])
    (domain,) = found.domains.values()
    train, test = (Images(i.x, label[i.y]) for i in (domain.train, domain.test))
    return train, test


def check_public(home: Home) -> str:
    """Read the site's public images before it joins, and tell of them; the run compares later."""
    source = f"{FOLDER}{home.public}"
    if home.members.task is not None:  # the run says what size they have
        return str(folder_path(source, "say where they are: --public PATH"))
    with _advice_for_sites():
        wanted = PublicImages(source, images=1)
        return describe_digest(
            public_digest(wanted, home.members.skeleton(), skip_bad=home.skip_bad)
        )


def _public(
    home: Home, config: Config, task: Task, shares: Sequence[Share]
) -> PublicSampler | None:
    """The run's public images as this site has them; refused if they are not those of the run.

    What is said of them goes to the server: it names no folder and no file.
    """
    wanted = config.method.public_images
    if wanted is None:
        return None
    folder = wanted.source.startswith(FOLDER)
    if folder:
        if home.public is None:
            raise Refused(
                f"site '{home.name}' has no public images, which {config.method.name} needs",
                "start the site with --public PATH, a copy of the folder that the run was started "
                f'with, or write public = "PATH" into {SITE_FILE}',
            )
        wanted = wanted._replace(source=f"{FOLDER}{home.public}")
    data = home.data if home.members.task is not None else None
    device = torch.device(home.device)
    with _advice_for_sites():
        found = make_public_sampler(wanted, task, shares, config.seed, device, data, home.skip_bad)
    assert found is not None
    if found.digest != config.public_digest:
        raise Refused(
            f"the public images of site '{home.name}' are not those of the run: "
            f"{describe_digest(found.digest)}, not {describe_digest(config.public_digest)}",
            "copy the folder again" if folder else "copy the task's files again",
        )
    return found


def _built_in(home: Home, config: Config, outline: Task) -> Task:
    """The built-in task of which the sites are clients."""
    options: dict[str, Any] = {"flip": config.flip}
    if config.digest:  # from files, which may lie elsewhere here
        options = {k: getattr(config, k) for k in TASK_OPTIONS} | {"data": home.data}
    task = load_task(config.task, **options)
    if task.classes != outline.classes or task.digest != outline.digest:
        raise ProtofedError(f"the images of task '{task.name}' here are not those of the run")
    return task


@contextmanager
def _advice_for_sites() -> Iterator[None]:
    """A site has a file where a run has an option."""
    try:
        yield
    except ProtofedError as error:
        hint = error.hint.replace("--skip-bad", f"skip_bad = true in {SITE_FILE}")
        raise type(error)(error.message, hint) from None


class States:
    """A site's private states of one run: files that are there whole or not at all.

    The server names the one to go on from. Each has a name of its own, so that whatever happened
    since (a lost reply, a server that went back to its checkpoint) the one it names is the one
    that belongs to the reply it accepted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, name: str) -> Tree:
        """The state of that name."""
        path = self._path(name)
        if not path.is_file():
            raise Refused(
                f"the site no longer has its private state {name}",
                "put it back from a copy, or start the run anew",
            )
        return tree.load(path)[0]

    def save(self, round: int, state: Tree) -> str:
        """Keep a state; returns the name to ask for it."""
        name = f"{round}-{secrets.token_hex(4)}"
        tree.save(state, self._path(name))
        return name

    def forget(self, *needed: str) -> None:
        """Remove all states but these: the server can name no other any more."""
        if self.folder.is_dir():
            for path in self.folder.glob("*.safetensors"):
                if path.stem not in needed:
                    path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if not re.fullmatch(r"\d{1,9}-[0-9a-f]{8}", name):
            raise Refused(f"{name[:40]!r} is no name of a private state")
        return self.folder / f"{name}.safetensors"


def answer(home: Home, spec: str, content: RecordDict) -> RecordDict:
    """What the site replies to a message of the run that ``spec`` describes."""
    request = read_request(content)
    if request.site != home.name:
        raise Refused(f"this is site '{home.name}', and the message is for '{request.site}'")
    config, task, _ = unpack(spec)
    if foreign := home.members.foreign(task):
        raise Refused(foreign, f"server and sites need the same {FILE}")
    if request.run != config.hash:
        raise Refused(f"the message is of run {request.run}, but the run is {config.hash}")
    keep_freed_memory()
    with one_thread(), tf32(config.precision == "tf32"):
        return _answer(home, config, task, request, read_tree(content))


def _answer(home: Home, config: Config, task: Task, request: Request, received: Tree) -> RecordDict:
    train, test, public = own_images(home, config, task)
    device, method = torch.device(home.device), config.method
    model = client_models(config.model, list(home.members.sites))[home.name]
    network = initial_network(config, task, model)
    setup = dataclasses.replace(make_setup(config, task, network), public=public)
    states = States(home.folder / "states" / config.hash)
    if request.accepted:
        mine = states.load(request.accepted)
    else:
        server = Server(
            method, network, setup.sizes, [home.name], rounds=config.rounds, seed=config.seed
        )
        mine = server.initial_client(network.state_dict())
    states.forget(request.accepted, request.kept)
    network = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    report: dict[str, Any] = {}
    if request.evaluate:
        tests = {home.name: _on(test, device)}
        seen = {} if method.evaluates == "global" else mine
        at = max(0, request.round - 1)
        score = evaluate(setup, network, received, seen, tests, at)["accuracy"]
        report |= {"right": round(score[home.name] * len(test) / 100), "tested": len(test)}
        if request.round == config.rounds:  # the run is over: the site has its model
            own = {"model": mine.get("model", {}) | received.get("model", {})}
            path = home.folder / "models" / f"{config.label}.safetensors"
            tree.save(own, path, {"hash": config.hash})
    message: Tree = {}
    if request.train:
        domain = home.members.domain(home.name)
        site = ClientData(home.name, domain, _on(train, device), model)
        reply = train_client(setup, network, site, received, mine, request.round)
        message = reply.message
        if any(reply.mine.values()) or any(mine.values()):
            report["state"] = states.save(request.round, reply.mine)
        report |= {
            "samples": reply.samples,
            "steps": reply.steps,
            "lr": reply.lr,
            "loss_terms": list(reply.losses),
            "loss_totals": [total for total, _ in reply.losses.values()],
            "loss_steps": [steps for _, steps in reply.losses.values()],
        }
    answered = Answer(
        home.name,
        config.hash,
        method.name,
        request.round,
        request.train,
        version=__version__,
        **report,
    )
    return add_tree(write(answered), message)


def _on(images: Images, device: torch.device) -> Images:
    return dataclasses.replace(images, x=images.x.to(device), y=images.y.to(device))
