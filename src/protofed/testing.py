"""A battery of checks for any method: ``protofed.testing.check(MyMethod)``.

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
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from protofed import keys
from protofed.config import Config, make_config
from protofed.data.task import Augment, Domain, Images, Task
from protofed.federation import tree
from protofed.federation.client import Client
from protofed.federation.local import load, local, one_thread
from protofed.federation.records import Record, without_times
from protofed.federation.run import Federation, Observer, Result, run
from protofed.federation.tree import Slot, Tree
from protofed.keys import generator
from protofed.methods.base import Batch, Method, Phase, Terms
from protofed.methods.fedavg import FedAvg

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
    classes_of: dict[str, Sequence[int]] | None = None, samples: int = 22, clients: int = 2
) -> Task:
    """Two domains of 8×8 noise images with a pattern per class; ``classes_of`` limits a domain."""
    domains = {}
    for d, name in enumerate(("left", "right")):
        own = list((classes_of or {}).get(name, range(CLASSES)))
        domains[name] = Domain(
            _tiny_images(samples * clients, own, d, 0), _tiny_images(20, range(CLASSES), d, 1)
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
    scene = _Scene(method, torch.float64)
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
    ours = run(tiny_task(), method.without_weights(), **TINY)
    fedavg = run(tiny_task(), FedAvg(), **TINY)
    same = tree.equal({"model": ours.model}, {"model": fedavg.model})
    _require(same, f"with {', '.join(off)} = 0 the model is not FedAvg's, bit for bit")
    return f"{', '.join(off)} = 0"


def _missing_class(method: Method) -> str:
    # class 3 is nowhere in training, class 2 only at one domain, and batches may hold one class
    result = run(tiny_task({"left": [0, 1, 2], "right": [0, 1]}), method, **TINY)
    _finite(result)
    return "a class nobody has, and one that half the clients have"


def _one_client(method: Method) -> str:
    _finite(run(tiny_task(), method, **{**TINY, "clients": {"left": 1}}))
    return "one client in all"


def _participation(method: Method) -> str:
    result = run(tiny_task(), method, **{**TINY, "participation": 0.5, "rounds": 4})
    _finite(result)
    again = run(tiny_task(), method, **{**TINY, "participation": 0.5, "rounds": 4})
    _require(_same(result, again), "two runs with the same seed differ")
    return "half the clients a round, twice the same numbers"


def _resume(method: Method) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        whole = run(tiny_task(), method, **TINY)
        config = make_config(tiny_task(), method, **TINY)
        out = Path(scratch) / "run"
        try:
            run(tiny_task(), config=config, out=out, observers=[_Interrupt(after=1)])
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("the run was not interrupted")
        resumed = run(tiny_task(), config=config, out=out, resume=True)
    _require(_same(whole, resumed), "a resumed run differs from an uninterrupted one")
    return "interrupted in round 1, resumed, the same bits"


def _serialisation(method: Method) -> str:
    federation = _federation(method, torch.float32)
    federation.run_round()
    received = federation.server.broadcast()
    site = next(iter(federation.sites.values()))
    network = federation.make_network()
    reply = local(federation.setup, network, site, received, federation.store.get(site.name), 1)
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
    scene = _Scene(method, torch.float64)
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
    scene = _Scene(method, torch.float32)
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
    ("resume", _resume),
    ("serialisation", _serialisation),
    ("capture-safety", _capture),
    ("half precision", _half_precision),
]


# ---- a client in the middle of a round ----------------------------------------------------------


class _Scene:
    """A client in round 1 of a tiny federation, its weights moved away from where it started."""

    def __init__(self, method: Method, dtype: torch.dtype) -> None:
        federation = _federation(method, dtype)
        federation.run_round()
        self.method, self.dtype, self.sizes = method, dtype, federation.sizes
        self.network = federation.make_network()
        self.received = federation.server.broadcast()
        self.site, *others = federation.sites.values()
        self.another = others[0].name
        self.mine = federation.store.get(self.site.name)
        self.epochs = federation.setup.training.epochs
        self.phases = method.phases(1, self.epochs)
        start = self.mine.get("model", {}) | self.received.get("model", {})
        load(self.network, start)
        rng = generator("scene")
        with torch.no_grad():
            for p in self.network.parameters():
                p.add_(torch.from_numpy(rng.standard_normal(tuple(p.shape))).to(dtype), alpha=0.02)
        self.network.train()
        self.model: Slot = tree.copy({"model": self.network.state_dict()})["model"]
        self.batch = self._batch(0)

    def _batch(self, shift: int) -> Batch:
        rows = torch.arange(8) + shift
        x = self.site.images.x[rows].to(self.dtype) / 128 - 1
        return Batch(x, self.site.images.y[rows], rows)

    def terms(self, phase: Phase) -> Terms:
        """The loss at the scene's weights."""
        load(self.network, self.model)
        return phase.loss(self._client(self.received, self.mine), self.batch)

    def slope(self, phase: Phase, name: str) -> tuple[float, float, float, float]:
        """Along a random direction: the slope by autograd and by differences; ‖gradient‖, value."""
        term = self.terms(phase)[name]
        value = float(term.detach())
        moving = {
            n: p
            for n, p in self.network.named_parameters()
            if phase.trainable is None or phase.trainable(n)
        }
        if not term.requires_grad:
            return 0.0, 0.0, 0.0, value
        grads = torch.autograd.grad(term, list(moving.values()), allow_unused=True)
        rng = generator("direction", name)
        direction = {
            n: torch.from_numpy(rng.standard_normal(tuple(p.shape))) for n, p in moving.items()
        }
        pairs = [(g, direction[n]) for n, g in zip(moving, grads, strict=True) if g is not None]
        slope = sum(float((g * v).sum()) for g, v in pairs)
        size = math.sqrt(sum(float((g * g).sum()) for g, _ in pairs))
        # A step may cross the kink of a ReLU or a max-pool; a smaller one hardly does.
        tries = [self._difference(phase, name, direction, step) for step in (1e-6, 1e-7, 1e-8)]
        return slope, min(tries, key=lambda d: abs(d - slope)), size, value

    def _difference(self, phase: Phase, name: str, direction: Slot, step: float) -> float:
        ends = []
        for sign in (1, -1):
            load(self.network, self.model)
            with torch.no_grad():
                for n, p in self.network.named_parameters():
                    if n in direction:
                        p.add_(direction[n], alpha=sign * step)
            client = self._client(self.received, self.mine)
            ends.append(float(phase.loss(client, self.batch)[name].detach()))
        return (ends[0] - ends[1]) / (2 * step)

    # ---- the step as a function of tensors alone, as an engine would record it ----

    def inputs(self) -> list[Any]:
        """All that a step reads."""
        buffers = {n for n, _ in self.network.named_buffers()}
        return [
            {n: t.clone().requires_grad_() for n, t in self.model.items() if n not in buffers},
            {n: t.clone() for n, t in self.model.items() if n in buffers},
            tuple(self.batch),
            self.received,
            self.mine,
            torch.tensor(1),
            torch.tensor(0.5),
            torch.tensor(keys.key(self.site.name)),
            torch.tensor(11),
            self._drawn(0),
        ]

    def other_inputs(self) -> list[Any]:
        """The same, with everything different that may differ between two steps."""
        parameters, buffers, _, received, mine, *_ = self.inputs()
        scaled = [tree.map_tensors(t, _scaled) for t in (received, mine)]
        return [
            {n: (t.detach() * 1.1).requires_grad_() for n, t in parameters.items()},
            buffers,
            tuple(self._batch(3)),
            *scaled,
            torch.tensor(2),
            torch.tensor(1.0),
            torch.tensor(keys.key(self.another)),
            torch.tensor(12),
            self._drawn(1),
        ]

    def step(
        self,
        phase: Phase,
        parameters: Slot,
        buffers: Slot,
        batch: tuple[Tensor, Tensor, Tensor],
        received: Tree,
        mine: Tree,
        round: Tensor,
        progress: Tensor,
        id: Tensor,
        key: Tensor,
        drawn: Slot,
    ) -> list[Tensor]:
        """Loss and gradients."""
        client = self._client(received, mine)
        client.parameters = parameters  # type: ignore[assignment]
        client.round, client.progress, client.id, client.key = round, progress, id, key
        client.drawn = drawn
        loss = _Loss(self.network, lambda: phase.loss(client, Batch(*batch)))
        state = {f"network.{n}": t for n, t in (parameters | buffers).items()}
        total: Tensor = functional_call(loss, state, ())
        wanted = [p for n, p in parameters.items() if phase.trainable is None or phase.trainable(n)]
        grads = torch.autograd.grad(total, wanted, allow_unused=True)
        return [total, *(g for g in grads if g is not None)]

    def _client(self, received: Tree, mine: Tree) -> Client:
        client = Client(
            self.method,
            self.network,
            self.sizes,
            received=received,
            mine=mine,
            round=1,
            rounds=3,
            name=self.site.name,
        )
        client.begin_step(11)
        client.drawn = self._drawn(0)
        return client

    def _drawn(self, row: int) -> Slot:
        table = self.method.draws(generator("draws"), 2)
        return {name: torch.from_numpy(a).to(self.dtype)[row] for name, a in table.items()}


class _Loss(nn.Module):
    def __init__(self, network: nn.Module, call: Callable[[], Terms]) -> None:
        super().__init__()
        self.network, self.call = network, call

    def forward(self) -> Tensor:
        return torch.stack(list(self.call().values())).sum()


class _Interrupt(Observer):
    """Presses Ctrl-C in the middle of a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def client(self, round: int, done: int, total: int) -> None:
        if round == self.after and done == 2:
            raise KeyboardInterrupt


def _federation(method: Method, dtype: torch.dtype) -> Federation:
    precision = "fp64" if dtype == torch.float64 else "fp32"
    config: Config = make_config(tiny_task(), method, **TINY, precision=precision)
    return Federation(config, tiny_task())


def _scaled(t: Tensor) -> Tensor:
    return t * 1.1 if t.is_floating_point() else t.clone()


def _same(a: Result, b: Result) -> bool:
    records: Callable[[Result], list[Record]] = lambda r: without_times(r.rounds)  # noqa: E731
    return tree.equal({"model": a.model}, {"model": b.model}) and records(a) == records(b)


def _finite(result: Result) -> None:
    for name, t in result.model.items():
        _require(bool(torch.isfinite(t).all()), f"entry {name} of the model is not finite")


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
