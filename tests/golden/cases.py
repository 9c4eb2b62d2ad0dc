"""The tiny float64 runs whose numbers are stored, and what is stored of each.

``values.json`` holds numbers that every CPU reproduces to 1e-6; ``hashes.json`` a hash of the
final tensors for each PyTorch version and CPU capability. A change of form must change neither.
After a deliberate change of numbers, raise ``NUMERICS`` in ``protofed.federation.facts``;
``python -m tests.golden.cases`` writes all files again.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protofed.config import make_config
from protofed.data import Augment, Domain, Images, Task
from protofed.federation.cpu import one_thread
from protofed.federation.facts import NUMERICS
from protofed.federation.simulation import Federation
from protofed.methods import METHODS
from tests.some_methods import options_of

FOLDER = Path(__file__).parent
VALUES, HASHES = FOLDER / "values.json", FOLDER / "hashes.json"
NUMBERS = FOLDER / "numerics.json"
"""A hash of ``values.json`` for each value that ``NUMERICS`` has had."""

SMALL: dict[str, Any] = {
    "rounds": 3,
    "epochs": 2,
    "batch": 5,
    "lr": 0.05,
    "model": "cnn2",
    "width": 2,
    "norm": "batch",
    "seed": 7,
    "precision": "fp64",
    "device": "cpu",
    "engine": "loop",
}


def tiny_task() -> Task:
    """Three domains of four classes, 16 pixels: a pattern for each class, a look for each domain.

    The last domain has no training image of the last class.
    """
    rng = np.random.Generator(np.random.Philox(2024))
    patterns = rng.uniform(0, 120, (4, 3, 16, 16))
    domains = {}
    for number, name in enumerate(("north", "south", "west")):
        look = rng.uniform(0, 70, (3, 1, 1))
        held = range(4) if name != "west" else range(3)
        parts = []
        for classes, each in ((held, 12), (range(4), 10)):
            y = np.repeat(np.array(list(classes)), each)
            pixels = patterns[y] + look + rng.uniform(0, 60 + 5 * number, (len(y), 3, 16, 16))
            parts.append(Images(torch.from_numpy(pixels.astype(np.uint8)), torch.from_numpy(y)))
        domains[name] = Domain(*parts)
    return Task(
        name="tiny",
        classes=("a", "b", "c", "d"),
        domains=domains,
        augment=Augment(padding=1, flip=True, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)),
        clients={"north": 2, "south": 1, "west": 1},
        samples={"north": 14, "south": 11, "west": 13},
        whole_unseen=True,
    )


def _simulated(method: str, options: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    options = {**options_of(method), **options}
    config = make_config(tiny_task(), method, options, **{**SMALL, **settings})
    federation = Federation(config, tiny_task())
    records = [federation.run_round() for _ in range(config.rounds)]
    trees = {"server": federation.server.state}
    trees |= {name: federation.store.get(name) for name in federation.clients}
    return _found(records, trees)


def _deployed(method: str) -> dict[str, Any]:
    """Three sites of the embedded task, server and sites in one process, through Flower's wire."""
    from protofed.runs.records import read_records
    from tests.deploy.flower_world import World, in_a_flower_run

    with tempfile.TemporaryDirectory() as folder, in_a_flower_run():
        world = World(Path(folder), method, rounds=2, precision="fp64")
        coordinator = world.coordinator()
        coordinator.run()
        records = read_records(world.out / "rounds.jsonl")
        return _found(records, {"server": coordinator.server.state})


def _found(records: Any, trees: Mapping[str, Any]) -> dict[str, Any]:
    digest = hashlib.sha256()
    norms = {}
    for owner, tree in trees.items():
        for slot, entries in sorted(tree.items()):
            total = 0.0
            for name, t in sorted(entries.items()):
                digest.update(f"{owner}/{slot}/{name} {t.dtype} {tuple(t.shape)}".encode())
                digest.update(t.detach().cpu().contiguous().numpy().tobytes())
                total += float(t.double().square().sum())
            norms[f"{owner}/{slot}"] = math.sqrt(total)
    rounds = [
        {
            "loss": record["loss"],
            "accuracy": record["accuracy"],
            "beside": record.get("beside", {}),
            "bytes": [record["bytes_up"], record["bytes_down"]],
        }
        for record in records
    ]
    return {"rounds": rounds, "norms": norms, "sha256": digest.hexdigest()}


def _cases() -> dict[str, Callable[[], dict[str, Any]]]:
    cases: dict[str, Callable[[], dict[str, Any]]] = {}

    def add(name: str, method: str, options: Mapping[str, Any] | None = None, **more: Any) -> None:
        cases[name] = lambda: _simulated(method, options or {}, **more)

    for method in sorted(METHODS):
        add(method, method)
    for method in ("fedgh", "fedmd", "fedproto", "fedseproto", "fedtgp", "local"):
        add(f"{method} with different models", method, model="cnn3,cnn2")
    for method in ("copa", "fedavg", "fpl", "i2pfl"):
        add(f"{method} without south", method, leave_out="south")
    for method in ("fedavg_ga", "feddyn", "fpl", "i2pfl", "moon", "scaffold"):
        add(f"{method} with half of the clients", method, participation=0.5, rounds=4)
    add("fedavg, uniform, group norm, label skew", "fedavg", average="uniform", norm="group",
        dirichlet=0.5)  # fmt: skip
    # its prototypes explode, at each client in another round
    add("fpl, switches", "fpl", {"finch_level": "first", "upcr_reduction": "sum",
        "proto_pass": "post", "cpcl_prototypes": "global"}, bounds="off")  # fmt: skip
    add("i2pfl, switches", "i2pfl", {"ema": "as_text", "inter": "cluster", "mixup": "input",
        "gamma_max": True, "apa_reduction": "sum", "detach": False,
        "lambda_intra": 0.05})  # fmt: skip
    add("fedseproto, switches", "fedseproto", {"kd_sign": "printed", "kl": "moments",
        "proto_reduction": "sum", "lam": 0.01, "proto_pass": "last_epoch",
        "decoder_step": 10.0})  # fmt: skip
    add("fedavg on a resnet", "fedavg", model="resnet10", width=2, rounds=1)
    for method in ("fedavg", "fedbn", "fpl", "scaffold"):
        cases[f"{method} on Flower"] = lambda method=method: _deployed(method)
    return cases


CASES = _cases()


def machine() -> str:
    """What the last bits depend on."""
    version = torch.__version__.partition("+")[0]
    return f"torch {version}, {torch.backends.cpu.get_cpu_capability()}"


def numbers_of(case: str) -> dict[str, Any]:
    """Run a case."""
    with one_thread():
        return CASES[case]()


def main() -> None:
    """Write the stored numbers again, of the cases named on the command line or of all."""
    chosen = sys.argv[1:] or list(CASES)
    values = json.loads(VALUES.read_text()) if VALUES.is_file() else {}
    hashes = json.loads(HASHES.read_text()) if HASHES.is_file() else {}
    for case in chosen:
        found = numbers_of(case)
        hashes.setdefault(machine(), {})[case] = found.pop("sha256")
        values[case] = found
        print(case, flush=True)
    for path, content in ((VALUES, values), (HASHES, hashes)):
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    known = json.loads(NUMBERS.read_text()) if NUMBERS.is_file() else {}
    known[str(NUMERICS)] = hashlib.sha256(VALUES.read_bytes()).hexdigest()
    NUMBERS.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
