"""How the cost of a round grows: with clients, classes, the size of features, and prototypes.

    python benchmarks/growth.py measure [--only SWEEP] > benchmarks/records/growth-cpu.jsonl
    python benchmarks/growth.py draw          # docs/images/growth.png, from that record
    python benchmarks/growth.py table         # the same numbers as text

One quantity grows, and all others stay:

    clients     10 to 100,000, of which ten train in a round, with 2 images each (of a pool that is
                the same whatever their number); the whole run, in a folder
    classes     10 to 1,000; 10 clients with 1,000 images
    features    128 to 1,024 of a ResNet-10 (width 16 to 128; its weights grow with the square);
                2 clients with 8 images
    uploads     1 to 10,000 clients in one round: the server's step on their prototypes alone,
                10 classes, d = 512, features around 4 domains' centers for each class
    prototypes  1 to 64 of each class in the table that clients contrast their features with:
                forward and backward pass of the loss alone, batch 32, d = 512, 10 to 1,000 classes

Images are noise. Every point is a process of its own with one thread: a peak of memory cannot be
taken back. Seconds are CPU seconds of the process, medians over the rounds after the first, so
that other work on the machine changes little; memory is what the peak grows by beyond the
interpreter, PyTorch and the images (or the uploads).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "records" / "growth-cpu.jsonl"
POOL = 200_000
"""Images of the sweep over clients, 16×16."""
ROUNDS = 4
Point = dict[str, Any]


def points() -> Iterator[tuple[str, Point]]:
    """Each point: its sweep and what it measures; ``x`` is what grows."""
    for method in ("fedavg", "fpl", "scaffold", "fedbn"):
        for x in (10, 100, 1000, 10_000, 100_000):
            yield "clients", {"method": method, "x": x}
    for method in ("fedavg", "fpl", "fedplvm"):
        for x in (10, 100, 1000):
            yield "classes", {"method": method, "x": x}
    for method in ("fedavg", "fpl"):
        for x in (128, 512, 1024):
            yield "features", {"method": method, "x": x}
    for method in ("fpl", "i2pfl"):
        for x in (1, 10, 100, 1000, 10_000):
            yield "uploads", {"method": method, "x": x}
    for classes in (10, 100, 1000):
        for x in (1, 4, 16, 64):
            yield "prototypes", {"classes": classes, "x": x}


# ---- measuring ----------------------------------------------------------------------------------


def megabytes() -> float:
    """The peak of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def whole_run(
    method: str, size: int, images: int, clients: int, samples: int, classes: int, **settings: Any
) -> Point:
    """A run in a folder, on images of noise: CPU seconds by part, memory, bytes."""
    from protofed.data import Domain, Images, Task
    from protofed.data.task import Augment
    from protofed.federation.server import Server
    from protofed.federation.simulation import Observer
    from protofed.runs.run import run

    def noise(count: int) -> Images:
        x = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)
        return Images(x, torch.arange(count) % classes)

    task = Task(
        name="noise",
        classes=tuple(map(str, range(classes))),
        domains={"all": Domain(noise(images), noise(40))},
        augment=Augment(),
        clients={"all": clients},
        samples={"all": samples},
    )

    class Clock(Observer):
        """The CPU seconds since the last call belong to the part of the round that calls."""

        def __init__(self) -> None:
            self.mark, self.part, self.parts = time.process_time(), dict[str, float](), []
            self.began = 0.0

        def lap(self, part: str) -> None:
            now = time.process_time()
            self.part[part] = self.part.get(part, 0.0) + now - self.mark
            self.mark = now

        def start(self, federation: Any, records: Any) -> None:
            self.lap("start")
            self.began, self.part = self.part["start"], {}

        def client(self, round: int, done: int, total: int) -> None:
            self.lap("clients")

        def tested(self, round: int, done: int, total: int) -> None:
            self.lap("evaluate")

        def round(self, record: Any) -> None:
            self.lap("rest")
            self.parts.append(self.part)
            self.part = {}

    before, clock, finish = megabytes(), Clock(), Server.finish

    def timed(server: Server) -> dict[str, float]:
        clock.lap("clients")
        found = finish(server)
        clock.lap("server")
        return found

    Server.finish = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(prefix="protofed-growth-") as folder:
        out = Path(folder) / "run"
        result = run(
            task, method, protocol="glyphs", rounds=ROUNDS, epochs=1, lr=0.001, device="cpu",
            engine="loop", out=out, observers=[clock], **settings,
        )  # fmt: skip
        clock.lap("end")
        states = [path.stat().st_size for path in out.glob("clients/*")]
        kilobytes = sum(path.stat().st_size for path in out.glob("*.json")) / 1e3
    last = result.rounds[-1]
    parts = clock.parts[1:]
    return {
        "start_s": clock.began,
        **{f"{part}_s": statistics.median(p[part] for p in parts) for part in parts[0]},
        "end_s": clock.part["end"],
        "before_mb": before,
        "extra_mb": megabytes() - before,
        "steps": last["steps"],
        "up_mb": last["bytes_up"] / last["clients"] / 1e6,
        "down_mb": last["bytes_down"] / last["clients"] / 1e6,
        "states": len(states),
        "states_mb": sum(states) / 1e6,
        "json_kb": kilobytes,
    }


def clients(method: str, x: int) -> Point:
    """Ten of ``x`` clients a round."""
    return whole_run(method, 16, POOL, x, 2, 10, participation=10 / x, batch=2)


def classes(method: str, x: int) -> Point:
    """Ten clients, ``x`` classes."""
    return whole_run(method, 16, 10_000, 10, 1000, x, batch=100)


def features(method: str, x: int) -> Point:
    """Two clients with a ResNet-10 of ``x`` features."""
    model = {"model": "resnet10", "width": x // 8}
    return whole_run(method, 32, 16, 2, 8, 10, batch=8, **model)


def uploads(method: str, x: int) -> Point:
    """The server's step on the prototypes of ``x`` clients."""
    from protofed.federation.spool import Spool
    from protofed.method import ServerView, Sizes, Update
    from protofed.methods import create

    classes, features, domains = 10, 512, 4
    generator = torch.Generator().manual_seed(0)
    centers = torch.rand(domains, classes, features, generator=generator)
    spool, updates = Spool(), []
    for m in range(x):
        noise = torch.rand(classes, features, generator=generator)
        mean = (centers[m % domains] + 0.5 * noise).relu()
        entries = {"mean": mean, "count": torch.ones(classes)}
        spool.put(str(m), {"prototypes": entries})
        updates.append(Update(str(m), 1, 1, 0.01, spool))
    sizes = Sizes(classes, features, 32)
    chosen = create(method, {}, "glyphs")
    state = chosen.init_server({}, sizes)
    server = ServerView(state, 1, 2, tuple(u.name for u in updates), sizes)
    before, began = megabytes(), time.process_time()
    state = chosen.aggregate(server, {}, updates)
    return {
        "server_s": time.process_time() - began,
        "before_mb": before,
        "extra_mb": megabytes() - before,
        "down_mb": sum(t.nbytes for slot in state.values() for t in slot.values()) / 1e6,
    }


def prototypes(classes: int, x: int) -> Point:
    """The contrast of a batch with ``x`` prototypes of every class."""
    from protofed.prototypes import Prototypes, contrast

    torch.manual_seed(0)
    table = Prototypes(torch.rand(classes, x, 512), torch.ones(classes, x))
    z, y = torch.rand(32, 512, requires_grad=True), torch.arange(32) % classes
    before, seconds = megabytes(), []
    for _ in range(10):
        began = time.process_time()
        contrast(z, y, table, 0.02).backward()
        seconds.append(time.process_time() - began)
    return {
        "step_s": statistics.median(seconds[1:]),
        "before_mb": before,
        "extra_mb": megabytes() - before,
        "down_mb": (table.mean.nbytes + table.mask.nbytes) / 1e6,
    }


SWEEPS: dict[str, Callable[..., Point]] = {
    "clients": clients,
    "classes": classes,
    "features": features,
    "uploads": uploads,
    "prototypes": prototypes,
}


def measure(only: str | None) -> None:
    """Print a line of JSON for each point, and one before them for the machine."""
    about = {"python": platform.python_version(), "torch": torch.__version__}
    about |= {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()}
    print(json.dumps(about), flush=True)
    for sweep, point in points():
        if only not in (None, sweep):
            continue
        wanted = json.dumps({"sweep": sweep, **point})
        done = subprocess.run(
            [sys.executable, __file__, "point", wanted],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        found = json.loads(done.stdout.splitlines()[-1])
        found = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in found.items()}
        load = round(os.getloadavg()[0], 1)
        print(json.dumps({"sweep": sweep, **point, **found, "load": load}), flush=True)


def measure_point(wanted: str) -> None:
    torch.set_num_threads(1)
    point = json.loads(wanted)
    print(json.dumps(SWEEPS[point.pop("sweep")](**point)))


# ---- showing ------------------------------------------------------------------------------------


def recorded() -> list[Point]:
    """The points of the record."""
    return [p for line in RECORD.read_text().splitlines() if "sweep" in (p := json.loads(line))]


def table() -> None:
    """Print the record: a row for each point."""
    for point in recorded():
        kind = point.get("method") or f"{point['classes']} classes"
        rest = {k: v for k, v in point.items() if k not in ("sweep", "method", "classes", "x")}
        shown = ", ".join(f"{k} {v:g}" for k, v in rest.items())
        print(f"{point['sweep']:10} {kind:12} {point['x']:7,}  {shown}")


TITLES = {
    "clients": "clients, ten of them a round",
    "classes": "classes",
    "features": "features",
    "uploads": "clients in one round, the server's step",
    "prototypes": "prototypes per class, one loss",
}


def draw() -> None:
    """Draw the record: for each sweep the seconds and the memory against what grows."""
    from matplotlib.axes import Axes
    from matplotlib.ticker import FuncFormatter, NullFormatter

    from protofed.report.palette import COLORS, method_look
    from protofed.report.plot import LINE, Key, Panel, Plot, linestyle, render, scaled

    found, panels, keys = recorded(), [], dict[str, Key]()

    def key(point: Point) -> Key:
        if method := point.get("method"):
            return keys.setdefault(method, Key(method, *method_look(method)))
        label = f"{point['classes']:,} classes"
        style = {10: "solid", 100: "dashed", 1000: "dotted"}[point["classes"]]
        return keys.setdefault(label, Key(label, COLORS[-1], style))

    def panel(sweep: str, what: str) -> Panel:
        lines: dict[Key, tuple[list[float], list[float]]] = {}
        for point in found:
            if point["sweep"] == sweep:
                xs, ys = lines.setdefault(key(point), ([], []))
                xs.append(point["x"])
                timed = ("clients_s", "server_s", "rest_s", "step_s")
                ys.append(sum(point.get(k, 0) for k in timed) if what == "s" else point["extra_mb"])

        def draw_lines(axis: Axes) -> None:
            for key, (xs, ys) in lines.items():
                style: Any = {"color": key.color, "linestyle": linestyle(key.shape)}
                axis.plot(xs, ys, **style, linewidth=scaled(LINE), marker=".")
            axis.set(xscale="log", yscale="log", ylabel=words)
            every = [y for _, ys in lines.values() for y in ys]
            axis.set_ylim(10 ** floor(log10(min(every))), 10 ** ceil(log10(max(every))))
            axis.set_xticks(sorted({x for xs, _ in lines.values() for x in xs}))
            for side in (axis.xaxis, axis.yaxis):
                side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
                side.set_minor_formatter(NullFormatter())
            axis.grid(axis="y")

        unit = "step" if sweep == "prototypes" else "round"
        words = f"CPU seconds a {unit}" if what == "s" else "memory in MB"
        return Panel(TITLES[sweep], f"{words} against {TITLES[sweep]}", draw_lines, 4.6, 2.0)

    for sweep in SWEEPS:
        panels += [panel(sweep, "s"), panel(sweep, "mb")]
    plot = Plot("growth", "", tuple(panels), tuple(keys.values()), columns=2)
    (ROOT / "docs" / "images" / "growth.png").write_bytes(render(plot, ("png",), 150)["png"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("measure", "draw", "table", "point"))
    parser.add_argument("point", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=SWEEPS)
    options = parser.parse_args()
    if options.what == "measure":
        measure(options.only)
    elif options.what == "point":
        measure_point(options.point)
    else:
        {"draw": draw, "table": table}[options.what]()


if __name__ == "__main__":
    main()
