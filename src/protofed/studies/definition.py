"""What a study is: rows (methods) × tasks × seeds, and the numbers a paper printed for them.

A study is a small TOML file (docs/studies.md). The built-in ones are in ``studies/papers/``; your
own work the same way, and ``compare``, ``sweep`` and ``tune`` write one. Unknown keys are errors.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from protofed.config import (
    EACH,
    MOST_SEEDS,
    check_settings,
    execute_models,
    require_known,
    short_hash,
)
from protofed.config import SETTINGS as RUN_SETTINGS
from protofed.errors import ProtofedError, unknown
from protofed.files import FORMAT, check_format
from protofed.method import Method
from protofed.methods import METHODS, RecordedMethod, fingerprint, known_class
from protofed.runs.records import LAST
from protofed.toml import parse_toml, toml_text
from protofed.user_code import is_file

MOST_LINES = 10**4
"""The most lines of a sweep: a table with more of them would help nobody."""

MOST_LAST = 100
"""The most last rounds that a table averages over."""

TUNE = "tune"
"""The kind of a study that chooses by validation accuracy."""
DIFFERENCES = "differences"
"""The kind of a study whose figure is every row's difference to the baseline, on all tasks."""
TUNED = ", tuned"
"""The end of the label of a row that is another row with what validation chose for it."""
KINDS = ("table", "curves", "bars", DIFFERENCES, "sweep", "tsne", TUNE)

SETTINGS = tuple(name for name in RUN_SETTINGS if name != "seed")
"""The settings that a study may give; its seeds have a key of their own."""
_NOT_HASHED = {
    name for name, s in RUN_SETTINGS.items() if not s.hashed and name not in ("device", "precision")
}
"""Settings that change neither a number nor which runs are taken."""


@dataclass(frozen=True)
class MethodFile:
    """What a study knows about a method from a file that it ran: tables are made without its code.

    ``source`` is the ``fingerprint`` of its code, ``defaults`` its hyper-parameters by task.
    """

    name: str
    source: str
    defaults: Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """A method with its hyper-parameters, under the name it has in the table."""

    label: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    file: MethodFile | None = None

    @property
    def missing(self) -> str:
        """What is missing to run it, or to find its runs; empty if nothing."""
        if known_class(self.method) or self.file is not None:
            return ""
        if is_file(self.method):
            return f"needs code, {self.method}, which only --trust-code executes"
        return f"needs method {self.method}, which this version does not have"

    def make(self, task: str = "") -> Method:
        """The row's method with its hyper-parameters; the others have the task's defaults."""
        if cls := known_class(self.method):
            return cls.create(self.options, task)
        assert self.file is not None, self.missing
        defaults = self.file.defaults.get(task, {})
        own = {  # 1 and 1.0 are the same run
            n: float(v) if type(v) is int and isinstance(defaults.get(n), float) else v
            for n, v in self.options.items()
        }
        return RecordedMethod(self.file.name, self.method, defaults | own, self.file.source)

    @property
    def option_names(self) -> tuple[str, ...]:
        """The names of its method's hyper-parameters, where they are known."""
        if cls := known_class(self.method):
            return tuple(cls.option_names())
        return tuple(n for d in self.file.defaults.values() for n in d) if self.file else ()

    def with_value(self, name: str, value: Any) -> Row:
        """The row with a hyper-parameter of its method, or else a setting, at that value."""
        own = self.option_names
        if name in own or (self.missing and name not in SETTINGS):
            return replace(self, options={**self.options, name: value})
        if name == "seed":
            raise ProtofedError(
                "seed is not swept: every line of a table has all seeds", "use --seeds 3"
            )
        if name not in SETTINGS:
            raise unknown(f"hyper-parameter of {self.method}, or setting,", name, (*own, *SETTINGS))
        return replace(self, settings={**self.settings, name: value})

    def check(self) -> None:
        """Raise an error if the method of this version does not take its hyper-parameters."""
        if not self.missing:
            self.make()


@dataclass(frozen=True)
class StudyTask:
    """A task of the study with the settings that all its runs share."""

    name: str
    task: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    """The rows that are run on it; empty: all."""
    seeds: tuple[int, ...] = ()
    """Its own seeds; empty: the study's."""


@dataclass(frozen=True)
class FolderImages:
    """What a folder of your own images held when the study ran.

    A config names only the folder. This tells its runs from those of another folder of that name,
    and tables can be made where the images are not.
    """

    domains: tuple[str, ...]
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    """Parameters with their values, for some of the rows: a grid, or its ``listed`` points.

    ``generators`` take a fraction of a grid of two values each (see ``sign``): the sign of the
    parameter is the product of those that it is given by.
    """

    over: Mapping[str, tuple[Any, ...]]
    rows: tuple[str, ...]
    listed: tuple[Mapping[str, Any], ...] = ()
    generators: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def points(self) -> list[dict[str, Any]]:
        grid = (dict(zip(self.over, p, strict=True)) for p in product(*self.over.values()))
        return [dict(p) for p in self.listed] or [p for p in grid if self._is_generated(p)]

    def _is_generated(self, point: Mapping[str, Any]) -> bool:
        return all(
            self.sign(point, name) == math.prod(self.sign(point, n) for n in given)
            for name, given in self.generators.items()
        )

    def sign(self, point: Mapping[str, Any], name: str) -> int:
        """1 for the first value of a parameter, so that all first ones are a point; else −1."""
        return 1 if point[name] == self.over[name][0] else -1

    @property
    def is_factorial(self) -> bool:
        """Whether it asks for the effects of parameters with two values each."""
        two = all(len(values) == 2 for values in self.over.values())
        return two and len(self.over) > 2 and not self.listed


@dataclass(frozen=True)
class Line:
    """A line of the study's tables: a row, or a row at one point of a sweep."""

    label: str
    row: Row
    point: Mapping[str, Any] = field(default_factory=dict)
    sweep: int | None = None


@dataclass(frozen=True)
class Printed:
    """What the paper prints for a row on a task: accuracy per column, the deviation of Avg."""

    values: Mapping[str, float]
    std: float | None = None


@dataclass(frozen=True)
class Study:
    """A study, read and checked."""

    name: str
    title: str
    kind: str
    paper: str
    notes: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: Mapping[str, Any]
    tasks: Mapping[str, StudyTask]
    rows: Mapping[str, Row]
    sweeps: tuple[Sweep, ...]
    printed: Mapping[str, Mapping[str, Printed]]
    columns: Mapping[str, tuple[str, ...]]
    baseline: str | None
    target: float | None
    """An accuracy in %: what it takes to reach it is part of the costs."""
    last_rounds: int
    """How many last rounds the accuracies of its tables are means of."""
    tsne: Mapping[str, Any]
    override: Mapping[str, Any]
    images: Mapping[str, FolderImages]
    """By task, for those that are folders and have been run."""
    methods: Mapping[str, MethodFile]
    """By reference, for those that are in files and have been run."""
    diverged: Mapping[str, Sequence[str]]
    """For a packed study: by task, the lines with runs that diverged."""
    raw: Mapping[str, Any]

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """The rows, with a line for every point where a row is swept."""
        swept = {label for sweep in self.sweeps for label in sweep.rows}
        lines = [Line(label, row) for label, row in self.rows.items() if label not in swept]
        for i, sweep in enumerate(self.sweeps):
            for label in sweep.rows:
                for point in sweep.points():
                    row = self.rows[label]
                    for name, value in point.items():
                        row = row.with_value(name, value)
                    lines.append(Line(point_label(label, point), row, point, i))
        return tuple(lines)

    def lines_on(self, task: StudyTask) -> tuple[Line, ...]:
        """The lines of a task's table."""
        return tuple(s for s in self.lines if not task.rows or s.row.label in task.rows)

    def seeds_on(self, task: StudyTask) -> tuple[int, ...]:
        return task.seeds or self.seeds

    def digests(self, task: str) -> tuple[str, ...]:
        """Which images the runs of a task used; empty if the task's name says it."""
        return self.images[task].digests if task in self.images else ()

    @property
    def missing_rows(self) -> dict[str, str]:
        return {row.label: row.missing for row in self.rows.values() if row.missing}

    @property
    def missing(self) -> tuple[str, ...]:
        """What this version lacks for the whole study: all of its methods."""
        found = self.missing_rows
        return tuple(sorted({*found.values()})) if len(found) == len(self.rows) else ()

    def toml(self) -> str:
        """The study as TOML, with all that was changed on the command line."""
        whole = {"format": FORMAT, "name": self.name, **self.raw}
        return toml_text(whole, nested=("printed", "images", "methods"))

    def overridden(
        self,
        on: str | None = None,
        settings: Mapping[str, Any] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Study:
        """The study on another task, with settings that override all others, or with
        hyper-parameters of its methods (method → name → value)."""
        execute_models(settings or {})
        old = self.override
        methods = {**old.get("options", {})}
        for method, given in (options or {}).items():
            methods[method] = {**methods.get(method, {}), **given}
        change = {
            "on": on or old.get("on"),
            "settings": {**old.get("settings", {}), **(settings or {})},
            "options": methods,
        }
        change = {k: v for k, v in change.items() if v}
        return parse({**self.raw, "override": change} if change else self.raw, self.name)

    def with_seeds(self, seeds: Sequence[int] | Mapping[str, Sequence[int]]) -> Study:
        """The study with these seeds for all its tasks, or for those that are named."""
        if not isinstance(seeds, Mapping):
            seeds = dict.fromkeys(self.tasks, seeds)
        whole = {n: [*seeds.get(n, self.seeds_on(task))] for n, task in self.tasks.items()}
        shared = next(iter(whole.values()))
        if any(own != shared for own in whole.values()):
            shared = list(self.seeds)
        raw = {
            **self.raw,
            "seeds": shared,
            "tasks": {
                n: {k: v for k, v in own.items() if k != "seeds"}
                | ({"seeds": whole[n]} if whole[n] != shared else {})
                for n, own in self.raw["tasks"].items()
            },
        }
        return parse(raw, self.name)

    def first_seeds(self, count: int, task: StudyTask) -> tuple[int, ...]:
        """That many seeds of a task: its own first, then the numbers after them."""
        own = self.seeds_on(task)
        return (*own, *range(max(own) + 1, max(own) + 1 + count))[:count]

    def with_target(self, target: float) -> Study:
        return parse({**self.raw, "target": target}, self.name)

    def with_note(self, note: str) -> Study:
        """The study with another note, if there is one."""
        notes = (*self.notes, *filter(None, [note]))
        return replace(self, notes=notes, raw={**self.raw, "notes": list(notes)})

    def with_images(self, images: Mapping[str, FolderImages]) -> Study:
        if not images:
            return self
        plain = {
            task: {"domains": list(found.domains), "digests": list(found.digests)}
            for task, found in images.items()
        }
        return replace(self, images=images, raw={**self.raw, "images": plain})

    def with_methods(self, tasks: Collection[str]) -> Study:
        """The study with what its tables need to know about methods that are in files."""
        found = dict(self.methods)
        for row in self.rows.values():
            cls = known_class(row.method)
            if cls is not None and row.method not in METHODS:
                defaults = {task: cls.create({}, task).options() for task in tasks}
                found[row.method] = MethodFile(cls.name, fingerprint(row.make()), defaults)
        if not found:
            return self
        plain = {name: vars(file) for name, file in found.items()}
        return replace(self, methods=found, raw={**self.raw, "methods": plain})

    @property
    def is_changed(self) -> bool:
        """Whether settings or hyper-parameters were changed on the command line."""
        return bool(_hashed(self.override.get("settings", {})) or self.override.get("options"))

    @property
    def hash(self) -> str:
        """A hash of what the study asks for, apart from its seeds: more of them may follow."""
        asked = {k: v for k, v in self.raw.items() if k not in _ASIDE}
        asked["settings"] = _hashed(asked.get("settings", {}))
        asked["tasks"] = {
            name: {k: v for k, v in task.items() if k != "seeds"}
            for name, task in asked["tasks"].items()
        }
        override = dict(asked.pop("override", {}))
        override["settings"] = _hashed(override.get("settings", {}))
        asked["override"] = {k: v for k, v in override.items() if v}
        return short_hash(json.loads(json.dumps(asked, default=str)))


def _hashed(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in _NOT_HASHED}


def point_label(label: str, point: Mapping[str, Any]) -> str:
    """``FPL, tau=0.02``."""
    return ", ".join([label, *(f"{k}={show(v)}" for k, v in point.items())])


def show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- reading ------------------------------------------------------------------------------------

_KEYS = (
    "name", "title", "kind", "paper", "protocol", "notes", "seeds", "settings", "tasks", "rows",
    "sweep", "printed", "baseline", "target", "tsne", "override", "pool", "images", "methods",
    "diverged", "like", "last_rounds",
)  # fmt: skip
_ASIDE = (
    "seeds", "title", "notes", "paper", "target", "name", "pool", "images", "methods", "diverged",
    "last_rounds",
)  # fmt: skip
"""What does not change which runs the study is made of, apart from its seeds."""


def builtin() -> tuple[str, ...]:
    """The names of the package's own studies, in the order of papers, tables and figures."""
    folder = resources.files("protofed.studies") / "papers"
    names = [f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")]
    return tuple(sorted(names, key=_order))


def _order(name: str) -> tuple[str, bool, int, str]:
    paper, _, rest = name.partition("-")
    number = "".join(c for c in rest if c.isdigit())
    return ({"fpl": "0", "i2pfl": "1", "fedseproto": "2"}.get(paper, paper), "fig" in rest,
            int(number or 0), name)  # fmt: skip


def load(name: str) -> Study:
    """The built-in study of that name, or the one in a TOML file (or a study's folder)."""
    path = Path(name)
    if path.is_dir() and (path / "study.toml").is_file():
        path = path / "study.toml"
    if name in builtin():
        text = (resources.files("protofed.studies") / "papers" / f"{name}.toml").read_text("utf-8")
        where = name
    elif path.suffix == ".toml" or path.is_file():
        try:
            text = path.read_text("utf-8-sig")  # some editors begin a file with a mark
        except OSError as error:
            raise ProtofedError(f"cannot read study '{path}': {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ProtofedError(f"cannot read study '{path}': {error}") from None
        where = path.resolve().parent.name if path.name == "study.toml" else path.stem
    else:
        raise unknown("study", name, builtin())
    try:
        raw = parse_toml(text)
    except ValueError as error:
        raise ProtofedError(f"study '{name}' is not valid TOML: {error}") from None
    check_format(path, raw.pop("format", None))
    return parse(_completed(raw, where), where)


def _completed(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """With ``like = "STUDY"`` the tables that are not given are those of that built-in study."""
    if "like" not in raw:
        return raw
    like = raw.pop("like")
    if like not in builtin() or like == name:
        raise unknown(f"built-in study in like of study '{name}':", like, builtin())
    base = load(like).raw
    whole = {**base, **raw}
    # Rows and tasks may differ here: of what refers to them, only what still fits is taken over.
    rows, tasks = (_table(whole, key) for key in ("rows", "tasks"))
    if "tasks" not in raw:
        whole["tasks"] = {
            name: {**task, "rows": own}
            if (own := [label for label in task.get("rows", ()) if label in rows])
            else {k: v for k, v in task.items() if k != "rows"}
            for name, task in tasks.items()
        }
    if "baseline" not in raw and whole.get("baseline") not in rows:
        whole.pop("baseline", None)
    if "sweep" not in raw:
        fitting = (s for s in base.get("sweep", []) if set(s.get("rows", ())) <= rows.keys())
        whole["sweep"] = list(fitting)
    if "tsne" not in raw and "tasks" in raw:
        whole["tsne"] = {k: v for k, v in base.get("tsne", {}).items() if k != "domains"}
    if "printed" not in raw:
        lines = parse({**whole, "printed": {}}, name).lines
        labels = {"columns", *rows, *(line.label for line in lines)}
        whole["printed"] = {
            task: {label: entry for label, entry in table.items() if label in labels}
            for task, table in base.get("printed", {}).items()
            if task in tasks
        }
    return whole


def parse(raw: Mapping[str, Any], name: str) -> Study:
    """A study from its TOML, checked; errors name the study and the place."""
    try:
        return _parse(raw, str(raw.get("name", name)))
    except ProtofedError as error:
        if error.message.startswith("study '"):
            raise
        raise type(error)(f"study '{name}': {error.message}", error.hint) from None


def _parse(raw: Mapping[str, Any], name: str) -> Study:
    require_known("key", raw, _KEYS)
    if name in ("", "..") or Path(name).name != name:
        raise ProtofedError(f"its name cannot be that of a folder: '{name}'", 'write name = "mine"')
    kind = _text(raw, "kind", "table")
    require_known("kind", [kind], KINDS)
    shared = _settings("setting", _table(raw, "settings"))
    if "protocol" in raw:
        shared = {"protocol": _text(raw, "protocol"), **shared}
    tasks = {n: _task(n, t) for n, t in _table(raw, "tasks").items()}
    methods = {name: _method_file(name, m) for name, m in _table(raw, "methods").items()}
    rows = {label: _row(label, r, methods) for label, r in _table(raw, "rows").items()}
    for what, found in (("tasks", tasks), ("rows", rows)):
        if not found:
            raise ProtofedError(f"it has no [{what}]", "see docs/studies.md")
        for label in found:
            if not label.isprintable():  # tables, and SVG above all, cannot have it
                raise ProtofedError(f"[{what}] has an unprintable name: {label!r:.100}")
    for task in tasks.values():
        require_known(f"row of task {task.name}", task.rows, rows)
    plain = (r.label for r in rows.values() if r == Row(r.label, "fedavg"))
    baseline = raw.get("baseline", next(plain, None))
    if baseline is not None and (not isinstance(baseline, str) or baseline not in rows):
        raise unknown("row as baseline", baseline, rows)
    target = raw.get("target")
    if target is not None and not (type(target) in (int, float) and 0 < target <= 100):
        raise ProtofedError(f"target must be an accuracy in %, got {target!r:.100}")
    last = raw.get("last_rounds", LAST)
    if not (type(last) is int and 0 < last <= MOST_LAST):
        raise ProtofedError(f"last_rounds must be between 1 and {MOST_LAST}, got {last!r:.100}")
    diverged = _table(raw, "diverged")
    override = _table(raw, "override")
    require_known("key in [override]", override, ("on", "settings", "options"))
    if "on" in override:
        _text(override, "on")
    _settings("setting", _table(override, "settings"))
    _text(raw, "pool", "..")
    rows = _with_options(rows, _table(override, "options"))
    sweeps = tuple(_sweep(s, rows) for s in _list(raw, "sweep", Mapping))
    tsne = _table(raw, "tsne")
    require_known("key in [tsne]", tsne, ("domains", "rounds"))
    _list(tsne, "domains", str)
    kept = tsne.get("rounds", [])
    if not isinstance(kept, list) or not all(type(r) is int and r > 0 for r in kept):
        raise ProtofedError(
            f"rounds in [tsne] must be a list of rounds, counted from 1, got {kept!r:.100}"
        )
    study = Study(
        name=name,
        title=_text(raw, "title", name),
        kind=kind,
        paper=_text(raw, "paper", ""),
        notes=tuple(_list(raw, "notes", str)),
        seeds=_seeds(raw.get("seeds", 3)),
        settings=shared,
        tasks=tasks,
        rows=rows,
        sweeps=sweeps,
        printed={},
        columns={},
        baseline=baseline,
        target=target,
        last_rounds=last,
        tsne=tsne,
        override=override,
        images={task: _images(task, found) for task, found in _table(raw, "images").items()},
        methods=methods,
        diverged={task: _list(diverged, task, str) for task in diverged},
        raw=raw,
    )
    _check_kind(study)
    counts = Counter(line.label for line in study.lines)
    for label, count in counts.items():
        if count > 1:  # they would be one line of the table
            raise ProtofedError(
                f"{count} lines are called '{label}'",
                "name each value once and all values of a row in one [[sweep]], or rename a row",
            )
    found = _table(raw, "printed")
    require_known("task in [printed]", found, tasks)
    printed = {task: _printed(task, table, {*counts, *rows}) for task, table in found.items()}
    return replace(
        study,
        columns={task: columns for task, (columns, _) in printed.items()},
        printed={task: table for task, (_, table) in printed.items()},
    )


def _check_kind(study: Study) -> None:
    if study.kind != TUNE:
        if any(sweep.listed for sweep in study.sweeps):
            raise ProtofedError("a sweep over points needs kind = 'tune'", "write over = {...}")
        return
    for task in study.tasks.values():
        settings = {**study.settings, **task.settings, **study.override.get("settings", {})}
        if settings.get("validate") is None:
            raise ProtofedError(
                "kind = 'tune' chooses by validation accuracy", "write validate = 'unused'"
            )
        if settings.get("leave_out") == EACH:
            raise ProtofedError(
                "kind = 'tune' leaves out at most one domain",
                "an unseen domain must not choose: name one, leave_out = 'DOMAIN'",
            )


def _task(name: str, raw: Any) -> StudyTask:
    if not isinstance(raw, Mapping):
        raise ProtofedError(f"task {name} must be a table", f"write {name} = {{}}")
    settings = {k: v for k, v in raw.items() if k not in ("task", "notes", "rows", "seeds")}
    _settings(f"setting of task {name}", settings)
    notes, rows = (tuple(_list(raw, key, str)) for key in ("notes", "rows"))
    seeds = _seeds(raw["seeds"]) if "seeds" in raw else ()
    return StudyTask(name, _text(raw, "task", name), settings, notes, rows, seeds)


def _images(task: str, raw: Any) -> FolderImages:
    if not isinstance(raw, Mapping):
        raise ProtofedError(f"[images.{task}] must be a table")
    require_known(f"key in [images.{task}]", raw, ("domains", "digests"))
    return FolderImages(tuple(_list(raw, "domains", str)), tuple(_list(raw, "digests", str)))


def _method_file(name: str, raw: Any) -> MethodFile:
    if not isinstance(raw, Mapping):
        raise ProtofedError(f"[methods.{name}] must be a table")
    require_known(f"key in [methods.{name}]", raw, ("name", "source", "defaults"))
    every = _table(raw, "defaults")
    return MethodFile(
        _text(raw, "name"), _text(raw, "source"), {task: _table(every, task) for task in every}
    )


def _row(label: str, raw: Any, methods: Mapping[str, MethodFile]) -> Row:
    if isinstance(raw, str):
        raw = {"method": raw}
    if not isinstance(raw, Mapping) or not isinstance(raw.get("method"), str):
        raise ProtofedError(f"row {label} names no method", f'write "{label}" = "fedavg"')
    require_known(f"key of row {label}", raw, ("method", "options", "settings"))
    method = raw["method"]
    file = methods.get(method)
    row = Row(label, method, _table(raw, "options"), _table(raw, "settings"), file)
    _settings(f"setting of row {label}", row.settings)
    row.check()
    return row


def _with_options(
    rows: Mapping[str, Row], options: Mapping[str, Mapping[str, Any]]
) -> dict[str, Row]:
    """The rows with hyper-parameters of their methods that were given on the command line."""
    require_known("method of the study", options, {row.method for row in rows.values()})
    changed = {}
    for label, row in rows.items():
        given = _table(options, row.method)
        changed[label] = replace(row, options={**row.options, **given})
        changed[label].check()
    return changed


def _sweep(raw: Mapping[str, Any], rows: Mapping[str, Row]) -> Sweep:
    require_known("key in [[sweep]]", raw, ("over", "points", "rows", "generators"))
    listed = _list(raw, "points", Mapping)
    over = _table(raw, "over") or {n: [p.get(n) for p in listed] for n in (listed or [{}])[0]}
    if not over or ("over" in raw and listed):
        raise ProtofedError("a sweep needs over or points", "write over = {tau = [0.02, 0.05]}")
    if any(point.keys() != over.keys() for point in listed):
        raise ProtofedError("the points of a sweep must name the same parameters")
    labels = tuple(_list(raw, "rows", str)) or tuple(rows)
    require_known("row in [[sweep]]", labels, rows)
    for label in labels:
        for name, values in over.items():
            if not isinstance(values, list) or not values:
                raise ProtofedError(f"the values of {name} must be a list", f"{name} = [1, 2]")
            for value in values:  # report it now, not after an hour of runs
                rows[label].with_value(name, value).check()
    points = len(listed) or math.prod(len(values) for values in over.values())
    if points > MOST_LINES:
        raise ProtofedError(f"a sweep has {points:g} points, more than {MOST_LINES}")
    once = {k: tuple(x for i, x in enumerate(v) if x not in v[:i]) for k, v in over.items()}
    sweep = Sweep(once, labels, tuple(listed))
    return replace(sweep, generators=_generators(_table(raw, "generators"), sweep))


def _generators(raw: Mapping[str, Any], sweep: Sweep) -> dict[str, tuple[str, ...]]:
    if raw and not sweep.is_factorial:
        raise ProtofedError(
            "generators need a sweep over three parameters or more, with two values each"
        )
    basic = [name for name in sweep.over if name not in raw]
    require_known("parameter in generators", raw, sweep.over)
    for name in raw:
        require_known(
            f"parameter in the generator of {name}", given := _list(raw, name, str), basic
        )
        if len({*given}) < max(2, len(given)):
            raise ProtofedError(
                f"the generator of {name} must name two other parameters or more, each once",
                f'{name} = ["{basic[0]}", "{basic[-1]}"]',
            )
    if len({frozenset(given) for given in raw.values()}) < len(raw):
        raise ProtofedError("two generators name the same parameters: their effects would coincide")
    return {name: tuple(given) for name, given in raw.items()}


def _printed(
    task: str, raw: Any, labels: Collection[str]
) -> tuple[tuple[str, ...], dict[str, Printed]]:
    if not isinstance(raw, Mapping):
        raise ProtofedError(f"[printed.{task}] must be a table")
    columns = tuple(_list(raw, "columns", str))
    entries = {label: entry for label, entry in raw.items() if label != "columns"}
    require_known(f"row in [printed.{task}]", entries, labels)
    found = {}
    for label, entry in entries.items():
        std = None
        if isinstance(entry, Mapping):
            require_known(f"key of {label} in [printed.{task}]", entry, ("values", "std"))
            std, entry = entry.get("std"), entry.get("values")
        if _number(entry):
            values = {"average": float(entry)}
        elif isinstance(entry, list) and len(entry) == len(columns) and all(map(_number, entry)):
            values = {c: float(v) for c, v in zip(columns, entry, strict=True)}
        elif isinstance(entry, list) and not columns:
            raise ProtofedError(
                f"[printed.{task}] has no columns", 'write columns = ["DOMAIN", ..., "average"]'
            )
        else:
            raise ProtofedError(
                f"{label} in [printed.{task}] must be {len(columns)} numbers ({', '.join(columns)})"
                f" or the average alone, got {entry!r:.100}"
            )
        if not (std is None or _number(std)):
            raise ProtofedError(
                f"std of {label} in [printed.{task}] must be a number, got {std!r:.100}"
            )
        found[label] = Printed(values, None if std is None else float(std))
    return columns, found


def _seeds(value: Any) -> tuple[int, ...]:
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_SEEDS:
        return tuple(range(value))
    listed = isinstance(value, list) and 0 < len(value) <= MOST_SEEDS
    if listed and all(type(s) is int and s >= 0 for s in value):
        return tuple(dict.fromkeys(value))
    raise ProtofedError(f"seeds must be a number of seeds or a list of them, got {value!r:.100}")


def _settings(what: str, given: Mapping[str, Any]) -> dict[str, Any]:
    require_known(what, given, SETTINGS)
    check_settings(given)
    return dict(given)


def _table(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key, {})
    if not isinstance(value, Mapping):
        raise ProtofedError(f"{key} must be a table, got {value!r:.100}")
    return dict(value)


def _list(raw: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    value = raw.get(key, [])
    if not isinstance(value, list) or not all(isinstance(v, kind) for v in value):
        of = "texts" if kind is str else "tables"
        raise ProtofedError(f"{key} must be a list of {of}, got {value!r:.100}")
    return value


def _text(raw: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = raw.get(key, default)
    if not isinstance(value, str):
        raise ProtofedError(f"{key} must be text, got {value!r:.100}")
    return value


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
