"""A battery of checks for any method: ``protofed.testing.checks.check(MyMethod)``.

The same battery tests the methods of this package. It runs tiny federations (a few images of 8×8
pixels) in seconds and says in words what is wrong: a term without gradient, a loss that looks at
a tensor's value, state that does not survive a restart.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from protofed import tree
from protofed.config import Config, make_config
from protofed.data.task import Augment, Domain, Images, Task
from protofed.errors import ProtofedError
from protofed.federation.client_round import train_client
from protofed.federation.cpu import one_thread
from protofed.federation.model_fit import require_fit
from protofed.federation.simulation import Federation, Observer
from protofed.keys import generator
from protofed.method import Method
from protofed.methods.fedavg import FedAvg
from protofed.runs.records import Record, without_times
from protofed.runs.result import Result
from protofed.runs.run import run
from protofed.testing.scene import Scene
from protofed.tree import Tree

CLASSES, PIXELS = 4, 8
TINY: dict[str, Any] = {
    "model": "cnn2",
    "width": 4,
    "norm": "batch",
    "rounds": 3,
    "epochs": 2,
    "batch": 8,
    "lr": 0.05,
    "device": "cpu",
    "engine": "loop",
}


def tiny_task(
    classes_of: dict[str, Sequence[int]] | None = None,
    samples: int = 22,
    clients: int = 2,
    spare: int = 0,
) -> Task:
    """Two domains of 8×8 noise images with a pattern per class; ``classes_of`` limits a domain.

    ``spare``: training images of each domain that no client gets.
    """
    domains = {}
    for d, name in enumerate(("left", "right")):
        own = list((classes_of or {}).get(name, range(CLASSES)))
        domains[name] = Domain(
            _tiny_images(samples * clients + spare, own, d, 0),
            _tiny_images(20, range(CLASSES), d, 1),
        )
    return Task(
        name="tiny",
        classes=tuple("abcd"),
        domains=domains,
        augment=Augment(padding=1, flip=True),
        clients=dict.fromkeys(domains, clients),
        samples=dict.fromkeys(domains, samples),
        note="noise",
    )


def _tiny_images(n: int, classes: Sequence[int], domain: int, split: int) -> Images:
    rng = generator("tiny", domain, split)
    y = torch.tensor([classes[i % len(classes)] for i in range(n)])
    x = torch.from_numpy(rng.integers(0, 120, size=(n, 3, PIXELS, PIXELS)))
    for k in range(CLASSES):
        x[y == k, domain, 2 * k : 2 * k + 2] += 120
    return Images(x.to(torch.uint8), y)


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check."""

    check: str
    status: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether the method is at fault."""
        return self.status == "failed"

    def line(self) -> str:
        """The verdict as a line of text."""
        mark = {"passed": "✓", "failed": "✗", "skipped": "–"}[self.status]
        return f"{mark} {self.check}" + (f": {self.detail}" if self.detail else "")


class Failure(AssertionError):
    """A check's finding, in words."""


class _Skip(Exception):
    """The check does not apply to this method."""


def check(method: type[Method] | Method) -> list[Verdict]:
    """Run the whole battery; raises ``AssertionError`` with all findings if any check fails."""
    verdicts = run_checks(method)
    if any(v.failed for v in verdicts):
        raise AssertionError("\n".join(v.line() for v in verdicts))
    return verdicts


def run_checks(
    method: type[Method] | Method, tell: Callable[[Verdict], object] = lambda _: None
) -> list[Verdict]:
    """Run the whole battery and return the verdicts, telling each as it is reached."""
    verdicts = []
    built: Method | None = None
    for title, function in _CHECKS:
        try:
            if built is None:
                built = method() if isinstance(method, type) else method
            with one_thread():
                verdict = Verdict(title, "passed", function(built) or "")
        except _Skip as reason:
            verdict = Verdict(title, "skipped", str(reason))
        except Failure as finding:
            verdict = Verdict(title, "failed", str(finding))
        except Exception as error:  # whatever the method raises is a finding
            verdict = Verdict(title, "failed", f"{type(error).__name__}: {error}")
        verdicts.append(verdict)
        tell(verdict)
    return verdicts


# ---- the checks: each returns a remark or raises -------------------------------------------------


def _declared(method: Method) -> str:
    cls = type(method)
    _require(dataclasses.is_dataclass(cls), "it is not a dataclass")
    _require(bool(cls.name), "it has no name: give it name: ClassVar[str]")
    for name, hyper in cls.hypers().items():
        _require(bool(hyper.meaning), f"hyper-parameter {name} has no meaning: use hyper(...)")
    return f"{cls.name}, {len(cls.hypers())} hyper-parameters"


def _gradients(method: Method) -> str:
    scene = Scene(_federation(method, torch.float64))
    seen = []
    for phase in scene.phases:
        names = list(scene.terms(phase))
        for name in names:
            slope, measured, size, value = scene.slope(phase, name)
            _require(math.isfinite(slope), f"the gradient of term '{name}' is not finite")
            if value:
                _require(
                    size > 0,
                    f"term '{name}' is {value:.3g} but has no gradient: it trains nothing",
                )
            if name not in method.constant_parts:
                _require(
                    abs(slope - measured) <= 1e-5 * max(1.0, abs(slope), abs(measured)),
                    f"term '{name}': autograd says {slope:.8g} along a random direction, finite "
                    f"differences say {measured:.8g} (if it detaches a part of itself on purpose, "
                    f"name it in constant_parts)",
                )
            seen.append(name)
    return f"terms {', '.join(seen)}"


def _fedavg(method: Method) -> str:
    off = [name for name, h in method.hypers().items() if h.weight]
    if not off:
        raise _Skip("no hyper-parameter is marked as the weight of a term")
    if method.evaluates == "everyone":
        raise _Skip("clients have no model in common")
    ours = run(_task(method), method.without_weights(), **TINY)
    fedavg = run(tiny_task(), FedAvg(), **TINY)
    same = tree.equal({"model": ours.model}, {"model": fedavg.model})
    _require(same, f"with {', '.join(off)} = 0 the model is not FedAvg's, bit for bit")
    return f"{', '.join(off)} = 0"


def _missing_class(method: Method) -> str:
    # class 3 is nowhere in training, class 2 only at one domain, and batches may hold one class
    result = run(_task(method, {"left": [0, 1, 2], "right": [0, 1]}), method, **TINY)
    _finite(result)
    return "a class nobody has, and one that half the clients have"


def _one_client(method: Method) -> str:
    _finite(run(_task(method), method, **{**TINY, "clients": {"left": 1}}))
    return "one client in all"


def _participation(method: Method) -> str:
    settings = {**TINY, "participation": 0.5, "rounds": 4}
    result, again = (run(_task(method), method, **settings) for _ in range(2))
    _finite(result)
    _require(_same(result, again), "two runs with the same seed differ")
    return "half the clients a round, twice the same numbers"


def _empty_round(method: Method) -> str:
    federation = _federation(method, torch.float32)
    federation.run_round()
    before = federation.server.state
    federation.server.finish()  # nobody replied
    _require(tree.equal(before, federation.server.state), "a round without replies changed state")
    federation.run_round()
    for slot, entries in federation.server.state.items():
        for name, t in entries.items():
            _require(bool(t.isfinite().all()), f"{name} of slot {slot} is not finite afterwards")
    return "a round in which no client replied, then another"


def _different_models(method: Method) -> str:
    models, norm = "cnn2,cnn3", TINY["norm"]
    try:
        require_fit(method.apart(), models, CLASSES, PIXELS, TINY["width"], norm)
    except ProtofedError:
        raise _Skip("it sends models, which must be the same at all clients") from None
    result, again = (run(_task(method), method, **{**TINY, "model": models}) for _ in range(2))
    _finite(result)
    _require(_same(result, again), "two runs with the same seed differ")
    return f"{models}, twice the same numbers"


def _resume(method: Method) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        task = _task(method)
        whole = run(task, method, **TINY)
        config = make_config(task, method, **TINY)
        out = Path(scratch) / "run"
        try:
            run(task, config=config, out=out, observers=[_Interrupt(after=1)])
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("the run was not interrupted")
        resumed = run(task, config=config, out=out, resume=True)
    _require(_same(whole, resumed), "a resumed run differs from an uninterrupted one")
    return "interrupted in round 1, resumed, the same bits"


def _serialization(method: Method) -> str:
    federation = _federation(method, torch.float32)
    federation.run_round()
    received = federation.server.broadcast()
    site = next(iter(federation.sites.values()))
    network = federation.make_network()
    reply = train_client(
        federation.setup, network, site, received, federation.store.get(site.name), 1
    )
    trees = {
        "the server's state": federation.server.state,
        "the broadcast": received,
        "the upload": reply.message,
        "the private state": reply.mine,
    }
    with tempfile.TemporaryDirectory() as scratch:
        for what, content in trees.items():
            _require(_is_tree(content), f"{what} is not slots of named tensors")
            path = Path(scratch) / "tree.safetensors"
            tree.save(content, path)
            _require(tree.equal(content, tree.load(path)[0]), f"{what} does not survive a file")
    up, down = tree.nbytes(reply.message), tree.nbytes(received)
    return f"{up:,} bytes up, {down:,} down, {tree.nbytes(reply.mine):,} kept by a client"


def _capture(method: Method) -> str:
    scene = Scene(_federation(method, torch.float64))
    for number, phase in enumerate(scene.phases):
        first, second = scene.inputs(), scene.other_inputs()
        try:
            graph = make_fx(lambda *a, phase=phase: scene.step(phase, *a))(*first)
        except Exception as error:
            raise Failure(
                f"the step cannot be recorded: {str(error).splitlines()[0]} (a hot hook reads a "
                "tensor's value: .item(), float(t), an `if` on a tensor, a shape from a mask)"
            ) from error
        later = method.phases(2, scene.epochs)[number]
        for a, b in zip(graph(*second), scene.step(later, *scene.other_inputs()), strict=True):
            _require(
                torch.allclose(a, b, rtol=1e-9, atol=1e-12),
                "a recorded step, replayed on another batch and round, gives other numbers than "
                "the step itself: something that changes (the round, a random number) entered as "
                "a Python number; take it from the client view",
            )
    return "recorded once, replayed on another batch, round and broadcast"


def _half_precision(method: Method) -> str:
    scene = Scene(_federation(method, torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for phase in scene.phases:
            for name, term in scene.terms(phase).items():
                value = float(term.detach())
                _require(math.isfinite(value), f"term '{name}' is {value} in bfloat16")
    return "finite under bfloat16 autocast"


_CHECKS: list[tuple[str, Callable[[Method], str]]] = [
    ("declared", _declared),
    ("gradients", _gradients),
    ("weights 0 = FedAvg", _fedavg),
    ("missing class", _missing_class),
    ("one client", _one_client),
    ("participation", _participation),
    ("empty round", _empty_round),
    ("different models", _different_models),
    ("resume", _resume),
    ("serialization", _serialization),
    ("capture-safety", _capture),
    ("half precision", _half_precision),
]


class _Interrupt(Observer):
    """Presses Ctrl-C in the middle of a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def client(self, round: int, done: int, total: int) -> None:
        if round == self.after and done == 2:
            raise KeyboardInterrupt


def _federation(method: Method, dtype: torch.dtype) -> Federation:
    precision = "fp64" if dtype == torch.float64 else "fp32"
    config: Config = make_config(_task(method), method, **TINY, precision=precision)
    return Federation(config, _task(method))


def _task(method: Method, classes_of: dict[str, Sequence[int]] | None = None) -> Task:
    """The tiny task, with images to spare for a method that needs public ones."""
    return tiny_task(classes_of, spare=12 if method.public_images else 0)


def _same(a: Result, b: Result) -> bool:
    records: Callable[[Result], list[Record]] = lambda r: without_times(r.rounds)  # noqa: E731
    return tree.equal(_models(a), _models(b)) and records(a) == records(b)


def _finite(result: Result) -> None:
    for owner, model in _models(result).items():
        for name, t in model.items():
            _require(bool(t.isfinite().all()), f"entry {name} of {owner} is not finite")


def _models(result: Result) -> Tree:
    return {"the model": result.model, **{f"{c}'s model": m for c, m in result.clients.items()}}


def _is_tree(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(slot, str)
        and isinstance(entries, dict)
        and all(isinstance(n, str) and isinstance(t, Tensor) for n, t in entries.items())
        for slot, entries in value.items()
    )


def _require(holds: bool, finding: str) -> None:
    if not holds:
        raise Failure(finding)
