"""Studies defined on the spot: what ``compare``, ``sweep`` and ``tune`` ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from protofed.config import (
    EACH,
    MOST_SEEDS,
    SETTINGS,
    Config,
    execute_models,
    is_whole,
    paper_differences,
    short_task,
    shown_task,
)
from protofed.data.split import UNUSED, VAL_FOLDERS
from protofed.errors import ProtofedError
from protofed.federation.simulation import make_shares, rows_to_validate
from protofed.method import Method
from protofed.methods import METHODS, method_class, reference
from protofed.studies.definition import TUNE, Study, parse
from protofed.studies.launch import Asked, loaded_task
from protofed.studies.plan import plan
from protofed.studies.search import Values, listed, search_points

Rows = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Label → (method, hyper-parameters)."""

HELD_OUT = (VAL_FOLDERS, UNUSED, 0.1, 0.2)
"""The images that ``tune`` chooses by: the first of these that gives every domain enough."""


def comparison(
    task: str,
    methods: Iterable[str | Method] | Mapping[str, str | Method],
    seeds: int,
    options: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> Asked:
    """Several methods on one task; ``options`` has hyper-parameters by the methods' labels."""
    rows = method_rows(methods)
    if not rows:
        raise ProtofedError("there is no method to run", "name one: --methods fedavg,fpl")
    for label in options:
        if label not in rows:
            raise ProtofedError(f"options name '{label}', which is not compared")
    rows = {label: (name, {**own, **options.get(label, {})}) for label, (name, own) in rows.items()}
    left_out = settings.get("leave_out")
    on = {None: "", EACH: ", unseen domains"}.get(left_out, f" without {left_out}")
    study = adhoc(
        "compare", f"Methods on {shown_task(task)}{on}", task, rows, *_seeded(seeds, settings)
    )
    study = study.with_note(note := protocol_note(study))
    says = (f"warning: {note}",) if note else ()
    return Asked(study, f"compare-{short_task(task)}-{study.hash}", says)


def parameter_sweep(
    task: str,
    method: str | Method,
    over: Mapping[str, Sequence[Any]],
    seeds: int,
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
    against: str | Method | None = None,
) -> Asked:
    """One method over all combinations of its parameters' values."""
    own, rows = _one_row(method, options)
    if against is not None:
        rows = {**method_rows([against]), **rows}
    grid = {name: listed(name, values) for name, values in over.items()}
    title, swept = f"{own} over {' and '.join(grid)}", [{"over": grid, "rows": [own]}]
    study = adhoc("sweep", title, task, rows, *_seeded(seeds, settings), swept)
    return Asked(study, f"sweep-{short_task(task)}-{own}-{'-'.join(grid)}-{study.hash}")


def tuning(
    task: str,
    method: str | Method,
    over: Mapping[str, Values],
    budget: int,
    seeds: int,
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Asked:
    """A search over a method's parameters that validation images decide."""
    _require_count("budget", budget)
    own, rows = _one_row(method, options)
    defaults = method_class(rows[own][0]).create({}, task).options()
    whole = {n for n, v in defaults.items() if type(v) is int}
    whole |= {n for n, s in SETTINGS.items() if s.kind == "int" and n not in defaults}
    points = search_points(over, budget, settings.get("seed", 0), whole)
    swept = [{"points": points, "rows": [own]}]
    title, says = f"{own} tuned over {' and '.join(over)}", [f"{len(points)} points to try"]
    if settings.get("validate") is None:
        plain = adhoc("tune", title, task, rows, *_seeded(1, settings))
        part, words = held_out(plan(plain)[0].config)
        settings, says = {**settings, "validate": part}, [*says, words]
    study = adhoc("tune", title, task, rows, *_seeded(seeds, settings), swept, TUNE)
    return Asked(study, f"tune-{short_task(task)}-{own}-{'-'.join(over)}-{study.hash}", tuple(says))


def held_out(config: Config) -> tuple[str | float, str]:
    """Which of the config's images to choose by, as the setting ``validate`` and in words."""
    task = loaded_task(config)
    asked, errors = config.for_task(task.info), dict[str | float, ProtofedError]()
    make_shares(asked, task)  # an error of the split itself is passed on as it is
    for part in HELD_OUT:
        tried = replace(asked, validate=part)
        try:
            rows_to_validate(tried, task, make_shares(tried, task))
        except ProtofedError as error:
            errors[part] = error
            continue
        named = {VAL_FOLDERS: "images in val/", UNUSED: "training images that no client holds"}
        words = named.get(str(part))
        if words is None:
            words = f"{100 * float(part):g} % of each client's images, held out of its training"
        since = "" if part in named else f", since {errors[UNUSED].message}"
        return part, f"validated on {words} (validate = {part}){since}"
    why = errors[HELD_OUT[-1]]
    raise ProtofedError(f"there are too few images to choose by: {why.message}", why.hint)


def method_rows(methods: Iterable[str | Method] | Mapping[str, str | Method]) -> Rows:
    """A row for each method, labeled by its name unless a label is given."""
    if isinstance(methods, (str, Method)):
        methods = [methods]
    labeled = isinstance(methods, Mapping)
    given = methods.items() if isinstance(methods, Mapping) else ((None, m) for m in methods)
    rows: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for label, method in given:
        name, own, options = method, "", {}
        if isinstance(method, Method):
            name, own, options = _named(method), method.name, method.options()
        own = label or own or method_class(str(name)).name
        if own in rows and (labeled or rows[own] != (name, options)):
            raise ProtofedError(
                f"{rows[own][0]} and {name} are both named {own}",
                "label them ({'A': ..., 'B': ...}), or give one class another name: ClassVar[str]",
            )
        rows[own] = (str(name), options)
    return rows


def _one_row(method: str | Method, options: Mapping[str, Any]) -> tuple[str, Rows]:
    ((own, (name, given)),) = method_rows([method]).items()
    return own, {own: (name, {**given, **options})}


def _named(method: Method) -> str:
    """The name by which another process finds a method: each run is a process of its own."""
    name = reference(method)
    if name not in METHODS:
        file = Path(name.rpartition(":")[0])
        if type(method).__module__ == "__main__" or not file.is_file():
            raise ProtofedError(
                f"{type(method).__name__} is defined in this script or notebook, and each run is a "
                "process of its own that has to import it",
                "put the class into a file and pass 'path/to/file.py:Class', or use protofed.run",
            )
    return name


def _seeded(count: int, settings: Mapping[str, Any]) -> tuple[range, dict[str, Any]]:
    """That many seeds, starting with the one in the settings, and the other settings."""
    _require_count("seeds", count)
    first = settings.get("seed") or 0
    others = {k: v for k, v in settings.items() if k != "seed" and v is not None}
    return range(first, first + count), others


def _require_count(name: str, count: int) -> None:
    if not (is_whole(count) and 1 <= count <= MOST_SEEDS):
        raise ProtofedError(
            f"{name} must be a whole number from 1 to {MOST_SEEDS}, got {count!r:.100}"
        )


def adhoc(
    name: str,
    title: str,
    task: str,
    rows: Rows,
    seeds: Sequence[int],
    settings: Mapping[str, Any],
    sweeps: Sequence[Mapping[str, Any]] = (),
    kind: str = "",
) -> Study:
    """A study of one task; its kind is ``sweep`` or ``table`` unless it is given."""
    grids = [m for s in sweeps for m in s.get("over", {}).get("model", ())]
    listed = [point.get("model") for s in sweeps for point in s.get("points", ())]
    for model in (settings.get("model"), *grids, *listed):
        execute_models({"model": model})
    raw: dict[str, Any] = {
        "title": title,
        "kind": kind or ("sweep" if sweeps else "table"),
        "seeds": list(seeds),
        "settings": dict(settings),
        "tasks": {short_task(task): {"task": task}},
        "rows": {
            label: {"method": method, "options": dict(options)}
            for label, (method, options) in rows.items()
        },
    }
    if sweeps:
        raw["sweep"] = [dict(s) for s in sweeps]
    return parse(raw, name)


def protocol_note(study: Study) -> str:
    """A warning if papers of the study's methods used a protocol other than the one used here."""
    found: dict[str, str] = {}
    for run in plan(study):
        changed = paper_differences(run.config).items()
        words = [f"{name} {theirs} (here {ours})" for name, (theirs, ours) in changed]
        if words:
            found[run.line.label] = f"{run.line.label}: {', '.join(words)}"
    if not found:
        return ""
    return (
        f"Some methods' papers train differently: {'; '.join(found.values())}. All methods share "
        "one protocol here, so that a difference between them comes from the method, not from its "
        "model or batch; --protocol chooses it. Hyper-parameters may be tuned for the paper's own."
    )
