"""Draw docs/images/robust.png: the worst domain's accuracy in the study ``robust``.

protofed study run robust
protofed study pack robust --to results/robust
python benchmarks/robust_figure.py
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).parents[1]
METHODS = {"fedavg": "FedAvg", "fpl": "FPL", "i2pfl": "I²PFL"}
KINDS = ("none", "clip", "trimmed", "median", "krum")
ATTACKS = ("flip", "scale", "noise", "prototypes")
SEEDS = 2
CASES = [("honest", 0.0), *((attack, part) for attack in ATTACKS for part in (0.2, 0.4))]


def worst(run: dict[str, Any]) -> tuple[tuple[str, str, str, float], float]:
    """Which cell a run belongs to, and its worst domain's accuracy."""
    config, accuracy = run["config"], run["summary"]["accuracy"]
    attack = config.get("attack") or "honest"
    part = config.get("attackers", 0.2) if attack != "honest" else 0.0
    cell = (run["summary"]["method"], config.get("robust", "none"), attack, part)
    return cell, min(a for domain, a in accuracy.items() if domain != "average")


def main() -> None:
    cells: dict[tuple[str, str, str, float], list[float]] = {}
    with gzip.open(ROOT / "results" / "robust" / "runs.jsonl.gz", "rt") as lines:
        for cell, value in map(worst, map(json.loads, lines)):
            cells.setdefault(cell, []).append(value)
    cases = [case for case in CASES if any(cell[2:] == case for cell in cells)]
    figure, axes = plt.subplots(3, 1, figsize=(9, 8), sharex=True, layout="constrained")
    for ax, (method, title) in zip(axes, METHODS.items(), strict=True):
        table = np.full((len(KINDS), len(cases)), np.nan)
        for i, kind in enumerate(KINDS):
            for j, case in enumerate(cases):
                found = cells.get((method, kind, *case), [])
                table[i, j] = mean(found) if len(found) == SEEDS else np.nan
                text = f"{table[i, j]:.0f}" if len(found) == SEEDS else "diverged"
                color = "white" if table[i, j] < 30 else "black"
                ax.text(j, i, text, ha="center", va="center", color=color)
        image = ax.imshow(table, vmin=0, vmax=60, cmap="viridis", aspect="auto")
        names = [name if not part else f"{name}\n{part:.0%}" for name, part in cases]
        ax.set_xticks(range(len(cases)), names)
        ax.set_yticks(range(len(KINDS)), KINDS)
        ax.set_title(title, loc="left")
        ax.set_ylabel("--robust")
    bar = figure.colorbar(image, ax=axes, shrink=0.5)
    bar.set_label("worst domain, accuracy in %")
    figure.savefig(ROOT / "docs" / "images" / "robust.png", dpi=110)


if __name__ == "__main__":
    main()
