"""What the report says about the runs of a group: key facts, clients, runs, settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from protofed.config import shown_task, training_options
from protofed.report.collect import Group
from protofed.report.page_table import PageTable, cells
from protofed.runs.records import last_mean, selection
from protofed.runs.result import Result
from protofed.studies.tables import TESTED, WEIGHTS, client_sizes

MAX_OPEN_CLIENTS = 12
"""A longer table of clients is folded."""
MAX_NAMED_METHODS = 12
"""With more methods than this, those that differ are not named one by one."""


def facts(group: Group) -> dict[str, str]:
    """The conditions behind the numbers, as a list of names and texts."""
    config, summary = group.results[0].config, group.results[0].summary
    return {
        "Numbers": f"test accuracy in %, {selection(group.last_rounds)}; never the best round on "
        "test data",
        "Data": f"{shown_task(config.task)}: {summary.get('data', '')}",
        "Clients × samples": _sizes_of_group(group),
        "Seeds": ", ".join(map(str, group.seeds)),
        "Training": _common(group, _training),
        "Model": _common(group, _model),
        "Precision": _common(group, _precision),
        "BatchNorm": _common(group, lambda r: str(r.summary.get("batchnorm", "?"))),
        "Tested": _common(group, lambda r: TESTED.get(r.summary.get("evaluated", "global"), "?")),
        "Weights of the average": _common(group, _weights),
        **({"Privacy": _common(group, _privacy)} if any(map(_privacy, group.results)) else {}),
    }


def _privacy(run: Result) -> str:
    found: dict[str, str] = run.summary.get("privacy", {})
    return "; ".join(f"{part}: {words}" for part, words in found.items())


def _training(run: Result) -> str:
    c = run.config
    length = f"{c.rounds} rounds × {c.epochs} epochs"
    words = [length, f"batch {c.batch}", f"lr {c.lr:g}", *training_options(vars(c))]
    return f"protocol {c.protocol}: {', '.join(words)}"


def _model(run: Result) -> str:
    norm = f", norm {run.config.norm}" if run.config.norm else ""
    return run.config.model_in_words + norm


def _weights(run: Result) -> str:
    # runs of earlier versions do not record their weights
    rule = str(run.summary.get("weights", f"{run.config.average} unless the method has its own"))
    return WEIGHTS.get(rule, rule)


def _sizes_of_group(group: Group) -> str:
    by_seed: dict[int, set[str]] = {}
    for run in group.results:
        by_seed.setdefault(run.config.seed, set()).add(_sizes_of_run(run))
    if len(set.union(*by_seed.values())) > 1 and all(len(texts) == 1 for texts in by_seed.values()):
        return "differ between seeds: each seed draws its own"
    return _common(group, _sizes_of_run)


def _precision(run: Result) -> str:
    return f"{run.summary.get('precision', '?')} on {run.summary.get('device', '?')}"


def _sizes_of_run(run: Result) -> str:
    split = run.summary.get("split", {})
    return client_sizes(split.get("clients", {}), split.get("samples", {}))


def _common(group: Group, describe: Callable[[Result], str]) -> str:
    """The text that describes all runs, or the most frequent one and which methods differ."""
    found: dict[str, list[str]] = {}
    for method, runs in group.methods.items():
        for text in dict.fromkeys(map(describe, runs)):
            found.setdefault(text, []).append(method)
    most, *others = sorted(found, key=lambda text: -len(found[text]))
    if not others:
        return most
    if len(group.methods) > MAX_NAMED_METHODS and len(others) > 2:
        return "differs between the methods: see the table and the configuration"
    named = "; ".join(f"{', '.join(found[text])}: {text}" for text in others)
    if 2 * len(found[most]) > len(group.methods):
        return f"{most} ({named})"
    return f"{', '.join(found[most])}: {most}; {named}"


def clients(group: Group) -> dict[str, Any] | None:
    """Who held which samples in the first run; None if it does not record them.

    A long table has a ``summary`` to fold it under.
    """
    first = group.results[0]
    found = [row for row in first.summary.get("clients", []) if isinstance(row, Mapping)]
    if not found:
        return None
    header = ["client", "domain", "samples", "classes"]
    header += ["note"] * any("note" in row for row in found)
    rows = cells([str(row.get(c, "")) for c in header] for row in found)
    count = Counter(str(row.get("domain")) for row in found)
    each = ", ".join(f"{domain} {n}" for domain, n in count.items())
    return {
        "table": PageTable(header, rows, (0, 1, 4), "narrow"),
        "seed": first.config.seed,
        "unseen": first.config.leave_out,
        "summary": f"{len(found)} clients: {each}" if len(found) > MAX_OPEN_CLIENTS else "",
    }


def run_table(group: Group) -> PageTable:
    """Every run with its result, its costs and its folder."""
    unseen = group.results[0].config.leave_out
    main = f"{unseen} (unseen)" if unseen is not None else "average"
    header = ("method", "seed", f"{main}, %", "rounds", "MB", "s", "engine", "folder")
    rows = []
    for label, runs in group.methods.items():
        for run in runs:
            accuracy = last_mean(run.rounds, last=group.last_rounds)[unseen or "average"]
            megabytes = (run.summary["bytes_up"] + run.summary["bytes_down"]) / 1e6
            rows.append((
                label, str(run.config.seed), f"{accuracy:.2f}",
                str(len(run.rounds)), f"{megabytes:.1f}", f"{run.summary['seconds']:.0f}",
                str(run.summary.get("engine", "")), run.folder.name if run.folder else "",
            ))  # fmt: skip
    return PageTable(header, cells(rows), (0, 6, 7))


def settings(group: Group) -> dict[str, str]:
    """As TOML: the settings that all labels share, and those in which each label differs."""
    # without the folders of this machine
    shown = {m: replace(r[0].config, task=shown_task(r[0].config.task), data=None)
             for m, r in group.methods.items()}  # fmt: skip
    configs = {label: _sections(config.toml()) for label, config in shown.items()}
    every = list(configs.values())
    shared = {
        section: [line for line in lines if all(line in c.get(section, ()) for c in every)]
        for section, lines in every[0].items()
    }
    texts = {"Shared by all methods": _toml(shared)}
    for label, sections in configs.items() if len(configs) > 1 else ():
        own = {
            section: [line for line in lines if line not in shared.get(section, ())]
            for section, lines in sections.items()
        }
        texts[label] = _toml(own)
    return texts


def _sections(toml: str) -> dict[str, list[str]]:
    """The lines under each ``[section]``; those before the first one are under an empty name."""
    found: dict[str, list[str]] = {"": []}
    for line in toml.splitlines():
        if line.startswith("["):
            found[line] = []
        elif line:
            found[list(found)[-1]].append(line)
    return found


def _toml(sections: Mapping[str, Sequence[str]]) -> str:
    blocks = ("\n".join([name, *lines]).lstrip() for name, lines in sections.items() if lines)
    return "\n\n".join(blocks)
