"""The contract of methods: hyper-parameters, loading from files, and the lines between packages."""

import ast
import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import protofed
from protofed.config import make_config, read_config
from protofed.errors import ProtofedError
from protofed.method import Hyper, Method, hyper
from protofed.methods import (
    FPL,
    METHODS,
    FedAvg,
    FedProto,
    create,
    fingerprint,
    method_class,
    reference,
)
from protofed.testing.checks import TINY, tiny_task

SOURCE = Path(protofed.__file__).parent

FILE = '''
"""A method of one's own."""
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
from protofed.methods import Method, hyper

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


# ---- hyper-parameters ---------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0, -1, 0.0, -1e-9, float("nan"), float("-inf")])
def test_tau_must_be_above_0(tau):
    with pytest.raises(ProtofedError) as error:
        FPL(tau=tau)
    text = str(error.value)
    assert "tau" in text
    assert "above 0" in text
    assert "default is 0.02" in text  # the hint
    assert "\n" not in text


@pytest.mark.parametrize("value", [float("nan"), -0.1])
def test_a_weight_is_at_least_0(value):
    with pytest.raises(ProtofedError, match="weight of fedproto must be at least 0"):
        FedProto(weight=value)


@pytest.mark.parametrize("name", ["tau", "cpcl", "upcr"])
def test_infinity_is_not_a_hyper_parameter(name):
    # TOML as json.dumps writes it knows no Infinity: such a run could not be read back
    with pytest.raises(ProtofedError, match=name):
        FPL(**{name: float("inf")})


@pytest.mark.parametrize("value", ["0.1", None, True, [0.1], {}])
def test_a_wrong_type_is_refused(value):
    with pytest.raises(ProtofedError, match="tau of fpl must be a number") as error:
        FPL(tau=value)
    assert repr(value) in str(error.value)


def test_a_number_for_a_word_is_refused():
    with pytest.raises(ProtofedError, match="finch_level of fpl must be a word, got 1"):
        FPL(finch_level=1)


@pytest.mark.parametrize(("default", "words"), [
    ({"default": None}, "has the default None"),
    ({"default": (1, 2)}, r"has the default \(1, 2\)"),
    ({"default_factory": list}, "has no default"),
    ({}, "has no default"),
])  # fmt: skip
def test_a_default_that_no_configuration_could_say_is_refused(default, words):
    @dataclass(frozen=True)
    class Odd(Method):
        name: ClassVar[str] = "odd"
        widths: object = dataclasses.field(**default)

    with pytest.raises(ProtofedError, match=f"hyper-parameter widths of odd {words}"):
        Odd.create({})
    given = {"widths": 1} if not default else {}
    config = make_config(tiny_task(), Odd(**given), **TINY)  # a run without a folder may have it
    with pytest.raises(ProtofedError, match=words):
        config.toml()


def test_whole_numbers_and_booleans_are_kept_apart():
    @dataclass(frozen=True)
    class Kinds(Method):
        name: ClassVar[str] = "kinds"
        n: int = hyper(3, "n", "a count", least=1, most=5)
        on: bool = hyper(True, "", "a switch")

    assert Kinds(n=5, on=False).options() == {"n": 5, "on": False}
    for wrong in (1.0, True, "2"):
        with pytest.raises(ProtofedError, match="n of kinds must be a whole number"):
            Kinds(n=wrong)
    with pytest.raises(ProtofedError, match="on of kinds must be true or false"):
        Kinds(on=1)
    for wrong, words in ((0, "at least 1"), (6, "at most 5")):
        with pytest.raises(ProtofedError, match=words):
            Kinds(n=wrong)


def test_a_whole_number_is_accepted_for_a_number_and_becomes_one():
    method = FPL(tau=1)
    assert type(method.tau) is float
    assert method == FPL(tau=1.0)


def test_choices_name_the_nearest():
    with pytest.raises(ProtofedError, match="did you mean cluster") as error:
        FPL(cpcl_prototypes="clusters")
    assert "cpcl_prototypes" in str(error.value)
    with pytest.raises(ProtofedError, match="valid: first, last"):
        FPL(finch_level="qqq")


def test_create_names_the_nearest_hyper_parameter():
    with pytest.raises(ProtofedError, match="unknown hyper-parameter of fpl 'taus'") as error:
        create("fpl", {"taus": 0.1})
    assert "did you mean tau" in str(error.value)
    with pytest.raises(ProtofedError, match=r"fedavg.*has no hyper-parameter 'tau'"):
        create("fedavg", {"tau": 0.1})


def test_create_names_the_nearest_method():
    with pytest.raises(ProtofedError, match="unknown method 'fedprotto'") as error:
        create("fedprotto")
    assert "did you mean fedproto" in str(error.value)


def test_create_and_options():
    assert create("fpl") == FPL()
    assert create("fpl", {"tau": 0.1}) == FPL(tau=0.1)
    assert create("fpl", FPL(tau=0.1, cpcl=2).options()) == FPL(tau=0.1, cpcl=2)
    assert set(FPL().options()) == {f.name for f in dataclasses.fields(FPL)}
    assert FedAvg().options() == {}


def test_without_weights_keeps_everything_else():
    off = FPL(tau=0.3, finch_level="first").without_weights()
    assert off == FPL(tau=0.3, finch_level="first", cpcl=0, upcr=0)
    assert FedProto(weight=4, proto_pass="post").without_weights() == FedProto(0, "post")
    assert FedAvg().without_weights() == FedAvg()


def test_a_method_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FPL().tau = 1.0


# ---- the registry -------------------------------------------------------------------------------


def test_the_registry_has_the_methods_by_their_names():
    assert {"fedavg", "fedproto", "fpl"} <= set(METHODS)
    for name, cls in METHODS.items():
        assert cls.name == name
        assert method_class(name) is cls
        assert create(name) == cls()


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_says_what_it_is(name):
    cls = METHODS[name]
    assert re.search(r"\b(19|20)\d\d\b", cls.paper), "authors, venue and year"
    assert cls.travels
    assert cls.__doc__
    assert __import__(cls.__module__, fromlist=["x"]).__doc__
    for key, what in cls.hypers().items():
        assert what.meaning, f"{key} has no meaning"
        if what.choices:
            assert getattr(cls(), key) in what.choices
    assert set(cls.hypers()) == {f.name for f in dataclasses.fields(cls)}


def test_the_papers_letters_are_the_symbols():
    assert FPL.hypers()["tau"].symbol == "τ"
    assert FedProto.hypers()["weight"].symbol == "λ"
    assert [n for n, h in FPL.hypers().items() if h.weight] == ["cpcl", "upcr"]
    assert [n for n, h in FedProto.hypers().items() if h.weight] == ["weight"]


def test_a_field_without_hyper_is_still_a_hyper_parameter():
    @dataclass(frozen=True)
    class Bare(Method):
        name: ClassVar[str] = "bare"
        plain: float = 1.0

    assert Bare.hypers() == {"plain": Hyper("", "")}
    assert Bare.create({"plain": 2}).plain == 2.0


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
        ("1 / 0\n", "ZeroDivisionError"),
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
    before = make_config(tiny_task(), f"{mine}:Mine", **TINY).hash
    assert make_config(tiny_task(), f"{mine}:Mine", **TINY).hash == before
    mine.write_text(FILE + "# a remark\n")
    os.utime(mine, (1, 1))  # nothing may depend on the file's date
    after = make_config(tiny_task(), f"{mine}:Mine", **TINY).hash
    assert after != before
    mine.write_text(FILE)
    assert make_config(tiny_task(), f"{mine}:Mine", **TINY).hash == before


def test_the_config_of_a_file_method_survives_toml(mine, tmp_path):
    config = make_config(tiny_task(), f"{mine}:Mine", {"strength": 0.25}, **TINY)
    path = tmp_path / "config.toml"
    path.write_text(config.toml(), "utf-8")
    again = make_config(**{**read_config(path), "task": tiny_task()})
    assert again == config
    assert again.hash == config.hash


# ---- the lines between packages -----------------------------------------------------------------


def modules():
    return {p: ast.parse(p.read_text("utf-8")) for p in SOURCE.rglob("*.py")}


def imports(tree):
    """The absolute modules a file imports, wherever the statement stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names)


def test_nothing_asks_which_method_it_is():
    # "is it a Method at all, a name, a table of a file?" is no question about which one
    fine = {"Method", "Mapping", "str", "type"}
    for path in SOURCE.rglob("*.py"):
        for kind in re.findall(
            r"isinstance\(\s*(?:\w+\.)*method,\s*(.*?)\)", path.read_text("utf-8")
        ):
            assert kind in fine, f"{path} asks isinstance(method, {kind})"


def test_only_methods_know_the_methods():
    concrete = {m.__module__ for m in METHODS.values()} | {
        f"protofed.methods.{c.__name__}" for c in METHODS.values()
    }
    allowed = {"testing.py": {"protofed.methods.fedavg", "protofed.methods.fedavg.FedAvg"}}
    for path, tree in modules().items():
        inside = path.relative_to(SOURCE)
        if inside.parts[0] == "methods":
            continue
        found = {m for m in imports(tree) if m in concrete or m.rpartition(".")[0] in concrete}
        assert found <= allowed.get(str(inside), set()), f"{inside} imports {found}"


def test_methods_are_named_nowhere_else():
    allowed = {  # file: the names it may say, and why
        "cli.py": set(METHODS),  # examples in help texts
        "cli_study.py": {"fedavg"},  # the default reference of a sweep
        "study/spec.py": set(METHODS),  # the papers whose tables are rerun; the usual baseline
        "study/tables.py": {"fedavg"},  # the reference of the Δ column
        "config.py": {"fedavg", "fpl"},  # the default method; a hint
        "federation/run.py": {"fedavg"},  # the default method
        "protocols.py": set(METHODS),  # protocols called after a paper
        "data/distributions.py": set(METHODS),  # distributions called after a paper
    }
    for path, tree in modules().items():
        inside = str(path.relative_to(SOURCE))
        if inside.startswith("methods/"):
            continue
        strings = {
            n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value in METHODS
        }
        assert strings <= allowed.get(inside, set()), f"{inside} names {strings}"


@pytest.mark.parametrize("package", ["prototypes", "models"])
def test_the_lower_packages_know_nothing_of_federations(package):
    own = {f"protofed.{package}", "protofed.errors"}
    for path, tree in modules().items():
        if path.relative_to(SOURCE).parts[0] != package:
            continue
        for module in imports(tree):
            if module.startswith("protofed"):
                assert any(module == o or module.startswith(f"{o}.") for o in own), (
                    f"{path} imports {module}"
                )


def test_no_file_is_long():
    lengths = {p: len(p.read_text("utf-8").splitlines()) for p in SOURCE.rglob("*.py")}
    assert len(lengths) > 20  # the search found the package
    assert {p: n for p, n in lengths.items() if n > 500} == {}
