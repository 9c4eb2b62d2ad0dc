"""The methods, one file per paper. A method registers by being defined in this package.

``METHODS`` has every class of this package that names itself, in alphabetical order of the names.
``protofed.methods.FPL`` and the other classes are attributes of the package; a type checker knows
nothing of them there, and all of a class in ``from protofed.methods.fpl import FPL``.

A method may also be in a file of your own. The file is executed if the user names it
(``method_class``); one that only a run or a study names is a ``RecordedMethod`` until
``trust_code()``.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

from protofed import keys
from protofed.errors import ProtofedError, unknown
from protofed.method import Method
from protofed.user_code import code_withheld, execute, is_file, is_trusted, parts_of
from protofed.user_code import trust_code as trust_code


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

WITHOUT_FILES = tuple(
    name for name, cls in METHODS.items() if not any(h.file for h in cls.hypers().values())
)
"""The methods that run as they are; the others need files that a user must have."""

_CLASSES = {cls.__name__: cls for cls in METHODS.values()}
globals().update(_CLASSES)

__all__ = [
    *("METHODS", "WITHOUT_FILES", "RecordedMethod", "create", "fingerprint", "known_class"),
    *("method_class", "reference", "trust_code"),
    *_CLASSES,
]

if TYPE_CHECKING:

    def __getattr__(name: str) -> type[Any]: ...


_LOADED: dict[str, type[Method]] = {}
"""The classes of files that this process has executed, by ``absolute/path.py:Class``."""


def known_class(name: str) -> type[Method] | None:
    """The class of a method that a file names; None if code would have to be executed to get it.

    It is known if it is built in, if this process has loaded it before, or if code is trusted.
    """
    if is_trusted() and is_file(name):
        return _from_file(name)
    return METHODS.get(name) or _LOADED.get(str(Path(name).absolute()))


def method_class(name: str) -> type[Method]:
    """The class of a built-in method, or of ``path/to/file.py:Class``, which is executed."""
    if is_file(name):
        return _from_file(name)
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


def create(name: str, options: Mapping[str, Any] | None = None, task: str = "") -> Method:
    """The method of that name with these hyper-parameters; the others have the task's defaults."""
    return method_class(name).create(options or {}, task)


def reference(method: Method) -> str:
    """A name that leads back to the method: built-in, or ``path/to/file.py:Class``."""
    if isinstance(method, RecordedMethod):
        return method.reference
    cls = type(method)
    if METHODS.get(cls.name) is cls:
        return cls.name
    try:
        return f"{inspect.getsourcefile(cls)}:{cls.__qualname__}"
    except (TypeError, OSError):  # a class typed into a notebook has no file
        return f"{cls.__module__}:{cls.__qualname__}"


def fingerprint(method: Method) -> str:
    """A hash of the source of a method that is not built in; empty for those that are."""
    if isinstance(method, RecordedMethod):
        return method.source
    cls = type(method)
    if METHODS.get(cls.name) is cls:
        return ""
    try:
        text = inspect.getsource(inspect.getmodule(cls) or cls)
    except (TypeError, OSError):
        text = f"{cls.__module__}:{cls.__qualname__}"
    return f"{keys.key(text):x}"


def _from_file(name: str) -> type[Method]:
    file, wanted = parts_of(name, "class", "Class")
    module = execute(file, f"method {wanted}")
    found = {n: c for n, c in vars(module).items() if isinstance(c, type)}
    classes = {n: c for n, c in found.items() if issubclass(c, Method)}
    if wanted not in classes:
        own = [n for n, c in classes.items() if c.__module__ != Method.__module__]
        raise unknown(f"method in {file}", wanted, own)
    cls = classes[wanted]
    if "__dataclass_fields__" not in vars(cls):
        wrong = f"{wanted} in {file} is not a dataclass"
        raise ProtofedError(wrong, "put @dataclass(frozen=True) above it")
    if not cls.name or cls.name in METHODS:
        cls.name = wanted.lower()
    if cls.name in METHODS:  # a file's FPL is not the package's
        cls.name = f"{cls.name}-{file.stem}"
    _LOADED[str(Path(name).absolute())] = cls
    return cls


@dataclass(frozen=True)
class RecordedMethod(Method):
    """A method as a run or a study recorded it: its name and hyper-parameters, not its code.

    Tables and figures need no more. Every hook is an error that says how to execute the code.
    ``source`` is its ``fingerprint``.
    """

    name: str = field()  # type: ignore[misc]  # of each, not of the class
    reference: str
    values: Mapping[str, Any]
    source: str = ""

    def __post_init__(self) -> None:
        for name, value in self.values.items():
            if not isinstance(value, (bool, int, float, str)):
                raise ProtofedError(
                    f"hyper-parameter {name} of {self.name} is neither a number nor a word"
                )

    @classmethod
    def require_plain_hypers(cls) -> None:
        pass

    def options(self) -> dict[str, Any]:
        return dict(self.values)


def _withheld(method: RecordedMethod) -> NoReturn:
    raise code_withheld(f"method {method.name}", method.reference)


_kept = {*vars(RecordedMethod), "for_mixed_models"}  # a method is recorded as it ran
for _name, _hook in vars(Method).items():
    _is_hook = isinstance(_hook, FunctionType | property) and not _name.startswith("_")
    if _is_hook and _name not in _kept:
        setattr(RecordedMethod, _name, property(_withheld))
