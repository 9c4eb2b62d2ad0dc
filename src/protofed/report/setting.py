"""What the runs of a report are, in HTML: the facts, the clients, the configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape

from protofed.report.gather import Group
from protofed.report.html import html_table
from protofed.runs.records import SELECTION
from protofed.runs.result import Result
from protofed.studies.tables import TESTED, WEIGHTS, held

MANY = 12
"""More clients than this are folded."""


def facts(group: Group) -> str:
    """What the numbers are, in short words."""
    config, summary = group.results[0].config, group.results[0].summary
    seeds = ", ".join(map(str, group.seeds))
    words = {
        "Numbers": f"test accuracy in %, {SELECTION}; never the best round on test data",
        "Data": f"{config.task}: {summary.get('data', '')}",
        "Clients × samples": _held(group),
        "Seeds": seeds,
        "Training": _each(
            group,
            lambda r: (
                f"protocol {r.config.protocol}: {r.config.rounds} rounds × "
                f"{r.config.epochs} epochs, batch {r.config.batch}, lr {r.config.lr:g}"
            ),
        ),
        "Model": _each(
            group,
            lambda r: (
                " and ".join(r.config.models) + (f", norm {r.config.norm}" if r.config.norm else "")
            ),
        ),
        "Precision": _each(group, lambda r: f"{r.config.precision} on {r.config.device}"),
        "BatchNorm": _each(group, lambda r: str(r.summary.get("batchnorm", "?"))),
        "Who is tested": _each(
            group, lambda r: TESTED.get(str(r.summary.get("evaluated")), "the global model")
        ),
        "Weights of the average": _each(group, _weights),
    }
    items = "".join(
        f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in words.items()
    )
    return f'<dl class="facts">{items}</dl>'


def _held(group: Group) -> str:
    by_seed: dict[int, set[str]] = {}
    for run in group.results:
        text = held(run.config.clients, run.config.samples)
        by_seed.setdefault(run.config.seed, set()).add(text)
    drawn = len(set.union(*by_seed.values())) > 1 and all(len(t) == 1 for t in by_seed.values())
    if drawn:
        return "drawn by each seed"
    return _each(group, lambda r: held(r.config.clients, r.config.samples))


def _weights(run: Result) -> str:
    # a run of an earlier version says nothing of its weights
    said = str(run.summary.get("weights", f"{run.config.average} unless the method has its own"))
    return WEIGHTS.get(said, said)


def _each(group: Group, of: Callable[..., str]) -> str:
    """One word for all runs, or which methods differ."""
    found: dict[str, list[str]] = {}
    for method, runs in group.methods.items():
        for run in runs:
            names = found.setdefault(of(run), [])
            if method not in names:
                names.append(method)
    most, *others = sorted(found, key=lambda text: -len(found[text]))
    if not others:
        return most
    if len(group.methods) > MANY and len(others) > 2:
        return "differs between the methods: see the table and the configuration"
    named = "; ".join(f"{', '.join(found[text])}: {text}" for text in others)
    if 2 * len(found[most]) > len(group.methods):
        return f"{most} ({named})"
    return f"{', '.join(found[most])}: {most}; {named}"


def clients(group: Group) -> str:
    """Who held what."""
    first = group.results[0]
    table = first.summary.get("clients", [])
    if not table:
        return '<p class="absent">The runs do not say who held what.</p>'
    noted = any("note" in row for row in table)
    header = ["client", "domain", "samples", "classes", *["note"] * noted]
    lines = [
        [(str(row.get(c, "")), "") for c in header] for row in table if isinstance(row, Mapping)
    ]
    words = f"As seed {first.config.seed} has it."
    unseen = first.config.leave_out
    if unseen is not None:
        words += f" No client has {unseen}: it is only tested on."
    left = (0, 1, 4)
    text = html_table(header, lines, left, "narrow") + f'<p class="note">{escape(words)}</p>'
    if len(table) <= MANY:
        return text
    count = Counter(str(row.get("domain")) for row in table)
    each = ", ".join(f"{domain} {n}" for domain, n in count.items())
    summary = f"{len(table)} clients: {each}"
    return f"<details><summary>{escape(summary)}</summary>{text}</details>"


def configuration(group: Group) -> str:
    """Every run, and the settings of each method."""
    unseen = group.results[0].config.leave_out
    counts = f"{unseen} (unseen)" if unseen is not None else "average"
    header = ("method", "seed", f"{counts}, %", "rounds", "MB", "s", "engine", "folder")
    lines = []
    folded = []
    for label, runs in group.methods.items():
        for run in runs:
            sent = (run.summary["bytes_up"] + run.summary["bytes_down"]) / 1e6
            cells = (
                label, str(run.config.seed), f"{run.accuracy[unseen or 'average']:.2f}",
                str(len(run.rounds)), f"{sent:.1f}", f"{run.summary['seconds']:.0f}",
                str(run.summary.get("engine", "")), run.folder.name if run.folder else "",
            )  # fmt: skip
            lines.append([(text, "") for text in cells])
    shared, own = _apart({label: runs[0].config.toml() for label, runs in group.methods.items()})
    for label, text in {"Shared by all methods": shared, **own}.items():
        folded.append(
            f"<details><summary>{escape(label)}</summary><pre>{escape(text)}</pre></details>"
        )
    note = (
        "Settings of each method's first seed, as its config.toml has them: what all share, and "
        "what is each method's own. To repeat a run: protofed run --config FOLDER/config.toml."
    )
    return (
        html_table(header, lines, (0, 6, 7)) + f'<p class="note">{escape(note)}</p>'
        f"{''.join(folded)}"
    )


def _apart(configs: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Configurations as what they share, and what each has beside that."""
    parts = {label: _sections(text) for label, text in configs.items()}
    every = list(parts.values())
    shared = {
        section: [line for line in lines if all(line in p.get(section, ()) for p in every)]
        for section, lines in every[0].items()
    }
    own = {
        label: {s: [x for x in lines if x not in shared.get(s, ())] for s, lines in p.items()}
        for label, p in parts.items()
    }
    return _written(shared), {label: _written(p) for label, p in own.items() if len(parts) > 1}


def _sections(toml: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"": []}
    for line in toml.splitlines():
        if line.startswith("["):
            found[line] = []
        elif line:
            found[list(found)[-1]].append(line)
    return found


def _written(sections: Mapping[str, Sequence[str]]) -> str:
    blocks = [
        "\n".join([*filter(None, [name]), *lines]) for name, lines in sections.items() if lines
    ]
    return "\n\n".join(blocks)
