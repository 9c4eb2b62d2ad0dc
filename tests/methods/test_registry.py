"""Which methods there are: those of the package, and those of a user's file."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from protofed import methods
from protofed.config import make_config, read_config
from protofed.errors import ProtofedError
from protofed.method import Method
from protofed.methods import FPL, METHODS, FedProto, create, fingerprint, method_class, reference
from protofed.testing.checks import SHORT, tiny_task

FILE = '''
"""A method of one's own."""
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
from protofed.method import Method, hyper

@dataclass(frozen=True)
class Mine(Method):
    name: ClassVar[str] = "mine"
    strength: float = hyper(0.5, "s", "how strong", least=0)
'''


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


# ---- the registry -------------------------------------------------------------------------------


def test_every_class_of_the_package_that_names_itself_is_registered():
    assert list(METHODS) == sorted(METHODS)
    files = {path.stem for path in Path(methods.__file__).parent.glob("[!_]*.py")}
    registered = {cls.__module__.rpartition(".")[2] for cls in METHODS.values()}
    assert files - registered == {"server_optimizer"}, "a base of methods, which has no name"
    for cls in METHODS.values():
        assert getattr(methods, cls.__name__) is cls
        assert cls.__name__ in dir(methods) and cls.__name__ in methods.__all__
    with pytest.raises(AttributeError, match="FPLL"):
        _ = methods.FPLL


def test_type_checkers_accept_hyper_parameters(tmp_path):
    """As in the README; in a class's own module they also check them."""
    code = [
        "import protofed.methods",
        "from protofed.methods.fpl import FPL",
        "protofed.methods.FPL(tau=0.05)",
        "FPL(tau=0.05)",
        "FPL(tua=0.05)",
    ]
    (tmp_path / "user.py").write_text("\n".join(code))
    package = Path(methods.__file__).parents[1]
    # what is not named is not read: PyTorch takes a minute
    read = ["__init__.py", "method.py", "methods/__init__.py", "methods/fpl.py"]
    options = ["--follow-imports=skip", "--config-file=", f"--cache-dir={tmp_path}", "--strict"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "user.py", *(package / name for name in read)],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(package.parent)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("user.py")]
    assert len(found) == 1 and found[0].startswith("user.py:5: error: Unexpected keyword"), found


def test_the_registry_has_the_methods_by_their_names():
    for name, cls in METHODS.items():
        assert cls.name == name
        assert method_class(name) is cls
        assert create(name) == cls()


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_says_what_it_is(name):
    cls = METHODS[name]
    assert re.search(r"\b(19|20)\d\d\b", cls.paper), "authors, venue and year"
    assert str(cls().slots)
    assert cls.__doc__
    assert __import__(cls.__module__, fromlist=["x"]).__doc__
    for key, what in cls.hypers().items():
        assert what.meaning, f"{key} has no meaning"
        if what.choices:
            assert getattr(cls(), key) in what.choices


def test_the_papers_letters_are_the_symbols():
    assert FPL.hypers()["tau"].symbol == "τ"
    assert FedProto.hypers()["weight"].symbol == "λ"
    assert [n for n, h in FPL.hypers().items() if h.weight] == ["cpcl", "upcr"]
    assert [n for n, h in FedProto.hypers().items() if h.weight] == ["weight"]


# ---- methods from files -------------------------------------------------------------------------


def test_a_method_from_a_file(mine):
    method = create(f"{mine}:Mine", {"strength": 2})
    assert isinstance(method, Method)
    assert method.options() == {"strength": 2.0}
    assert method.name == "mine"
    assert method_class(f"{mine}:Mine") is type(method)  # loaded once


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere/none.py:Mine", "no file 'nowhere/none.py'"),
        ("nowhere/none.py", "names no class"),
        ("nowhere/none.py:", "names no class"),
    ],
)
def test_a_file_that_cannot_be(name, words):
    with pytest.raises(ProtofedError, match=re.escape(words)):
        method_class(name)


def test_a_class_that_is_not_there(mine):
    with pytest.raises(ProtofedError, match=r"unknown method in .* 'Mime'") as error:
        method_class(f"{mine}:Mime")
    assert "did you mean Mine" in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("import not_a_module_at_all\n", "not_a_module_at_all"),
        ("\n1 / 0\n", "broken.py:2' cannot be imported: ZeroDivisionError"),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path, text, words):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ProtofedError, match="cannot be imported") as error:
        method_class(f"{path}:Mine")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "bytes.py"
    path.write_bytes(b"x = '\xff\xfe'\n")
    with pytest.raises(ProtofedError, match=r"bytes\.py"):
        method_class(f"{path}:Mine")


def test_a_class_that_is_not_a_dataclass(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text(FILE.replace("@dataclass(frozen=True)\n", ""))
    with pytest.raises(ProtofedError, match=r"Mine .* is not a dataclass") as error:
        method_class(f"{path}:Mine")
    assert "@dataclass(frozen=True)" in error.value.hint


def test_the_same_class_name_in_two_files(tmp_path):
    names = []
    for folder, strength in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "mine.py"
        path.write_text(FILE.replace("hyper(0.5", f"hyper({strength}"))
        names.append(f"{path}:Mine")
    first, second = map(create, names)
    assert (first.strength, second.strength) == (1.0, 2.0)
    assert type(first) is not type(second)
    assert fingerprint(first) != fingerprint(second)
    assert reference(first) != reference(second)


def test_a_file_method_never_takes_a_built_in_name(tmp_path):
    path = tmp_path / "again.py"
    path.write_text(FILE.replace('"mine"', '"fpl"'))
    method = create(f"{path}:Mine")
    assert method.name not in METHODS
    assert reference(method) != "fpl"
    assert METHODS["fpl"] is FPL
    path.write_text(FILE.replace('"mine"', '"fpl"').replace("class Mine", "class FPL"))
    assert create(f"{path}:FPL").name not in METHODS


def test_reference_leads_back_from_another_folder(mine, monkeypatch, tmp_path):
    monkeypatch.chdir(mine.parent)
    method = create("mine.py:Mine", {"strength": 3})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = create(reference(method), method.options())
    assert again == method
    assert fingerprint(again) == fingerprint(method)
    assert reference(FPL(tau=1)) == "fpl"
    assert fingerprint(FPL()) == ""


def test_editing_the_file_changes_the_hash(mine):
    before = make_config(tiny_task(), f"{mine}:Mine", **SHORT).hash
    assert make_config(tiny_task(), f"{mine}:Mine", **SHORT).hash == before
    mine.write_text(FILE + "# a remark\n")
    os.utime(mine, (1, 1))  # nothing may depend on the file's date
    after = make_config(tiny_task(), f"{mine}:Mine", **SHORT).hash
    assert after != before
    mine.write_text(FILE)
    assert make_config(tiny_task(), f"{mine}:Mine", **SHORT).hash == before


def test_the_config_of_a_file_method_survives_toml(mine, tmp_path):
    config = make_config(tiny_task(), f"{mine}:Mine", {"strength": 0.25}, **SHORT)
    path = tmp_path / "config.toml"
    path.write_text(config.toml(), "utf-8")
    again = make_config(**{**read_config(path), "task": tiny_task()})
    assert again == config
    assert again.hash == config.hash


def test_a_misspelled_hook_in_a_file_is_told_as_such(mine):
    mine.write_text(FILE + "    def agregate(self):\n        pass\n")
    with pytest.raises(
        ProtofedError, match=r"mine\.py:\d+: Mine\.agregate.*did you mean aggregate"
    ):
        method_class(f"{mine}:Mine")
