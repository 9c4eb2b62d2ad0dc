"""The methods, one file each; ``base`` is the contract they are written on."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protofed import keys
from protofed.errors import ProtofedError, unknown
from protofed.method import Batch, Entry, Hyper, Method, Phase, Sizes, Terms, hyper
from protofed.methods.copa import COPA
from protofed.methods.fedadam import FedAdam
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedavgm import FedAvgM
from protofed.methods.fedbn import FedBN
from protofed.methods.feddyn import FedDyn
from protofed.methods.fedgh import FedGH
from protofed.methods.fedmd import FedMD
from protofed.methods.fedmlp import FedMLP
from protofed.methods.fednova import FedNova
from protofed.methods.fedopt import FedOpt
from protofed.methods.fedplvm import FedPLVM
from protofed.methods.fedproc import FedProc
from protofed.methods.fedproto import FedProto
from protofed.methods.fedprox import FedProx
from protofed.methods.fedseproto import FedSeProto
from protofed.methods.fedsr import FedSR
from protofed.methods.fpl import FPL
from protofed.methods.ga import FedAvgGA, FedGA
from protofed.methods.i2pfl import I2PFL
from protofed.methods.local import Local
from protofed.methods.moon import Moon
from protofed.methods.scaffold import Scaffold

METHODS: dict[str, type[Method]] = {
    m.name: m
    for m in (
        FedAvg,
        FedProx,
        Moon,
        FedDyn,
        FedOpt,
        FedAvgM,
        FedAdam,
        FedNova,
        Scaffold,
        FedBN,
        FedProc,
        FedProto,
        FPL,
        FedPLVM,
        I2PFL,
        FedSeProto,
        FedMLP,
        FedSR,
        FedAvgGA,
        FedGA,
        COPA,
        Local,
        FedMD,
        FedGH,
    )
}


def method_class(name: str) -> type[Method]:
    """The class of a built-in method, or of ``path/to/file.py:Class``."""
    if ".py:" in name or name.endswith(".py"):
        return _from_file(name)
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


def create(name: str, options: Mapping[str, Any] | None = None, task: str = "") -> Method:
    """The method of that name with these hyper-parameters, the others as on that task."""
    return method_class(name).create(options or {}, task)


def reference(method: Method) -> str:
    """The name by which a method can be named again: built-in, or ``path/to/file.py:Class``."""
    cls = type(method)
    if METHODS.get(cls.name) is cls:
        return cls.name
    try:
        return f"{inspect.getsourcefile(cls)}:{cls.__qualname__}"
    except (TypeError, OSError):  # a class typed into a notebook has no file
        return f"{cls.__module__}:{cls.__qualname__}"


def fingerprint(method: Method) -> str:
    """Stands for the text of a method that is not built in; empty for those that are."""
    cls = type(method)
    if METHODS.get(cls.name) is cls:
        return ""
    try:
        text = inspect.getsource(inspect.getmodule(cls) or cls)
    except (TypeError, OSError):
        text = f"{cls.__module__}:{cls.__qualname__}"
    return f"{keys.key(text):x}"


def _from_file(name: str) -> type[Method]:
    path, _, wanted = name.rpartition(":")
    if not wanted or wanted.endswith(".py"):
        raise ProtofedError(f"'{name}' names no class", "write path/to/file.py:Class")
    file = Path(path)
    if not file.is_file():
        raise ProtofedError(f"no file '{path}' to take method {wanted} from")
    # One module per content: a method's dataclass needs its module in sys.modules, and two
    # files of the same name must not meet there.
    module_name = f"protofed_user_{keys.key(str(file.resolve()), file.read_bytes().hex()):x}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[module_name]
            raise ProtofedError(f"'{path}' cannot be imported: {error!r}") from error
    classes = {
        n: c for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, Method)
    }
    if wanted not in classes:
        raise unknown(f"method in {path}", wanted, [n for n in classes if n != "Method"])
    cls = classes[wanted]
    if "__dataclass_fields__" not in vars(cls):
        raise ProtofedError(
            f"{wanted} in {path} is not a dataclass", "put @dataclass(frozen=True) above it"
        )
    if not cls.name or cls.name in METHODS:
        cls.name = wanted.lower()
    if cls.name in METHODS:  # a file's FPL is not the package's
        cls.name = f"{cls.name}-{file.stem}"
    return cls


__all__ = [
    "COPA",
    "FPL",
    "I2PFL",
    "METHODS",
    "Batch",
    "Entry",
    "FedAdam",
    "FedAvg",
    "FedAvgGA",
    "FedAvgM",
    "FedBN",
    "FedDyn",
    "FedGA",
    "FedGH",
    "FedMD",
    "FedMLP",
    "FedNova",
    "FedOpt",
    "FedPLVM",
    "FedProc",
    "FedProto",
    "FedProx",
    "FedSR",
    "FedSeProto",
    "Hyper",
    "Local",
    "Method",
    "Moon",
    "Phase",
    "Scaffold",
    "Sizes",
    "Terms",
    "create",
    "fingerprint",
    "hyper",
    "method_class",
    "reference",
]
