"""The methods, one file per paper. A method registers by being defined in this package.

``METHODS`` has every class of this package that names itself, in alphabetical order of the names.
``protofed.methods.FPL`` and the other classes are attributes of the package; a type checker sees
them as ``type[Method]``, and sees all of a class in ``from protofed.methods.fpl import FPL``.

A method may also be in a file of one's own. The file is executed where a person names it
(``method_class``). What is read (a config, a study, a run's folder) may name one too, and that is
executed only after ``trust_code()``; until then it is a ``RecordedMethod``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

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

__all__ = [
    *("METHODS", "RecordedMethod", "create", "fingerprint", "is_file", "known_class"),
    *("method_class", "reference", "trust_code"),
    *_CLASSES,
]

if TYPE_CHECKING:

    def __getattr__(name: str) -> type[Method]: ...


_LOADED: dict[str, type[Method]] = {}
"""The classes of files that this process has executed, by ``absolute/path.py:Class``."""
_trusted = False


def trust_code() -> None:
    """Let this process execute the method files that configs, studies and runs name."""
    global _trusted
    _trusted = True


def is_file(name: str) -> bool:
    """Whether a method's name is that of a file with code."""
    return ".py:" in name or name.endswith(".py")


def known_class(name: str) -> type[Method] | None:
    """The class of a method that something read names; None if a file would have to be executed.

    It is known if it is built in, if this process has loaded it before, or if code is trusted.
    """
    if _trusted and is_file(name):
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
    raise code_withheld(method.name, method.reference)


def code_withheld(name: str, reference: str) -> ProtofedError:
    """The error for what needs a method's code, where only a name was read."""
    return ProtofedError(
        f"this needs the code of method {name}, '{reference}', and reading a run executes none",
        "if you trust it: --trust-code, or protofed.methods.trust_code() in Python",
    )


_kept = {*vars(RecordedMethod), "for_mixed_models"}  # a method is recorded as it ran
for _name, _hook in vars(Method).items():
    _is_hook = isinstance(_hook, FunctionType | property) and not _name.startswith("_")
    if _is_hook and _name not in _kept:
        setattr(RecordedMethod, _name, property(_withheld))
