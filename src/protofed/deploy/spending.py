"""What a site has sent for a run under a privacy budget; it is on disk before it is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from protofed import tree
from protofed.deploy.messages import Request
from protofed.deploy.wire import Refused
from protofed.errors import ProtofedError
from protofed.federation.privacy import Privacy
from protofed.files import make_folder, read_json, sealed, write_atomic
from protofed.tree import Tree

SPENT_FILE = "spent.json"

Trained = tuple[Tree, dict[str, Any]]
"""A message, and what the site reports of its training."""


class Spending:
    """A site's messages of one run; ``keep`` is how many rounds the server may go back.

    A request that is repeated (a lost reply, a server that returned to its checkpoint) gets the
    reply it got before: noise drawn again would be one more release of the same images.
    """

    def __init__(self, folder: Path, privacy: Privacy, keep: int) -> None:
        self.folder, self.privacy, self.keep = folder, privacy, keep

    @property
    def releases(self) -> int:
        path = self.folder / SPENT_FILE
        return int(read_json(path, ("releases",))["releases"]) if path.is_file() else 0

    def once(
        self,
        request: Request,
        received: Tree,
        train: Callable[[], Trained],
        has_state: Callable[[str], bool],
    ) -> Trained:
        """The reply that this request got before, or that of ``train``, once it is paid for.

        ``has_state``: whether the site still has the private state that belongs to a reply.
        """
        about = f"{request.round}-{tree.digest(received, request.accepted)}"
        path = self.folder / f"{about}.safetensors"
        if path.is_file():
            message, report = tree.load(path)
            if not report["state"] or has_state(report["state"]):
                return message, report
        releases = self._spend()
        message, report = train()
        report = {**report, "releases": releases}
        tree.save(message, path, report, private=True)
        self.forget(before=request.round - self.keep)
        return message, report

    def forget(self, before: int) -> None:
        """Remove the replies of earlier rounds; what was spent stays."""
        for path in self.folder.glob("*-*.safetensors"):
            if int(path.name.partition("-")[0]) < before:
                path.unlink(missing_ok=True)

    def _spend(self) -> int:
        """Write down one more release; returns its number.

        A server can send several messages at once, and a process answers each: one at a time.
        """
        make_folder(self.folder, private=True)
        with FileLock(self.folder / "lock", mode=0o600):
            releases = self.releases + 1
            try:
                self.privacy.require(releases)
            except ProtofedError as error:
                raise Refused(error.message, error.hint) from None
            content = sealed({"releases": releases, "spent": self.privacy.spent(releases)})
            text = json.dumps(content, indent=2) + "\n"
            write_atomic(self.folder / SPENT_FILE, text, private=True)
            return releases
