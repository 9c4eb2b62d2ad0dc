"""Runs from folders, put into groups whose numbers may be compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from protofed.config import UNHASHED, Config
from protofed.errors import ProtofedError
from protofed.federation.run import Result, load_run
from protofed.study.tables import BASELINE

_OWN = ("method", "seed", "clients", "device", *UNHASHED)
"""Settings in which the runs of a comparison may differ: a distribution may draw its clients."""


@dataclass(frozen=True)
class Group:
    """Runs that differ only in method and seed; each run's summary has its label as method."""

    title: str
    results: tuple[Result, ...]

    @property
    def methods(self) -> dict[str, list[Result]]:
        """The runs of each method by its label, in order of their seeds."""
        found: dict[str, list[Result]] = {}
        for result in self.results:
            found.setdefault(result.summary["method"], []).append(result)
        return {m: sorted(runs, key=lambda r: r.config.seed) for m, runs in found.items()}

    @property
    def seeds(self) -> list[int]:
        """All seeds."""
        return sorted({r.config.seed for r in self.results})


@dataclass(frozen=True)
class Gathered:
    """What was found: groups of runs, and folders whose run could not be taken, with the reason."""

    groups: tuple[Group, ...]
    left_out: tuple[tuple[Path, str], ...]


def gather(paths: Sequence[Path], tell: Callable[[str], None] = lambda text: None) -> Gathered:
    """All finished runs in and under the paths: run folders, or folders that hold them."""
    results: dict[str, Result] = {}
    left_out: list[tuple[Path, str]] = []
    for folder in dict.fromkeys(f for path in paths for f in _folders(path)):
        if not (folder / "summary.json").is_file():
            left_out.append((folder, "not finished"))
            continue
        tell(f"reading {folder.name}")
        try:
            result = load_run(folder)
        except ProtofedError as error:
            left_out.append((folder, error.message))
            continue
        results.setdefault(result.config.hash, result)  # the same run twice is one run
    if not results:
        where = ", ".join(f"'{p}'" for p in paths)
        why = f"; '{left_out[0][0]}': {left_out[0][1]}" if left_out else ""
        raise ProtofedError(
            f"no finished run in {where}{why}", "give run, compare or study folders"
        )
    return Gathered(_groups(list(results.values())), tuple(left_out))


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ProtofedError(f"'{path}' is no folder", "give run, compare or study folders")
    if (path / "config.toml").is_file():
        return [path]
    return sorted(file.parent for file in path.rglob("config.toml"))


def _groups(results: list[Result]) -> tuple[Group, ...]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(_setting(result.config), []).append(result)
    settings = [_values(runs[0].config) for runs in found.values()]
    differing = [k for k in settings[0] if len({_text(s[k]) for s in settings}) > 1]
    groups = []
    for runs, values in zip(found.values(), settings, strict=True):
        title = str(values["task"])
        other = [k for k in differing if k not in ("task", "digest", "samples", "image_size")]
        more = [f"{k.replace('_', ' ')} {_text(values[k])}" for k in other if values[k] is not None]
        groups.append(Group(" · ".join([title, *more]), tuple(_labelled(runs))))
    return tuple(groups)


def _values(config: Config) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _OWN}


def _setting(config: Config) -> str:
    return json.dumps(_values(config), sort_keys=True, default=str)


def _labelled(runs: Iterable[Result]) -> list[Result]:
    """The runs with labels that tell a method's hyper-parameters where these differ.

    FedAvg comes first; then the order of names.
    """
    runs = sorted(runs, key=lambda r: (r.config.method.name != BASELINE, r.config.method.name))
    variants: dict[str, dict[str, Mapping[str, Any]]] = {}
    for run in runs:
        options = run.config.method.options()
        variants.setdefault(run.config.method.name, {})[_text(options)] = options
    labelled = []
    taken: set[tuple[str, int]] = set()
    for run in runs:
        name, options = run.config.method.name, run.config.method.options()
        own = list(variants[name].values())
        differing = [k for k in options if len({_text(o.get(k)) for o in own}) > 1]
        label = " ".join([name, *(f"{k}={_text(options[k])}" for k in differing)])
        if (label, run.config.seed) in taken:  # e.g. a method's file that was changed
            label = f"{label} ({run.config.hash})"
        taken.add((label, run.config.seed))
        labelled.append(replace(run, summary={**run.summary, "method": label}))
    return labelled


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
