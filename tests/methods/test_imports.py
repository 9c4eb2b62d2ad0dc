"""The lines around methods: what they import, and who may know them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import protofed
from protofed.methods import METHODS

SOURCE = Path(protofed.__file__).parent
EXAMPLES = Path(__file__).parents[2] / "examples"


def imports(path):
    """The protofed modules that a file imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            names = [node.module]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "protofed")


@pytest.mark.parametrize(
    "path", [*sorted((SOURCE / "methods").glob("[!_]*.py")), *EXAMPLES.glob("*.py")], ids=str
)
def test_a_method_imports_the_contract_and_the_mathematics_alone(path):
    allowed = {f"protofed.{name}" for name in ("method", "prototypes", "styles", "augmix", "adain")}
    for module in imports(path):
        other_method = module.startswith("protofed.methods.") and path.parent.name == "methods"
        assert module in allowed or other_method, module


def test_only_methods_know_the_methods():
    concrete = {m.__module__ for m in METHODS.values()}
    for path in SOURCE.rglob("*.py"):
        inside = path.relative_to(SOURCE)
        if inside.parts[0] == "methods":
            continue
        allowed = {"protofed.methods.fedavg"} if inside.parts[0] == "testing" else set()
        assert concrete & set(imports(path)) <= allowed, inside


def test_the_system_names_no_method():
    packages = ("prototypes", "models", "method.py", "federation", "engines", "runs", "observers")
    for package in packages:
        path = SOURCE / package
        for file in [path] if path.is_file() else path.rglob("*.py"):
            tree = ast.parse(file.read_text("utf-8"))
            strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
            named = {s for s in strings if isinstance(s, str) and s in METHODS}
            assert not named, f"{file} names {named}"


def test_nothing_asks_which_method_it_is():
    # "is it a Method at all, one that was only read, a name, a table?" does not ask which one
    fine = {"Method", "RecordedMethod", "Mapping", "str", "type"}
    for path in SOURCE.rglob("*.py"):
        for kind in re.findall(
            r"isinstance\(\s*(?:\w+\.)*method,\s*(.*?)\)", path.read_text("utf-8")
        ):
            assert kind in fine, f"{path} asks isinstance(method, {kind})"


@pytest.mark.parametrize("first", ["protofed.analysis", "protofed.methods"])
def test_the_order_of_imports_does_not_matter(first):
    subprocess.run([sys.executable, "-c", f"import {first}, protofed; protofed.run"], check=True)
