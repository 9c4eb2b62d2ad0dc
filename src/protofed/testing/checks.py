"""Checks for any method: ``protofed.testing.check(MyMethod)``.

The same checks test the methods of this package. They run tiny federations (a few images of 8×8
pixels) in seconds and say in words what is wrong and where: a term without a gradient, a loss that
looks at a tensor's value, state that does not survive a restart.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from protofed import tree
from protofed.config import Config, make_config
from protofed.data.task import Augment, Domain, Images, Task
from protofed.errors import Diverged, ProtofedError, place, raised_at, unknown
from protofed.federation.client_round import train_client
from protofed.federation.cpu import one_thread
from protofed.federation.model_fit import require_fit
from protofed.federation.simulation import Federation, Observer, Record
from protofed.keys import generator
from protofed.method import HOOKS, Method
from protofed.methods.fedavg import FedAvg
from protofed.runs.records import without_times
from protofed.runs.result import Result
from protofed.runs.run import run
from protofed.testing.training_step import TrainingStep
from protofed.tree import Slot, Tree

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
"""The settings of a tiny run."""

UNKEYED = (
    "it keeps state outside of slots, or draws random numbers from torch, NumPy or F.dropout "
    "instead of client.uniform or server.generator"
)
"""Why numbers may differ that should be the same."""

SHORT: dict[str, Any] = {**TINY, "rounds": 2, "epochs": 1}
"""The settings of a check's run: state must survive one round, and no more is needed."""


def tiny_task(
    classes_of: dict[str, Sequence[int]] | None = None,
    samples: int = 22,
    clients: int = 2,
    spare: int = 0,
) -> Task:
    """Two domains of 8×8 noise images with a pattern per class.

    ``classes_of`` restricts a domain to some classes; ``spare`` is the number of training images
    of each domain that no client gets.
    """
    domains = {}
    for d, name in enumerate(("left", "right")):
        own = (classes_of or {}).get(name, range(CLASSES))
        train = _tiny_images(samples * clients + spare, own, d, 0)
        domains[name] = Domain(train, _tiny_images(20, range(CLASSES), d, 1))
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
class CheckResult:
    """The outcome of one check."""

    check: str
    status: str
    detail: str = ""
    place: str = ""
    """``file:line`` of the method, for a fault."""
    same_as: str = ""
    """The earlier check that found the same fault."""

    @property
    def failed(self) -> bool:
        return self.status == "failed"

    def line(self) -> str:
        mark = {"passed": "✓", "failed": "✗", "skipped": "–"}[self.status]
        return ": ".join(filter(None, (f"{mark} {self.check}", self.place, self.detail)))


class _Failed(AssertionError):
    """What a check found, in words, and the function of the method that it is about."""

    def __init__(self, finding: str, about: object = None) -> None:
        super().__init__(finding)
        self.about = about


def _require(holds: object, finding: str, about: object = None) -> None:
    if not holds:
        raise _Failed(finding, about)


class _NotApplicable(Exception):
    """Why a check does not apply to the method."""


class _Subject:
    """The method under test, with what several checks look at."""

    def __init__(self, method: Method) -> None:
        self.method = method

    @functools.cached_property
    def federation(self) -> Federation:
        """After its first round; checks leave it as it is."""
        return _after_a_round(self.method, "fp32")

    @functools.cached_property
    def step(self) -> TrainingStep:
        return TrainingStep(_after_a_round(self.method, "fp64"))


def check(method: type[Method] | Method) -> list[CheckResult]:
    """Run all checks; raises ``AssertionError`` with all findings if any check fails."""
    results = run_checks(method)
    if any(r.failed for r in results):
        raise AssertionError("\n".join(r.line() for r in results if not r.same_as))
    return results


def run_checks(
    method: type[Method] | Method,
    report: Callable[[CheckResult], object] = lambda _: None,
    only: Sequence[str] | None = None,
) -> list[CheckResult]:
    """Run all checks, or those named, and return their results.

    Each is reported as it comes, unless it failed because of the same fault as an earlier one.
    """
    for title in only or ():
        if title not in CHECKS:
            raise unknown("check", title, CHECKS)
    results: list[CheckResult] = []
    faults: dict[tuple[str, str], str] = {}
    subject: _Subject | None = None
    for title, function in CHECKS.items():
        if only is not None and title not in only:
            continue
        try:
            if subject is None:
                subject = _Subject(method() if isinstance(method, type) else method)
            with one_thread():
                result = CheckResult(title, "passed", function(subject) or "")
        except _NotApplicable as reason:
            result = CheckResult(title, "skipped", str(reason))
        except Exception as error:  # whatever the method raises is a finding
            cls = method if isinstance(method, type) else type(method)
            result, fault = _finding(title, error, cls)
            result = replace(result, same_as=faults.get(fault, ""))
            faults.setdefault(fault, title)
        results.append(result)
        if not result.same_as:
            report(result)
    return results


def _finding(
    title: str, error: Exception, cls: type[Method]
) -> tuple[CheckResult, tuple[str, str]]:
    """What a check found and where, and what tells this fault from others."""
    kind, about = type(error).__name__, getattr(error, "about", None)
    if isinstance(error, Diverged):  # whose client and round say nothing here
        detail = error.message.partition(": ")[2]
        about = cls.loss if detail.startswith("loss") else cls.aggregate
    else:
        ours = isinstance(error, _Failed | ProtofedError)
        detail = str(error) if ours else f"{kind}: {error}".splitlines()[0]
        if kind == "RuntimeError" and "double" in detail.lower():
            detail += " (this check computes in float64: make tensors of the dtype of others)"
        if kind == "KeyError":  # of a slot that is not there, most likely
            detail = ": ".join((detail, *getattr(error, "__notes__", [])[1:]))
    files = {getattr(sys.modules.get(c.__module__), "__file__", "") for c in _classes(cls)}
    at = raised_at(error.__cause__ or error, files)
    result = CheckResult(title, "failed", detail, at or _defined_at(about, cls))
    return result, (result.place, kind if at else detail)


def _classes(cls: type[Method]) -> list[type[Method]]:
    """The class and its bases that are not the package's contract."""
    return [c for c in cls.__mro__ if issubclass(c, Method) and c.__module__ != Method.__module__]


def _defined_at(*candidates: Any) -> str:
    """Where the first of these is defined that is not the package's contract."""
    for one in candidates:
        if getattr(one, "__module__", "") != Method.__module__:
            with contextlib.suppress(OSError, TypeError):  # no file, e.g. in a notebook
                return place(inspect.getsourcefile(one) or "", inspect.getsourcelines(one)[1])
    return ""


# ---- the checks: each returns a remark or raises -------------------------------------------------


def _declared(subject: _Subject) -> str:
    cls = type(subject.method)
    _require(dataclasses.is_dataclass(cls), "it is not a dataclass")
    _require(cls.name, "it has no name: write name = ... in the class")
    settings, used = {f.name for f in dataclasses.fields(Config)}, _names_used(cls)
    for name, hyper in cls.hypers().items():
        _require(hyper.meaning, f"hyper-parameter {name} has no meaning: use hyper(...)")
        _require(name not in settings, f"hyper-parameter {name} has the name of a setting")
        _require(hasattr(Method, name) or name in used, f"hyper-parameter {name} is never read")
    for name, member in [item for c in _classes(cls) for item in vars(c).items()]:
        plain = isinstance(getattr(Method, name, None), property) and inspect.isfunction(member)
        _require(not plain, f"{name} must be a property: write @property above it", member)
        _require(
            hasattr(Method, name) or name in used or name.startswith("_"),
            f"{unknown('hook', name, HOOKS)}, and nothing else uses it: if it is a helper, call it "
            f"_{name}",
            member,
        )
    return f"{cls.name}, {len(cls.hypers())} hyper-parameters"


def _names_used(cls: type[Method]) -> set[object]:
    """The attributes and words in the files of a method and its bases."""
    modules = {sys.modules[c.__module__] for c in cls.__mro__ if issubclass(c, Method)}
    try:
        nodes = [n for m in modules for n in ast.walk(ast.parse(inspect.getsource(m)))]
    except (OSError, TypeError):  # typed into a notebook: all may be used
        return set(dir(cls))
    attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    return attributes | {n.value for n in nodes if isinstance(n, ast.Constant)}


def _gradients(subject: _Subject) -> str:
    method, step = subject.method, subject.step
    seen = []
    for phase in step.phases:
        for name in step.terms(phase):
            slope, measured, size, value = step.slope(phase, name)
            again = float(step.terms(phase)[name].detach())
            _require(
                again == value or not math.isfinite(value),
                f"term '{name}' was {value:.8g}, and {again:.8g} when computed again from the same "
                f"weights, batch and round: {UNKEYED}",
                phase.loss,
            )
            infinite = f"the gradient of term '{name}' is not finite"
            _require(math.isfinite(slope), infinite, phase.loss)
            idle = f"term '{name}' is {value:.3g} but has no gradient: it trains nothing"
            _require(size > 0 or not value, idle, phase.loss)
            if name not in method.detached_terms:
                _require(
                    abs(slope - measured) <= 1e-5 * max(1.0, abs(slope), abs(measured)),
                    f"term '{name}': autograd says {slope:.8g} along a random direction, finite "
                    f"differences say {measured:.8g} (if it detaches a part of itself on purpose, "
                    f"name it in detached_terms)",
                    phase.loss,
                )
            seen.append(name)
    return f"terms {', '.join(seen)}"


def _fedavg(subject: _Subject) -> str:
    method = subject.method
    off = [name for name, h in method.hypers().items() if h.weight]
    if not off:
        raise _NotApplicable("no hyper-parameter is marked as the weight of a term")
    if method.evaluates == "everyone":
        raise _NotApplicable("clients have no model in common")
    ours = run(_task(method), method.without_weights(), **SHORT)
    fedavg = _fedavg_model()  # modules that the method adds are not compared
    common = {name: t for name, t in ours.model.items() if name in fedavg}
    _require(
        tree.equal({"model": common}, {"model": fedavg}),
        f"with {', '.join(off)} = 0 the model is not FedAvg's, bit for bit: if it is not meant to "
        "be, leave out weight=True",
    )
    return f"{', '.join(off)} = 0"


@functools.cache
def _fedavg_model() -> Slot:
    return run(tiny_task(), FedAvg(), **SHORT).model


def _missing_class(subject: _Subject) -> str:
    # class 3 is nowhere in training, class 2 only in one domain, and batches may hold one class
    _run(subject.method, {"left": [0, 1, 2], "right": [0, 1]})
    return "a class that nobody has, and one that half the clients have"


def _one_client(subject: _Subject) -> str:
    _run(subject.method, clients={"left": 1})
    return "a single client"


def _participation(subject: _Subject) -> str:
    # With this seed both clients of left train, then both of right, then one of each. So class 2 is
    # known after the first round, absent from the second, and trained again in the third.
    half = {"participation": 0.5, "rounds": 3, "seed": 1, "bounds": "off"}
    _run_twice(subject.method, {"left": [0, 1, 2], "right": [0, 1, 3]}, **half)
    return "half the clients and not all classes in a round, two runs with the same numbers"


def _empty_round(subject: _Subject) -> str:
    task = _task(subject.method)
    federation = Federation(make_config(task, subject.method, **{**SHORT, "rounds": 4}), task)
    for _ in range(2):  # the first round, in which the server has nothing yet, and a later one
        before = federation.server.state
        federation.server.finish()  # nobody replied
        unchanged = tree.equal(before, federation.server.state)
        _require(unchanged, "a round without replies changed state")
        federation.run_round()
        _finite(federation.server.state, "the server's state", subject.method.aggregate)
    return "rounds in which no client replied, the first one too, then others"


def _different_models(subject: _Subject) -> str:
    method, models = subject.method, ("cnn2", "cnn3")
    try:
        require_fit(method.for_mixed_models(), models, CLASSES, PIXELS, TINY["width"], TINY["norm"])
    except ProtofedError:
        raise _NotApplicable("it sends models, which must be the same at all clients") from None
    _run_twice(method, model=",".join(models))
    return f"{' and '.join(models)}, two runs with the same numbers"


def _resume(subject: _Subject) -> str:
    task = _task(subject.method)
    config = make_config(task, subject.method, **SHORT)
    with tempfile.TemporaryDirectory() as scratch:
        whole = run(task, config=config, out=Path(scratch) / "whole")
        out = Path(scratch) / "resumed"
        with contextlib.suppress(KeyboardInterrupt):
            run(task, config=config, out=out, observers=[_Interrupt(after=1)])
            raise AssertionError("the run was not interrupted")
        resumed = run(task, config=config, out=out, resume=True)
        same = _same(whole, resumed) and tree.equal(_kept(whole), _kept(resumed))
        _require(same, f"a resumed run differs from an uninterrupted one: {UNKEYED}")
        if subject.method.uses_rounds:
            return "interrupted in its second round, resumed, the same bits; cannot be extended"
        longer = dataclasses.replace(config, rounds=config.rounds + 1)
        extended = run(task, config=longer, out=out, resume=True)
        same = _same(extended, run(task, config=longer))
    _require(
        same,
        "a run that was extended by a round differs from one that was asked for all of them: what "
        "depends on the number of rounds must declare `uses_rounds = True`",
    )
    return "interrupted and resumed, or extended by a round: the same bits"


def _serialization(subject: _Subject) -> str:
    method, federation = subject.method, subject.federation
    received = federation.server.broadcast()
    site = next(iter(federation.clients.values()))
    network, mine = federation.make_network(), federation.store.get(site.name)
    reply = train_client(federation.setup, network, site, received, mine, 1)
    slots, state = method.slots, federation.server.state
    trees = {
        "the server's state": (state, {**slots.down, **slots.server}, method.aggregate),
        "the broadcast": (received, slots.down, method.broadcast),
        "the upload": (reply.message, slots.up, method.upload),
        "the private state": (reply.mine, slots.client, method.upload),
    }
    for what, (content, named, made_by) in trees.items():
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "tree.safetensors"
            tree.save(content, path)
            lost = f"{what} does not survive a file"
            _require(tree.equal(content, tree.load(path)[0]), lost, made_by)
        found = {slot for slot, entries in content.items() if entries} - {"model"}
        differ = f"{what} has the slots {sorted(found)}, but `slots` declares {sorted(named)}"
        undeclared = type(method).slots is Method.slots
        _require(undeclared or found == set(named), differ, made_by)
    up, down = tree.nbytes(reply.message), tree.nbytes(received)
    return f"{up:,} bytes up, {down:,} down, {tree.nbytes(reply.mine):,} kept by a client"


def _capture(subject: _Subject) -> str:
    step = subject.step
    for number, phase in enumerate(step.phases):
        first, second = step.inputs(), step.inputs(later=True)
        try:
            graph = make_fx(lambda *a, phase=phase: step(phase, *a))(*first)
        except Exception as error:
            if "tracing tensor" not in str(error):
                raise
            raise _Failed(
                "the step cannot be recorded: a hot hook reads a tensor's value (.item(), "
                "float(t), an `if` on a tensor, a shape from a mask)"
            ) from error
        later = subject.method.phases(2, step.epochs)[number]
        for a, b in zip(graph(*second), step(later, *step.inputs(later=True)), strict=True):
            _require(
                torch.allclose(a, b, rtol=1e-9, atol=1e-12),
                "a recorded step, replayed on another batch and round, gives different numbers "
                "than the step itself: something that changes (the round, a random number) entered "
                "as a Python number; take it from the client view",
                phase.loss,
            )
    return "recorded once, replayed on another batch, round and broadcast"


def _half_precision(subject: _Subject) -> str:
    step = TrainingStep(subject.federation)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for phase in step.phases:
            for name, term in step.terms(phase).items():
                value = float(term.detach())
                _require(math.isfinite(value), f"term '{name}' is {value} in bfloat16", phase.loss)
    return "finite under bfloat16 autocast"


CHECKS: dict[str, Callable[[_Subject], str]] = {
    "declared": _declared,
    "gradients": _gradients,
    "weights 0 = FedAvg": _fedavg,
    "missing class": _missing_class,
    "one client": _one_client,
    "participation": _participation,
    "empty round": _empty_round,
    "different models": _different_models,
    "resume": _resume,
    "serialization": _serialization,
    "capture-safety": _capture,
    "half precision": _half_precision,
}
"""The checks by title, in the order in which they run."""


class _AllFinite(Observer):
    """Requires finite numbers in every message and state; a deployment refuses others."""

    def start(self, federation: Federation, records: Sequence[Record]) -> None:
        self.federation, self.method = federation, federation.method

    def reply(self, round: int, name: str, message: Tree) -> None:
        _finite({"model": message.get("model", {})}, "the upload", self.method.loss)
        _finite(message, "the upload", self.method.upload)

    def round(self, record: Record) -> None:
        _finite(self.federation.server.state, "the server's state", self.method.aggregate)
        for name in self.federation.clients:
            _finite(self.federation.store.get(name), "a private state", self.method.upload)


class _Interrupt(Observer):
    """Presses Ctrl-C in the middle of a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def client(self, round: int, done: int, total: int) -> None:
        if round == self.after + 1 and done == 2:
            raise KeyboardInterrupt


def _after_a_round(method: Method, precision: str) -> Federation:
    task = _task(method)
    federation = Federation(make_config(task, method, **SHORT, precision=precision), task)
    federation.run_round()
    return federation


def _task(method: Method, classes_of: dict[str, Sequence[int]] | None = None) -> Task:
    """The tiny task, with spare images for a method that needs public ones.

    With a small holdout, clients have more images, so that some can be held out.
    """
    fewest = math.ceil(2 / max(method.holdout, 0.002)) if method.holdout else 0
    spare = 12 if method.public_images else 0
    return tiny_task(classes_of, max(22, fewest), spare=spare)


def _run(
    method: Method, classes_of: dict[str, Sequence[int]] | None = None, **settings: Any
) -> Result:
    """A short run on the tiny task in which everything that is sent and kept must be finite."""
    settings = {**SHORT, **settings}
    return run(_task(method, classes_of), method, observers=[_AllFinite()], **settings)


def _run_twice(
    method: Method, classes_of: dict[str, Sequence[int]] | None = None, **settings: Any
) -> None:
    first, second = (_run(method, classes_of, **settings) for _ in range(2))
    _require(_same(first, second), f"two runs with the same seed differ: {UNKEYED}")


def _same(a: Result, b: Result) -> bool:
    same_records = without_times(a.rounds) == without_times(b.rounds)
    return same_records and tree.equal(_models(a), _models(b))


def _finite(content: Tree, what: str, made_by: object) -> None:
    for slot, entries in content.items():
        for name, t in entries.items():
            bad = f"entry {name} of slot {slot} in {what} is not finite"
            _require(t.isfinite().all(), bad, made_by)


def _models(result: Result) -> Tree:
    return {
        "the model": result.model,
        **{f"{c}'s model": m for c, m in result.client_models.items()},
    }


def _kept(result: Result) -> Tree:
    """The state of the server and of every client in a finished run's folder."""
    assert result.folder is not None
    server, metadata = tree.load(result.folder / "checkpoint.safetensors")
    content = {f"server {slot}": entries for slot, entries in server.items()}
    for client, file in metadata["clients"].items():
        state = tree.load(result.folder / "clients" / file)[0]
        content |= {f"{client} {slot}": entries for slot, entries in state.items()}
    return content
