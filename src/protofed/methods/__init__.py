"""The methods, one file per paper. A method registers by being defined in this package.

``METHODS`` has every class of this package that names itself, in alphabetical order of the names.
``protofed.methods.FPL`` and the other classes are attributes of the package; a type checker sees
them as ``type[Method]``, and sees all of a class in ``from protofed.methods.fpl import FPL``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protofed import keys
from protofed.errors import ProtofedError, raised_at, unknown
from protofed.method import Method


def _built_in() -> dict[str, type[Method]]:
    found: dict[str, type[Method]] = {}
    for info in pkgutil.iter_modules(__path__, f"{__name__}."):
        for cls in vars(importlib.import_module(info.name)).values():
            own = isinstance(cls, type) and cls.__module__ == info.name
            if not own or not issubclass(cls, Method) or "name" not in vars(cls):
                continue  # a base that methods share has no name
            if cls.name in found:
                raise ImportError(f"{found[cls.name]} and {cls} are both named {cls.name!r}")
            found[cls.name] = cls
    return dict(sorted(found.items()))


METHODS: dict[str, type[Method]] = _built_in()

_CLASSES = {cls.__name__: cls for cls in METHODS.values()}
globals().update(_CLASSES)

__all__ = ["METHODS", "create", "fingerprint", "method_class", "reference", *_CLASSES]

if TYPE_CHECKING:

    def __getattr__(name: str) -> type[Method]: ...


def method_class(name: str) -> type[Method]:
    """The class of a built-in method, or of ``path/to/file.py:Class``."""
    if ".py:" in name or name.endswith(".py"):
        return _from_file(name)
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


def create(name: str, options: Mapping[str, Any] | None = None, task: str = "") -> Method:
    """The method of that name with these hyper-parameters; the others have the task's defaults."""
    return method_class(name).create(options or {}, task)


def reference(method: Method) -> str:
    """A name that leads back to the method: built-in, or ``path/to/file.py:Class``."""
    cls = type(method)
    if METHODS.get(cls.name) is cls:
        return cls.name
    try:
        return f"{inspect.getsourcefile(cls)}:{cls.__qualname__}"
    except (TypeError, OSError):  # a class typed into a notebook has no file
        return f"{cls.__module__}:{cls.__qualname__}"


def fingerprint(method: Method) -> str:
    """A hash of the source of a method that is not built in; empty for those that are."""
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
        raise ProtofedError(f"there is no file '{path}' to load method {wanted} from")
    # One module per content: a dataclass needs its module in sys.modules, and two files of the
    # same name must not collide there.
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
            at = raised_at(error, [str(module.__file__)]) or path
            if isinstance(error, ProtofedError):
                raise ProtofedError(f"{at}: {error.message}", error.hint) from error
            raise ProtofedError(f"'{at}' cannot be imported: {error!r}") from error
    found = {n: c for n, c in vars(module).items() if isinstance(c, type)}
    classes = {n: c for n, c in found.items() if issubclass(c, Method)}
    if wanted not in classes:
        own = [n for n, c in classes.items() if c.__module__ != Method.__module__]
        raise unknown(f"method in {path}", wanted, own)
    cls = classes[wanted]
    if "__dataclass_fields__" not in vars(cls):
        wrong = f"{wanted} in {path} is not a dataclass"
        raise ProtofedError(wrong, "put @dataclass(frozen=True) above it")
    if not cls.name or cls.name in METHODS:
        cls.name = wanted.lower()
    if cls.name in METHODS:  # a file's FPL is not the package's
        cls.name = f"{cls.name}-{file.stem}"
    return cls
