"""Python files of the user's own, with methods and models: ``path/to/file.py:name``.

A file is executed if the user names it. What is read (a config, a study, a run's folder) may name
one too, and that one is executed only after ``trust_code()``.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from protofed import keys
from protofed.errors import ProtofedError, raised_at

_trusted = False
_copies: dict[Path, Path] = {}


def trust_code() -> None:
    """Let this process execute the Python files that configs, studies and runs name."""
    global _trusted
    _trusted = True


def is_trusted() -> bool:
    return _trusted


def is_file(name: str) -> bool:
    """Whether the name of a method or model is that of a file with code."""
    return ".py:" in name or name.endswith(".py")


def code_withheld(what: str, reference: str) -> ProtofedError:
    """The error for what needs code, where only a name was read; ``what`` is e.g. "method x"."""
    needed = f"this needs the code of {what}, '{reference}'"
    if not is_file(reference):
        return ProtofedError(f"{needed}, which is in no file", "train with its class in a file")
    return ProtofedError(
        f"{needed}, and reading a run does not execute code",
        "if you trust it: --trust-code, or protofed.methods.trust_code() in Python",
    )


def use_copies(copies: Mapping[str, str]) -> None:
    """Read these files of code from copies, because the files themselves are on another machine."""
    _copies.update({Path(file): Path(copy) for file, copy in copies.items()})


def readable(file: Path) -> Path:
    """Where to read the content of a file of code from."""
    return _copies.get(file.absolute(), file)


def parts_of(name: str, kind: str, example: str) -> tuple[Path, str]:
    """File and name of ``path/to/file.py:name``; ``kind`` is what should be found there."""
    path, _, wanted = name.rpartition(":")
    if not wanted or wanted.endswith(".py"):
        raise ProtofedError(f"'{name}' names no {kind}", f"write path/to/file.py:{example}")
    return Path(path), wanted


def execute(file: Path, wanted: str) -> ModuleType:
    """The module of a file, executed once per content; ``wanted`` is what it is read for."""
    source = readable(file)
    if not source.is_file():
        raise ProtofedError(f"there is no file '{file}' to load {wanted} from")
    # One module per content: a dataclass needs its module in sys.modules, and two files of the
    # same name must not collide there.
    module_name = f"protofed_user_{keys.key(str(file.resolve()), source.read_bytes().hex()):x}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        module.__file__ = str(file.absolute())
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[module_name]
            at = raised_at(error, [str(module.__file__)]) or file
            if isinstance(error, ProtofedError):
                raise ProtofedError(f"{at}: {error.message}", error.hint) from error
            raise ProtofedError(f"'{at}' cannot be imported: {error!r}") from error
    return module
