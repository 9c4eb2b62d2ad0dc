"""Draw the pictures of docs/domain-shift.md: ``python docs/pictures.py`` (minutes on two cores)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import protofed
from protofed import analysis
from protofed.data import load_task
from protofed.data.inspect import contact_sheet
from protofed.report.figures import Embedding, bars, embedding
from protofed.report.plot import render

IMAGES = Path(__file__).parent / "images"
SEEDS = 3
PER_DOMAIN = 200


def main() -> None:
    task = load_task("glyphs")
    (IMAGES / "domains.png").write_bytes(contact_sheet(task, each=1))
    made = protofed.compare("glyphs", {"FedAvg": "fedavg", "FPL": "fpl"}, seeds=SEEDS)
    plot = bars(made.tables()[0].rows, heading=f"glyphs, {SEEDS} seeds, 20 rounds")
    (IMAGES / "average.png").write_bytes(render(plot, ("png",), 130)["png"])

    fedavg = next(r for r in made.results() if r.summary["method"] == "fedavg")
    assert fedavg.folder is not None
    run = protofed.load_run(fedavg.folder)
    parts = {d: analysis.features(run, d, limit=PER_DOMAIN) for d in task.domains}
    found = Embedding(
        places=analysis.tsne(np.concatenate([z for z, _ in parts.values()])),
        labels=np.concatenate([y for _, y in parts.values()]),
        domains=tuple(d for d, (_, y) in parts.items() for _ in y),
        kind=("image",) * sum(len(y) for _, y in parts.values()),
    )
    plot = embedding("FedAvg", found, task.classes)
    (IMAGES / "features.png").write_bytes(render(plot, ("png",), 130)["png"])


if __name__ == "__main__":
    main()
