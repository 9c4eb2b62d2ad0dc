"""Methods of your own in a federation: a file that the server and every site have installed.

``federation.toml`` pins each by its SHA-256, as the app is pinned; the file is in ``methods/`` next
to it. Neither comes from the network: ``protofed deploy method`` puts them there, on each machine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protofed.deploy.wire import Refused
from protofed.errors import ProtofedError
from protofed.methods import METHODS

FOLDER = "methods"


@dataclass(frozen=True)
class InstalledMethod:
    """A class in a Python file, and what the file's content must be."""

    name: str
    path: Path
    cls: str
    sha256: str

    @classmethod
    def read(cls, folder: Path, name: str, about: dict[str, Any]) -> InstalledMethod:
        """The method that ``federation.toml`` of this folder describes."""
        file, its_class, digest = (str(about[key]) for key in ("file", "class", "sha256"))
        if name in METHODS:
            raise ProtofedError(f"method '{name}' is a built-in method", "rename yours")
        if Path(file).name != file or len(digest) != 64 or not digest.isalnum():
            raise ProtofedError(f"method '{name}' needs a file's name and its SHA-256")
        return cls(name, folder.resolve() / FOLDER / digest[:16] / file, its_class, digest)

    @property
    def reference(self) -> str:
        return f"{self.path}:{self.cls}"

    def verified(self) -> str:
        """The reference, if the file is the one that was pinned."""
        found = file_sha256(self.path) if self.path.is_file() else "missing"
        if found != self.sha256:
            raise Refused(
                f"the file of method '{self.name}' is not the one that was pinned here "
                f"({found[:16]}, not {self.sha256[:16]})",
                "install it again: protofed deploy method",
            )
        return self.reference


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
