"""A site's side of a round: its images, its private states on its own disk, its answer.

What a site is asked is checked against its ``policy`` first, and goes into its ``audit`` log, as
does what it sends.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict

from protofed import tree
from protofed.config import AUTO, DEVICES, READ_SETTINGS, SETTINGS, task_settings
from protofed.data import Images, Share, Task, load_task
from protofed.data.info import FOLDER
from protofed.data.load import site_images
from protofed.data.sources.folder import folder_path
from protofed.data.task import Reading
from protofed.deploy.audit import AuditLog, contents
from protofed.deploy.members import FEDERATION_FILE, Members, read_members, read_toml
from protofed.deploy.messages import Answer, Request, read, write
from protofed.deploy.policy import Approvals, Policy, read_policy
from protofed.deploy.spec import FILES, RunSpec, asked_settings, unpack, with_own_files
from protofed.deploy.spending import Spending, Trained
from protofed.deploy.wire import Refused, add_tree, read_tree
from protofed.errors import Diverged, ProtofedError, unknown
from protofed.federation.client_round import train_client
from protofed.federation.cpu import keep_freed_memory, one_thread
from protofed.federation.evaluation import EvalJob, evaluate_job
from protofed.federation.facts import find_device
from protofed.federation.privacy import system_normal
from protofed.federation.public_images import (
    PublicSampler,
    describe_digest,
    make_public_sampler,
    public_digest,
)
from protofed.federation.server import Server
from protofed.federation.setup import ClientData
from protofed.federation.simulation import initial_network, make_setup, make_shares
from protofed.files import expand_user
from protofed.method import PublicImages
from protofed.models.mixed import client_models
from protofed.runs.model_file import ModelCard, StoredModel
from protofed.runs.run import tf32
from protofed.tree import Tree
from protofed.version import __version__

SITE_FILE = "site.toml"
MAX_REASON = 1000
"""Characters of an error in the audit log."""


@dataclass(frozen=True)
class SiteConfig:
    """A site's own settings, and those of its federation."""

    folder: Path
    """Holds the settings, the site's key, its private states and its models."""
    name: str
    members: Members
    data: str | None
    public: str | None
    """The folder of public images, for methods that need some."""
    device: str
    reading: Reading
    policy: Policy = Policy()


def read_site_config(
    folder: Path, data: str | None = None, public: str | None = None
) -> SiteConfig:
    """Read a site's settings from its folder; ``data`` and ``public`` override them."""
    path = folder / SITE_FILE
    raw = read_toml(path, ("site", "data", "public", "device", "policy", *READ_SETTINGS))
    members = read_members(folder)
    name, device = raw.get("site", ""), raw.get("device", AUTO)
    if not isinstance(name, str) or name not in members.sites:
        raise unknown(f"site in '{path}':", name, members.sites)
    if device not in (AUTO, *DEVICES):
        raise unknown(f"device in '{path}':", device, (AUTO, *DEVICES))
    for key in ("data", "public"):
        if not isinstance(raw.get(key, ""), str):
            raise ProtofedError(f"{key} in '{path}' must be a folder, got {raw[key]!r}")
    with _advice_for_sites():
        device = find_device(device)
    given = {n: SETTINGS[n].check(f"{n} in '{path}'", raw[n]) for n in READ_SETTINGS if n in raw}
    data, public = data or raw.get("data"), public or raw.get("public")
    policy = read_policy(path, raw.get("policy", {}), members.methods)
    return SiteConfig(folder, name, members, data, public, device, Reading(**given), policy)


def own_images(site: SiteConfig, spec: RunSpec) -> tuple[Images, Images, PublicSampler | None]:
    """The site's training and test images, and the run's public ones if its method needs some.

    Labels are indices into the classes of the run's task.
    """
    if site.members.task is None:
        train, test = folder_images(site, spec.task.classes, spec.task.image_size)
        return train, test, _public(site, spec, spec.task, [])
    # the files of a built-in task may be elsewhere on this machine, and its limits are its own
    own = vars(site.reading) | {"data": site.data, "skip_bad": spec.config.skip_bad}
    task = load_task(spec.config.task, **(task_settings(spec.config) | own))
    if task.classes != spec.task.classes or (task.digest or None) != spec.facts.digest:
        raise ProtofedError(f"the images of task '{task.name}' here differ from the run's")
    shares = {s.name: s for s in make_shares(spec.config, task)}
    if site.name not in shares:
        raise ProtofedError(f"the run has no client '{site.name}'")
    share = shares[site.name]
    domain = task.domains[share.domain]
    train = Images(domain.train.x[share.rows], domain.train.y[share.rows])
    return train, domain.test, _public(site, spec, task, list(shares.values()))


def folder_images(site: SiteConfig, classes: tuple[str, ...], size: int) -> tuple[Images, Images]:
    """Training and test images from the site's own folder, labeled by index into ``classes``."""
    if site.data is None:
        raise ProtofedError(
            f"site '{site.name}' has no images",
            f'point to them with --data PATH, or data = "PATH" in {SITE_FILE}',
        )
    path = expand_user(site.data).resolve()
    if not path.is_dir():
        raise ProtofedError(f"there is no folder '{path}'", "it must be a tree class/image")
    with _advice_for_sites():
        reading = dataclasses.replace(site.reading, pixel_range=site.members.pixel_range)
        found = site_images(path, size, reading)
    for name in found.classes:
        if name not in classes:
            raise unknown(f"class of the federation (a folder in '{path}'):", name, classes)
    label = torch.tensor([classes.index(name) for name in found.classes])
    (domain,) = found.domains.values()
    train, test = (Images(i.x, label[i.y]) for i in (domain.train, domain.test))
    return train, test


def check_public(site: SiteConfig) -> str:
    """Read the site's public images before it joins, and describe them; the run compares them."""
    source = f"{FOLDER}{site.public}"
    if site.members.task is not None:  # their size depends on the run
        return str(folder_path(source, "point to it with --public PATH"))
    wanted, task = PublicImages(source, images=1), site.members.skeleton()
    with _advice_for_sites():
        return describe_digest(public_digest(wanted, task, reading=site.reading))


def _public(
    site: SiteConfig, spec: RunSpec, task: Task, shares: Sequence[Share]
) -> PublicSampler | None:
    """This site's copy of the run's public images; refused if it differs from the run's.

    The error goes to the server, so it names no folder and no file.
    """
    method, expected = spec.config.method, spec.facts.public_digest
    wanted = method.public_images
    if wanted is None:
        return None
    folder = wanted.source.startswith(FOLDER)
    if folder:
        if site.public is None:
            raise Refused(
                f"site '{site.name}' has no public images, which {method.name} needs",
                "copy the folder that the run was started with and point to it with --public PATH, "
                f'or public = "PATH" in {SITE_FILE}',
            )
        wanted = wanted._replace(source=f"{FOLDER}{site.public}")
    data = site.data if site.members.task is not None else None
    with _advice_for_sites():
        found = make_public_sampler(
            wanted, task, shares, spec.config.seed, site.device, data, site.reading
        )
    assert found is not None
    if found.digest != expected:
        raise Refused(
            f"the public images of site '{site.name}' differ from the run's: "
            f"{describe_digest(found.digest)}, not {describe_digest(expected)}",
            "copy the folder again" if folder else "copy the task's files again",
        )
    return found


@contextmanager
def _advice_for_sites() -> Iterator[None]:
    """In errors, name the site's setting where a run has an option."""
    try:
        yield
    except ProtofedError as error:
        raise type(error)(_for_site(error.message), _for_site(error.hint)) from None


def _for_site(text: str) -> str:
    text = text.replace("--skip-bad", f"skip_bad = true in {SITE_FILE}")
    text = text.replace("--device cpu", f'device = "cpu" in {SITE_FILE}')
    text = text.replace("no pixel_range", f"no pixel_range in {FEDERATION_FILE}")
    return re.sub(r"--max-(\w+)-(\w+) (\d[\d.]*)", rf"max_\1_\2 = \3 in {SITE_FILE}", text)


class PrivateStates:
    """A site's private states of one run, each written whole or not at all.

    The server names the state to continue from. Every state has its own name, so whatever happened
    since (a lost reply, a server that returned to its checkpoint), the one it names belongs to the
    reply it accepted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, name: str) -> bool:
        return self._path(name).is_file()

    def load(self, name: str) -> Tree:
        path = self._path(name)
        if not path.is_file():
            raise Refused(
                f"the site no longer has its private state {name}",
                "restore it from a backup, or start the run over",
            )
        return tree.load(path)[0]

    def save(self, round: int, state: Tree) -> str:
        """Save a state; returns its name."""
        name = f"{round}-{secrets.token_hex(4)}"
        tree.save(state, self._path(name), private=True)
        return name

    def keep_only(self, *needed: str) -> None:
        """Remove all states but these: the server will never name another."""
        for path in self.folder.glob("*.safetensors"):
            if path.stem not in needed:
                path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if not re.fullmatch(r"\d{1,9}-[0-9a-f]{8}", name):
            raise Refused(f"{name[:40]!r} is not the name of a private state")
        return self.folder / f"{name}.safetensors"


def answer(site: SiteConfig, spec: str, content: RecordDict) -> RecordDict:
    """The site's reply to a message of the run that ``spec`` describes.

    It is in the audit log before it leaves the site, and so is a refusal.
    """
    audit, about = AuditLog(site.folder), dict[str, Any]()
    try:
        request = read(content, Request)
        about = {"run": request.run, "round": request.round + request.train}  # counted from 1
        if request.site != site.name:
            raise Refused(f"this is site '{site.name}', but the message is for '{request.site}'")
        run, received = unpack(spec, site.members.methods), read_tree(content)
        audit.append(
            "asked", **about, train=request.train, evaluate=request.evaluate,
            settings=asked_settings(run), received=contents(received),
        )  # fmt: skip
        site.members.require_own(run.task)
        if request.run != run.hash:
            raise Refused(f"the message is for run {request.run}, but the run is {run.hash}")
        if not 0 <= request.round <= run.config.rounds - request.train:
            raise Refused(f"round {request.round}: the run has rounds = {run.config.rounds}")
        keep_freed_memory()
        with one_thread(), tf32(run.config.precision == "tf32"):
            said, message = _answer(site, run, spec, request, received)
    except Exception as error:
        event = "refused" if isinstance(error, Refused | Diverged) else "failed"
        audit.append(event, **about, why=str(error)[:MAX_REASON])
        raise
    numbers = {name: value for name, value in asdict(said).items() if type(value) in (int, float)}
    audit.append("sent", **numbers | about, slots=contents(message))
    return add_tree(write(said), message)


def _answer(
    site: SiteConfig, run: RunSpec, spec: str, request: Request, received: Tree
) -> tuple[Answer, Tree]:
    task, policy = run.task, site.policy
    policy.check(run.config)
    run = with_own_files(run, site.folder / FILES, f"site '{site.name}'")
    config, method = run.config, run.config.method
    model = client_models(config.model, list(site.members.sites))[site.name]
    network = initial_network(config, task, model)
    setup = make_setup(config, task, network)
    policy.check_round(setup, network, request.round)
    if policy.approval:  # needed even for what the policy allows
        Approvals(site.folder).require(run, spec)
    about = (site.name, run.hash, method.name, request.round, request.train)
    if not (request.train or request.evaluate):  # only to declare how many images there are
        train, test = folder_images(site, task.classes, task.image_size)
        return Answer(*about, samples=len(train), tested=len(test), version=__version__), {}
    train, test, public = own_images(site, run)
    least = max(config.min_class_count, policy.min_class_count)
    privacy = dataclasses.replace(setup.privacy, normal=system_normal)
    setup = dataclasses.replace(setup, public=public, privacy=privacy, min_class_count=least)
    states = PrivateStates(site.folder / "states" / run.hash)
    if request.accepted:
        mine = states.load(request.accepted)
    else:
        server = Server(
            method, network, setup.sizes, [site.name], rounds=config.rounds, seed=config.seed
        )
        mine = server.initial_client(network.state_dict())
    network = network.to(  # type: ignore[call-overload]
        torch.device(site.device), memory_format=torch.channels_last
    )
    past = site.members.checkpoints * config.checkpoint_every  # how far the server may go back
    spending = Spending(site.folder / "privacy" / run.hash, privacy, past)
    report: dict[str, Any] = {}
    if request.evaluate:
        tests = {site.name: _on(test, site.device)}
        job = EvalJob(model, None, tests)
        if method.evaluates != "global":
            job = EvalJob(model, site.name, tests, site.members.sites[site.name].domain)
        at = max(0, request.round - 1)
        score = evaluate_job(setup, {model: network}, job, received, lambda _: mine, at)["accuracy"]
        report |= {"right": round(score[site.name] * len(test) / 100), "tested": len(test)}
        if request.round == config.rounds:  # the run is over: the site gets its model
            _save_model(site, run, model, mine, received, score[site.name])
            spending.forget(before=config.rounds)
    message: Tree = {}
    if request.train:

        def train_here() -> Trained:
            domain = site.members.sites[site.name].domain
            client = ClientData(site.name, domain, _on(train, site.device), model)
            reply = train_client(setup, network, client, received, mine, request.round)
            kept = any(reply.mine.values()) or any(mine.values())
            if kept:
                policy.check_private_state(method)
            return reply.message, {
                "state": states.save(request.round, reply.mine) if kept else "",
                "samples": reply.samples,
                "steps": reply.steps,
                "lr": reply.lr,
                "loss_terms": list(reply.losses),
                "loss_totals": [total for total, _ in reply.losses.values()],
                "loss_steps": [steps for _, steps in reply.losses.values()],
            }

        if privacy.budgets:
            message, trained = spending.once(request, received, train_here, states.has)
        else:
            message, trained = train_here()
        report |= trained
    states.keep_only(request.accepted, *request.kept, report.get("state", ""))
    return Answer(*about, version=__version__, **report), message


def _save_model(
    site: SiteConfig, run: RunSpec, model: str, mine: Tree, received: Tree, accuracy: float
) -> None:
    """Write the model that this site has at the end of the run, with its own test accuracy."""
    domain = site.members.sites[site.name].domain
    clients = [{"client": site.name, "model": model, "domain": domain}]
    holds, own = "the global model", {}
    if run.config.method.evaluates != "global":
        holds = f"what all sites share (model/...), and site {site.name}'s own entries"
        own = {site.name: mine.get("model", {})}
    found = run.facts.applied(run.config)
    scores = {domain: accuracy, "average": accuracy}
    card = ModelCard.of(found, run.task, run.hash, clients, scores, holds)
    stored = StoredModel.of(card, received, run.config.method, own)
    stored.save(site.folder / "models" / f"{run.name}.safetensors", private=True)


def _on(images: Images, device: str) -> Images:
    return Images(images.x.to(device), images.y.to(device))
