"""``federation.toml``: what the server and the sites have agreed on. Nothing in it is secret."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from protofed.data import Task, load_task
from protofed.data.info import FOLDER
from protofed.deploy.spec import folder_skeleton
from protofed.errors import ProtofedError, unknown

FEDERATION_FILE = "federation.toml"


@dataclass(frozen=True)
class Member:
    """A site: its name, its domain, and its public key as OpenSSH writes it."""

    name: str
    domain: str
    key: str

    @property
    def point(self) -> bytes:
        """The key's point on its curve, compressed: the same however the key is written."""
        from cryptography.hazmat.primitives import serialization

        return _compressed(serialization.load_ssh_public_key(self.key.encode()))


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
    task: str | None = None
    """A built-in task whose clients the sites are: for trying things out without own images."""
    gather_seconds: float = 120.0
    """How long the first round waits for all sites before it settles for the minimum."""
    wait_seconds: float = 3600.0
    """How long a round waits for the minimum of sites before the run ends with an error."""
    round_seconds: float = 3600.0
    """How long a round waits for replies before it continues without the missing ones."""

    def domain(self, site: str) -> str:
        """The domain of a site."""
        return self.sites[site].domain

    def clients(self) -> dict[str, int]:
        """The number of sites in each domain."""
        counts: dict[str, int] = {}
        for site in self.sites.values():
            counts[site.domain] = counts.get(site.domain, 0) + 1
        return counts

    def skeleton(self, augment: str = "crop", flip: bool | None = None) -> Task:
        """The task that the sites make up, without images."""
        if len(self.classes) < 2:
            raise ProtofedError(
                f"federation '{self.name}' names no classes",
                f'add classes = ["...", "..."] to {FEDERATION_FILE}, the same on server and sites',
            )
        return folder_skeleton(
            self.name, self.classes, self.image_size, self.clients(), augment, flip
        )

    def mismatch(self, task: Task) -> str:
        """Why a run on this task does not belong to this federation; empty if it does.

        Whoever submits a run chooses its task's name, which becomes part of file names.
        """
        own = self.task or f"{FOLDER}{self.name}"
        if task.name != own:
            return f"the run is for task {task.name[:100]!r}, this federation for {own!r}"
        if self.task is None and task.classes != self.classes:
            return f"the run's classes differ from those in {FEDERATION_FILE} here"
        if self.task is None and task.image_size != self.image_size:
            return (
                f"the run's images have {task.image_size} pixels, "
                f"those of {FEDERATION_FILE} {self.image_size}"
            )
        return ""

    def site_with_key(self, public_key: bytes) -> str | None:
        """The site that has this public key (PEM, as Flower gives it)."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization

        try:
            point = _compressed(serialization.load_pem_public_key(public_key))
        except (ValueError, TypeError, UnsupportedAlgorithm):
            return None
        return next((m.name for m in self.sites.values() if m.point == point), None)


def _compressed(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return bytes(
        key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)
    )


def read_members(path: Path) -> Members:
    """Read and check ``federation.toml``."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ProtofedError(
            f"cannot read '{path}': {error.strerror}", "protofed deploy init writes it"
        ) from None
    except UnicodeDecodeError as error:
        raise ProtofedError(f"'{path}' is not valid TOML: {error}") from None
    return parse_members(text, path)


def parse_members(text: str, path: Path) -> Members:
    """The federation that a ``federation.toml`` describes; ``path`` is for error messages."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProtofedError(f"'{path}' is not valid TOML: {error}") from None
    valid = {f.name for f in fields(Members)}
    for key in raw:
        if key not in valid:
            raise unknown(f"key in '{path}':", key, valid)
    sites = raw.pop("sites", {})
    try:
        members = {
            name: Member(name, str(about.get("domain", name)), str(about["key"]))
            for name, about in sites.items()
        }
        raw["classes"] = tuple(raw.get("classes", ()))
        result = Members(sites=members, **raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise ProtofedError(f"'{path}' is incomplete: {error}") from None
    _check(path, result)
    return result


def _check(path: Path, found: Members) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm

    if not found.sites:
        raise ProtofedError(f"'{path}' names no sites")
    for name in ("gather_seconds", "wait_seconds", "round_seconds"):
        value = getattr(found, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e7:
            raise ProtofedError(f"{name} in '{path}' must be a number of seconds, got {value!r}")
    if type(found.minimum) is not int or not 1 <= found.minimum <= len(found.sites):
        raise ProtofedError(
            f"minimum in '{path}' must be between 1 and the number of sites, got {found.minimum!r}"
        )
    if not all(isinstance(c, str) for c in found.classes):
        raise ProtofedError(f"classes in '{path}' must be names")
    if len(set(found.classes)) != len(found.classes):
        raise ProtofedError(f"classes in '{path}' contains a name twice")
    points = set()
    for member in found.sites.values():
        try:
            points.add(member.point)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise ProtofedError(f"the key of site '{member.name}' in '{path}' is invalid") from None
    if len(points) != len(found.sites):
        raise ProtofedError(f"two sites in '{path}' have the same key")


def federation_task(members: Members, **options: Any) -> Task:
    """The task of this federation's runs; without images if the sites bring their own."""
    if members.task is None:
        return members.skeleton(options.get("augment") or "crop", options.get("flip"))
    return load_task(members.task, **options)


def client_domain(site: str) -> str:
    """The domain of a client of a built-in task: ``scan-0`` belongs to ``scan``."""
    domain, dash, number = site.rpartition("-")
    if not dash or not number.isdecimal():
        raise ProtofedError(
            f"'{site}' is not a client of a task", "with --task, name sites scan-0, print-0, ..."
        )
    return domain
