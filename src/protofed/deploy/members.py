"""``federation.toml``: what the server and the sites have agreed on. Nothing in it is secret."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)

from protofed.config import check_settings
from protofed.data import Task
from protofed.data.augment import AUGMENTS
from protofed.data.info import FOLDER
from protofed.data.sources.folder import TEST_SPLITS
from protofed.deploy.installed import InstalledMethod
from protofed.deploy.spec import skeleton
from protofed.deploy.templating import render
from protofed.deploy.wire import Refused
from protofed.errors import ProtofedError, unknown
from protofed.files import FORMAT, check_format, write_atomic
from protofed.toml import parse_toml

FEDERATION_FILE = "federation.toml"
_SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Member:
    """A site: its name, its domain, and its public key as OpenSSH writes it.

    The key is empty until the site is admitted, and after the key was revoked.
    """

    name: str
    domain: str
    key: str


@dataclass(frozen=True)
class Members:
    """A federation: its sites and the rules of its rounds. Times are in seconds."""

    name: str
    address: str
    sites: Mapping[str, Member]
    minimum: int
    """Sites that must reply before anything is averaged."""
    classes: tuple[str, ...] = ()
    image_size: int = 32
    pixel_range: str | None = None
    """What becomes black and white in images with more than 8 bits, e.g. ``0:4095``."""
    task: str | None = None
    """A built-in task whose clients the sites are: to try things out without images of your own."""
    gather_seconds: float = 120.0
    """How long the first round waits for all sites before it settles for the minimum."""
    wait_seconds: float = 3600.0
    """How long a round waits for the minimum number of sites before the run ends with an error."""
    round_seconds: float = 3600.0
    """How long a round waits for replies before it continues without the missing ones."""
    client_certificates: bool = False
    """Whether a site needs a TLS certificate, in addition to its key, to reach the server."""
    max_samples: int = 10**6
    """The most training or test images that a site may declare."""
    checkpoints: int = 3
    """How many checkpoints the server keeps, and so how far a run can be rolled back."""
    methods: Mapping[str, InstalledMethod] = field(default_factory=dict)
    """Methods that are not the package's, as this machine has installed them."""
    revoked: tuple[str, ...] = ()
    """Public keys that no site may have again."""

    def __post_init__(self) -> None:
        for name, text in (("name", self.name), ("address", self.address), ("task", self.task)):
            if not (isinstance(text, str) or (text is None and name == "task")):
                raise ProtofedError(f"{name} must be text, got {text!r:.100}")
        if Path(self.name).name in ("", ".."):
            raise ProtofedError(f"'{self.name}' cannot be a federation's name")
        if not self.sites:
            raise ProtofedError("a federation needs sites")
        for site in self.sites:
            if not _SITE_NAME.fullmatch(site):
                raise ProtofedError(
                    f"'{site}' cannot be a site's name", "use letters, digits, dots and dashes"
                )
            if not self.sites[site].domain:
                raise ProtofedError(f"site '{site}' has an empty domain")
        for name in ("gather_seconds", "wait_seconds", "round_seconds"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < 1e7:
                raise ProtofedError(f"{name} must be a number of seconds, got {value!r}")
        if type(self.minimum) is not int or not 1 <= self.minimum <= len(self.sites):
            raise ProtofedError(
                f"minimum must be between 1 and the number of sites, got {self.minimum!r}"
            )
        for name, least in (("max_samples", 1), ("checkpoints", 2)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= 10**9:
                raise ProtofedError(f"{name} must be a whole number from {least}, got {value!r}")
        if type(self.client_certificates) is not bool:
            raise ProtofedError(
                f"client_certificates must be true or false, got {self.client_certificates!r}"
            )
        check_settings({"image_size": self.image_size, "pixel_range": self.pixel_range})
        if not all(isinstance(c, str) for c in self.classes):
            raise ProtofedError("classes must be names")
        if len(set(self.classes)) != len(self.classes):
            raise ProtofedError("classes contains a name twice")
        keys = [site.key for site in self.sites.values() if site.key]
        if len(self._by_key) != len(keys):
            raise ProtofedError("two sites have the same key")
        for key in self.revoked:
            if not isinstance(key, str) or (point := _point(key)) is None:
                raise ProtofedError(f"{key!r:.100} in revoked is not a key")
            if (owner := self._by_key.get(point)) is not None:
                raise ProtofedError(f"site '{owner}' has a key that was revoked")

    @cached_property
    def _by_key(self) -> dict[bytes, str]:
        found = {}
        for site in self.sites.values():
            if not site.key:
                continue
            point = _point(site.key)
            if point is None:
                raise ProtofedError(f"the key of site '{site.name}' is invalid")
            found[point] = site.name
        return found

    def site_with_key(self, public_key: bytes) -> str | None:
        """The site that has this public key (PEM, as Flower gives it)."""
        return self._by_key.get(_curve_point(load_pem_public_key, public_key) or b"")

    def clients(self) -> dict[str, int]:
        """The number of sites in each domain."""
        return dict(Counter(site.domain for site in self.sites.values()))

    def skeleton(self, augment: str = "crop", flip: bool = True) -> Task:
        """The task that the sites make up, without images."""
        if len(self.classes) < 2:
            named = "only one class" if self.classes else "no classes"
            raise ProtofedError(
                f"federation '{self.name}' names {named}",
                f'add classes = ["...", "..."] to {FEDERATION_FILE}, the same on server and sites',
            )
        # a run's hash covers the digest, and so what all sites must agree on
        agreed = json.dumps(
            [self.name, self.classes, self.image_size, *filter(None, [self.pixel_range])]
        )
        task = skeleton(
            f"{FOLDER}{self.name}",
            self.classes,
            self.clients(),
            self.image_size,
            AUGMENTS[augment](flip),
            TEST_SPLITS[0],
            hashlib.sha256(agreed.encode()).hexdigest(),
        )
        return replace(task, pixel_range=self.pixel_range)

    def require_own(self, task: Task) -> None:
        """Refuse a run on a task that is not this federation's.

        Whoever submits a run chooses its task's name, which becomes part of file names.
        """
        own, problem = self.task or f"{FOLDER}{self.name}", ""
        if task.name != own:
            problem = f"the run is for task {task.name!r:.100}, this federation is for {own!r}"
        elif self.task is None and task.classes != self.classes:
            problem = f"the run's classes differ from those in {FEDERATION_FILE} here"
        elif self.task is None and task.image_size != self.image_size:
            problem = (
                f"the run's images have {task.image_size} pixels, "
                f"those in {FEDERATION_FILE} have {self.image_size}"
            )
        elif self.task is None and task.pixel_range != self.pixel_range:
            problem = (
                f"the run's pixel_range is {task.pixel_range}, "
                f"that in {FEDERATION_FILE} is {self.pixel_range}"
            )
        if problem:
            raise Refused(problem, f"server and sites need the same {FEDERATION_FILE}")


def _point(key: str) -> bytes | None:
    return _curve_point(load_ssh_public_key, key.encode())


def _curve_point(load: Callable[[bytes], Any], key: bytes) -> bytes | None:
    """A public key's compressed point, the same however the key is written; None if invalid."""
    try:
        return bytes(load(key).public_bytes(Encoding.X962, PublicFormat.CompressedPoint))
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None


def read_toml(path: Path, valid: Iterable[str]) -> dict[str, Any]:
    """The content of a file that ``deploy init`` wrote, which may have only these keys."""
    try:
        raw = parse_toml(path.read_text("utf-8"))
    except OSError as error:
        raise ProtofedError(
            f"cannot read '{path}': {error.strerror}", "protofed deploy init writes it"
        ) from None
    except ValueError as error:  # also bytes that are not text
        raise ProtofedError(f"'{path}' is not valid TOML: {error}") from None
    check_format(path, raw.pop("format", None))
    for key in raw.keys() - set(valid):
        raise unknown(f"key in '{path}':", key, valid)
    return raw


def read_members(folder: Path) -> Members:
    """Read and check the ``federation.toml`` of a server's or a site's folder."""
    path = folder / FEDERATION_FILE
    raw = read_toml(path, [f.name for f in fields(Members)])
    try:
        raw["sites"] = {
            name: Member(name, str(about.get("domain", name)), str(about["key"]))
            for name, about in raw.get("sites", {}).items()
        }
        raw["methods"] = {
            name: InstalledMethod.read(folder, name, about)
            for name, about in raw.get("methods", {}).items()
        }
        for name in ("classes", "revoked"):
            if not isinstance(raw.get(name, []), list):
                raise ProtofedError(f"{name} must be a list, got {raw[name]!r:.100}")
            raw[name] = tuple(raw.get(name, ()))
        return Members(**raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise ProtofedError(f"'{path}' is incomplete: {error}") from None
    except ProtofedError as error:
        raise ProtofedError(f"'{path}': {error.message}", error.hint) from None


def members_text(members: Members) -> str:
    """The content of a ``federation.toml``."""
    return render("federation.toml", **vars(members), format=FORMAT)


def write_members(folder: Path, members: Members) -> None:
    write_atomic(folder / FEDERATION_FILE, members_text(members))
