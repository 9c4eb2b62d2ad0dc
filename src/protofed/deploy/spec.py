"""What travels of a run: its configuration, facts and task, without images, as text.

Of public images, only a digest and their number per round travel; of a folder that every machine
has a copy of, neither the path nor the name.

The text goes with the run (in Flower's run configuration) to the server and to every site. A site
builds the same ``Config`` from it, and the hash must be the one the server names: a version of
protofed that would compute something else is detected before it trains.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from protofed.config import (
    SETTINGS,
    Config,
    make_config,
    method_files,
    with_files,
    without_paths,
)
from protofed.data.info import FOLDER
from protofed.data.task import Augment, Domain, Images, Task
from protofed.deploy.counts import Count
from protofed.deploy.installed import InstalledMethod, file_sha256
from protofed.deploy.wire import Refused
from protofed.errors import ProtofedError
from protofed.federation.facts import Facts, discover, file_digest
from protofed.federation.model_fit import require_fit
from protofed.federation.model_state import travel
from protofed.federation.public_images import (
    FOLDER_POOL,
    digest_count,
    is_from_task,
    make_public_sampler,
)
from protofed.federation.simulation import initial_network, make_setup, make_shares
from protofed.method import Method
from protofed.methods import METHODS, reference
from protofed.models import Network
from protofed.user_code import is_file

FILES = "files"
"""In a site's and the server's folder: copies of the files that methods read."""

_NONE: Mapping[str, InstalledMethod] = MappingProxyType({})


@dataclass(frozen=True)
class RunSpec:
    """A run as server and sites know it before they look at any image."""

    config: Config
    """Complete: the clients of every domain, and the precision."""
    task: Task
    """It has its images only where the run was planned, and only if it is a built-in task."""
    facts: Facts
    """Those of the machine that started the run; the digests are of the images sites must have."""
    public: Mapping[str, int]
    """How many public images a round has, by where they come from; empty if it needs none."""
    counts: Mapping[str, Count]
    """The images of each site, where a built-in task decides them."""

    @property
    def hash(self) -> str:
        """Identifies the run, as in every run's folder."""
        return self.facts.run_hash(self.config)

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.facts.run_name(self.config)


def make_spec(
    config: Config, task: Task, methods: Mapping[str, InstalledMethod] = _NONE
) -> RunSpec:
    """The run of this config, on a task whose images may be elsewhere.

    ``methods`` are those that this machine has installed in addition to the built-in ones.
    """
    installed = {method.reference for method in methods.values()}
    if reference(config.method) not in {*METHODS, *installed}:
        raise ProtofedError(
            f"method '{config.method.name}' comes from a file that the sites do not have",
            "install it on the server and at every site: protofed deploy method FILE.py:CLASS; "
            "then name it as that command does",
        )
    if any(map(is_file, config.models)):
        raise ProtofedError(
            f"model {' and '.join(config.models)} comes from a file that the sites do not have",
            "only models that the package includes can be deployed",
        )
    config = config.for_task(task.info)
    sizes = (len(task.classes), task.image_size, config.width, config.norm)
    require_fit(config.method, config.models, *sizes)
    found = discover(config, task)
    facts = replace(found, engine="flower", engine_reason="sites of a deployment")
    public = _count_public(config, task, facts.public_digest)
    config = replace(config, precision=facts.precision)
    network = initial_network(config, task)
    make_setup(config, task, network)  # here rather than at every site
    if config.weights is not None:
        _require_sent(config.method, network)
    shares = make_shares(config, task) if task.has_images else []
    counts = {s.name: Count(len(s.rows), len(task.domains[s.domain].test)) for s in shares}
    return RunSpec(config, task, facts, public, counts)


def _require_sent(method: Method, network: Network) -> None:
    """Refuse weights from a file if sites would start with others: only the server has the file."""
    kept = [name for name, way in travel(method, network).items() if way == "no"]
    if own := [name for name in kept if name.startswith("encoder.")]:
        raise ProtofedError(
            f"{method.name} keeps entries of the backbone at the sites ({own[0]}, ...), "
            "which do not have the file of weights",
            "use a method that sends the whole model, or leave out --weights",
        )


def _count_public(config: Config, task: Task, digest: str | None) -> dict[str, int]:
    wanted = config.method.public_images
    if wanted is None:
        return {}
    if wanted.source.startswith(FOLDER):
        assert digest is not None
        return {FOLDER_POOL: min(wanted.images, digest_count(digest))}
    if is_from_task(wanted, task) and not task.has_images:
        raise ProtofedError(
            f"method '{config.method.name}' needs public images, and the sites' own are not public",
            "copy the same folder of unlabeled images to every site and to this machine, and use "
            "deploy site --public PATH there and deploy start --public PATH here",
        )
    shares = make_shares(config, task) if task.has_images else []
    sampler = make_public_sampler(
        wanted, task, shares, config.seed, "cpu", config.data, config.reading
    )
    assert sampler is not None
    return sampler.counts


def pack(spec: RunSpec) -> str:
    """A run as text; ``unpack`` reads it."""
    config, task, method = spec.config, spec.task, spec.config.method
    wanted = method.public_images
    if wanted is not None and wanted.source.startswith(FOLDER):
        method = method.with_options(public=FOLDER)  # its path on this machine stays here
    method = with_files(method, dict.fromkeys(method_files(method), ""))  # and those of files
    parts = {
        "hash": spec.hash,
        "method": {**_named(method), "options": method.options()},
        "settings": {  # without the paths on this machine
            name: without_paths(name, getattr(config, name)) for name in SETTINGS if name != "data"
        },
        "task": {
            "name": task.name,
            "classes": task.classes,
            "domains": list(task.domains),
            "augment": asdict(task.augment),
        },
        "facts": spec.facts.to_dict(),
        "public": dict(spec.public),
        "counts": dict(spec.counts),
    }
    return json.dumps(parts, sort_keys=True)


def _named(method: Method) -> dict[str, str]:
    """A method by its name and, if it is not the package's, the SHA-256 of its file."""
    found = reference(method)
    if found in METHODS:
        return {"name": found}
    return {"name": method.name, "sha256": file_sha256(Path(found.rpartition(":")[0]))}


def _find(name: str, digest: str | None, methods: Mapping[str, InstalledMethod]) -> str:
    """The reference of the method that a run names; no other file is executed."""
    if digest is None and name in METHODS:
        return name
    if name not in methods:
        raise Refused(f"method = {name!r:.100} is not installed here")
    if digest != methods[name].sha256:
        raise Refused(
            f"method = '{name}' has the SHA-256 {digest!s:.16} in the run, and "
            f"{methods[name].sha256:.16} was pinned here"
        )
    return methods[name].verified()


def unpack(text: str, methods: Mapping[str, InstalledMethod] = _NONE) -> RunSpec:
    """The run that ``pack`` wrote; ``methods`` are this machine's own."""
    try:
        parts = json.loads(text)
        about, settings, method = parts["task"], parts["settings"], parts["method"]
        found = _find(str(method["name"]), method.get("sha256"), methods)
        augment: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in about["augment"].items()
        }
        task = skeleton(
            about["name"],
            about["classes"],
            about["domains"],
            settings["image_size"],
            Augment(**augment),
            settings["test_split"],
        )
        task = replace(task, pixel_range=settings.get("pixel_range"))
        config = make_config(task, found, method["options"], **settings)
        public = {str(name): int(n) for name, n in parts["public"].items()}
        counts = {str(name): Count(*map(int, both)) for name, both in parts["counts"].items()}
        spec = RunSpec(config, task, Facts.from_dict(parts["facts"]), public, counts)
        claimed = parts["hash"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtofedError(f"the run's configuration cannot be read: {error!r}") from None
    if spec.hash != claimed:
        raise ProtofedError(
            f"run {claimed} has hash {spec.hash} on this machine",
            "server and sites need the same version of protofed",
        )
    return spec


def with_own_files(spec: RunSpec, folder: Path, whose: str) -> RunSpec:
    """The run with this machine's copies of the files that its method reads.

    They are found in a folder by their content: no path that came with the run is opened.
    """
    method, digests = spec.config.method, (spec.facts.files_digest or "").split(",")
    names = method_files(method)
    if not names:
        return spec
    copies = sorted(path for path in folder.glob("*") if path.is_file())
    there = {file_digest(str(path)): path for path in copies}
    found = {name: there[d] for name, d in zip(names, digests, strict=False) if d in there}
    if missing := [name for name in names if name not in found]:
        raise Refused(
            f"{whose} has no copy of the file that {method.name} needs as its {missing[0]}",
            f"copy the file that the run was started with into {FILES}/ in its own folder",
        )
    return replace(spec, config=replace(spec.config, method=with_files(method, found)))


def asked_settings(spec: RunSpec) -> dict[str, Any]:
    """What a run asks for, as people read it: its method and what can change its numbers."""
    config = spec.config
    settings = {name: getattr(config, name) for name, s in SETTINGS.items() if s.hashed}
    return {
        "task": config.task,
        "method": config.method.name,
        **config.method.options(),
        **{name: value for name, value in settings.items() if value is not None},
    }


def skeleton(
    name: str,
    classes: Iterable[str],
    domains: Iterable[str],
    image_size: int,
    augment: Augment,
    test_split: str | None,
    digest: str = "",
) -> Task:
    """A task without its images."""
    pixels = torch.empty(0, 3, image_size, image_size, dtype=torch.uint8)
    none = Images(pixels, torch.empty(0).long())
    domains = tuple(domains)
    return Task(
        name=name,
        classes=tuple(classes),
        domains=dict.fromkeys(domains, Domain(none, none)),
        augment=augment,
        clients=dict.fromkeys(domains, 1),
        samples=dict.fromkeys(domains, 1.0),
        digest=digest,
        test_split=test_split,
    )
