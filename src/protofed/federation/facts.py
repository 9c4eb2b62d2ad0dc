"""What a run finds when it starts: its images, device, precision, engine and versions.

A config says what was asked for. Facts are recorded next to it, and compared when a run resumes and
wherever runs share one row of a table.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch

from protofed.config import AUTO, Config, method_files, short_hash, short_task
from protofed.cores import core_count
from protofed.data import Task
from protofed.errors import ProtofedError
from protofed.federation.public_images import public_digest
from protofed.user_code import is_file, readable
from protofed.version import __version__

NUMERICS = 4
"""Raised whenever the golden values, or the rounding of lanes, change.

Numbers of runs with different values are not comparable to the last digit. Not raised when lanes
got a kernel for AugMix, which rounds otherwise: only FedCCRL has it, and no run of it was kept.
"""

DTYPES = {**dict.fromkeys(("fp32", "tf32", "bf16"), torch.float32), "fp64": torch.float64}
"""The precision of weights; tf32 and bf16 are what convolutions and matrix products compute in."""

WORK_QUEUES, MANY_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", "32"
"""The variable for the number of CUDA's work queues, and what a run asks for."""

SHORT_COMMIT = 7
"""How many characters of a commit are recorded."""

DIGESTS = ("digest", "public_digest", "weights_digest", "model_digest", "files_digest")
"""The facts that stand for what comes from files."""

FACTS_SHAPE = {
    "numerics?": int,
    **dict.fromkeys(("device?", "precision?", "engine?", "engine_reason?", "hardware?"), str),
    **dict.fromkeys(("run?", "config?"), str),
    **dict.fromkeys((f"{name}?" for name in DIGESTS), str | None),
    "versions?": {str: str},
}
"""What readers of ``facts.json`` rely on."""


@dataclass(frozen=True)
class Facts:
    """What was found; the digests stand for images, weights, models and a method's own files."""

    numerics: int
    device: str
    precision: str
    engine: str
    engine_reason: str
    digest: str | None
    public_digest: str | None
    hardware: str
    versions: Mapping[str, str]
    weights_digest: str | None = None
    model_digest: str | None = None
    files_digest: str | None = None

    def applied(self, config: Config) -> Config:
        return replace(config, device=self.device, precision=self.precision, engine=self.engine)

    def run_hash(self, config: Config) -> str:
        """A hash of the run: what was asked for, and the facts that can change its numbers."""
        found = [self.device, self.precision, self.digest, self.public_digest]
        # added later than the rest
        found += filter(None, (self.weights_digest, self.model_digest, self.files_digest))
        return short_hash([config.hash, found])

    def run_name(self, config: Config) -> str:
        hash = self.run_hash(config)
        return f"{short_task(config.task)}-{config.method.name}-{config.seed}-{hash}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as ``facts.json`` holds it."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Facts:
        """Facts from plain data; keys of later versions are ignored."""
        names = [f.name for f in fields(cls)]
        if missing := [f.name for f in fields(cls) if f.default is MISSING and f.name not in found]:
            raise ProtofedError(f"the run's facts lack {', '.join(missing)}")
        return cls(**{name: found[name] for name in names if name in found})


def discover(config: Config, task: Task) -> Facts:
    """The facts of a run of this config on this machine; ``task`` is its task, loaded."""
    if config.device != "cpu":
        ask_for_work_queues()
    device = find_device(config.device, config.engine == "ray")
    engine, reason = choose_engine(config.engine, device, config.workers)
    wanted = config.method.public_images
    files = [name for name in config.models if is_file(name)]
    return Facts(
        numerics=NUMERICS,
        device=device,
        precision=find_precision(config.precision, device),
        engine=engine,
        engine_reason=reason,
        digest=task.digest or None,
        public_digest=public_digest(wanted, task, config.data, config.reading),
        hardware=_hardware(device),
        versions={
            "protofed": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "pillow": PIL.__version__,  # another version may decode a JPEG to other pixels
            "python": platform.python_version(),
            **({"commit": commit} if (commit := find_commit()) else {}),
        },
        weights_digest=config.weights and file_digest(config.weights),
        model_digest=",".join(file_digest(n.rpartition(":")[0]) for n in files) or None,
        files_digest=",".join(map(file_digest, method_files(config.method).values())) or None,
    )


@cache
def find_commit() -> str:
    """The commit of the checkout that the package runs from, or what the environment says.

    Empty if neither is there. A copy of a checkout without its history has ``PROTOFED_COMMIT``.
    """
    root = Path(__file__).parents[3]
    if given := os.environ.get("PROTOFED_COMMIT"):
        return given[:40]
    if not (root / ".git").exists() or not (root / "pyproject.toml").is_file():
        return ""  # an installed package may lie in someone else's repository
    try:
        return _head(root / ".git")[:SHORT_COMMIT]
    except (OSError, ValueError):
        return ""


def _head(git: Path) -> str:
    """The commit that is checked out, read from git's own files: no process is started."""
    if git.is_file():  # a worktree
        git = git.parent / git.read_text("utf-8").partition("gitdir: ")[2].strip()
    head = (git / "HEAD").read_text("utf-8").strip()
    if not head.startswith("ref: "):
        return head
    name, common = head.removeprefix("ref: "), git
    if (git / "commondir").is_file():
        common = git / (git / "commondir").read_text("utf-8").strip()
    for place in (git, common):
        if (place / name).is_file():
            return (place / name).read_text("utf-8").strip()
    packed = (common / "packed-refs").read_text("utf-8").splitlines()
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")


def file_digest(path: str) -> str:
    """A hash that stands for the content of a file."""
    try:
        with readable(Path(path)).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise ProtofedError(f"cannot read '{path}': {error.strerror}") from None


def find_device(asked: str, remote: bool = False) -> str:
    """The device; a ``remote`` one need not be on this machine."""
    there = torch.cuda.is_available()
    if asked == AUTO:
        return "cuda" if there else "cpu"
    if asked == "cuda" and not there and not remote:
        raise ProtofedError("device cuda was asked for, but torch sees no GPU", "use --device cpu")
    return asked


def ask_for_work_queues() -> None:
    """Have CUDA give this process more than eight queues; streams in one wait for each other.

    Nothing may have used CUDA before, since it reads the variable only once. Processes that share a
    GPU through MPS share one pool of queues, and with that many for each, few could start.
    """
    pipes = Path("/tmp/nvidia-mps")  # where MPS has them if no variable says so
    if "CUDA_MPS_PIPE_DIRECTORY" not in os.environ and not pipes.exists():
        os.environ.setdefault(WORK_QUEUES, MANY_QUEUES)


def find_precision(asked: str, device: str) -> str:
    if asked != AUTO:
        return asked
    return "bf16" if device == "cuda" and torch.cuda.is_bf16_supported() else "fp32"


def choose_engine(asked: str, device: str, workers: int | None = None) -> tuple[str, str]:
    cores = workers or core_count()
    if asked == "lanes" and device != "cuda":
        raise ProtofedError("engine lanes needs a GPU", "use --engine workers, or --device cuda")
    if asked == "workers" and device != "cpu":
        raise ProtofedError("engine workers runs on the CPU", "use --engine lanes on a GPU")
    if asked != AUTO:
        return asked, "asked for"
    if device == "cuda":
        return "lanes", "the device is a GPU"
    engine, count = ("workers", f"{cores} workers") if cores > 1 else ("loop", "one worker")
    return engine, f"the device is a CPU with {count}"


def _hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "GPUs of a cluster"
    return f"{platform.machine()} CPU, {torch.backends.cpu.get_cpu_capability()}"
