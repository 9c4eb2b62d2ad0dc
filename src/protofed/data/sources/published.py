"""What describes a published task: its protocol, the files it consists of, and their homes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protofed.data.task import Plan, TaskInfo


@dataclass(frozen=True)
class RemoteFile:
    """A file that can be downloaded.

    ``path`` is its place below the task's folder. ``urls`` are tried in order. ``md5`` is the
    checksum that ``cited`` publishes, None if nobody publishes one. ``count`` is the number of
    images, labels or lines in the file.
    """

    path: str
    urls: tuple[str, ...]
    domain: str
    md5: str | None = None
    cited: str = ""
    size: int | None = None
    count: int | None = None


def remote_list(name: str, homes: Sequence[str], domain: str, count: int) -> RemoteFile:
    """A list of a domain's images; nobody publishes checksums of such lists."""
    return RemoteFile(f"lists/{name}", tuple(home + name for home in homes), domain, count=count)


@dataclass(frozen=True)
class ManualDownload:
    """Files that only a person can download: their home asks for a login or a confirmation."""

    domains: tuple[str, ...]
    what: str
    pages: tuple[str, ...]
    layout: str


@dataclass(frozen=True)
class PublishedTask:
    """A task whose images others have published."""

    info: TaskInfo
    plan: Callable[[Sequence[Path], str], Plan]
    """The images among the given files and folders, divided by the named test split."""
    counts: Mapping[str, tuple[int, int]]
    """The published numbers of training and test images, under the default test split."""
    folders: tuple[str, ...]
    """Names of its folder or archive, as ``plain`` writes them."""
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Other names of its domains and classes, as copies of the data differ; also ``plain``."""
    distributions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Clients of each domain in single papers, besides the main distribution in ``info``."""
    random_covers_domains: bool = True
    """Whether the distribution ``random`` gives every domain at least one client."""
    whole_unseen: bool = True
    """Whether a domain that is left out of training is tested on all of its images."""
    owns: Callable[[Path], bool] | None = None
    """Whether a file or folder belongs to the task. None: folders named after its domains do."""
    files: tuple[RemoteFile, ...] = ()
    manual: tuple[ManualDownload, ...] = ()

    @property
    def domains(self) -> tuple[str, ...]:
        assert self.info.domains is not None
        return self.info.domains

    @property
    def classes(self) -> tuple[str, ...]:
        assert self.info.classes is not None
        return self.info.classes

    @property
    def fetch_hint(self) -> str:
        """What to do if its files are missing."""
        says = "" if self.files else ", which says where to get them by hand"
        fetch = f"run protofed data fetch {self.info.name}{says}"
        return f"{fetch}, or say where they are with --data or PROTOFED_DATA"

    def domain_names(self) -> dict[str, str]:
        """The domain that each name or alias stands for."""
        return {plain(a): d for d in self.domains for a in self._names(d)}

    def class_names(self) -> dict[str, int]:
        """The label that each name or alias of a class stands for."""
        return {plain(a): i for i, c in enumerate(self.classes) for a in self._names(c)}

    def _names(self, name: str) -> tuple[str, ...]:
        return (name, *self.aliases.get(name, ()))


def plain(name: str) -> str:
    """A name as names are compared: lowercase, without punctuation."""
    return "".join(c for c in name.casefold() if c.isalnum())
