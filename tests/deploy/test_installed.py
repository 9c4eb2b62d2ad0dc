"""A method of one's own across sites: installed and pinned on each machine, never sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from tests.deploy.flower_world import CLASSES, images, write_site
from typer.testing import CliRunner

from protofed.cli.app import app
from protofed.deploy.members import read_members
from protofed.deploy.messages import Request, write
from protofed.deploy.operator import plan_run, run_folder
from protofed.deploy.setup import init
from protofed.deploy.site import answer, read_site_config
from protofed.deploy.spec import RunSpec, pack, unpack
from protofed.errors import ProtofedError
from protofed.runs.records import read_records

DAMPED = '''
from dataclasses import dataclass
from protofed.method import Method, hyper

@dataclass(frozen=True)
class Damped(Method):
    """Half a step."""
    name = "damped"
    share: float = hyper(0.5, "s", "share of the step", least=0)

    def aggregate(self, server, mean, updates):
        old = server.state["model"]
        return {"model": {n: t if not t.is_floating_point() else t * self.share
                          + old[n] * (1 - self.share) for n, t in mean.items()}}
'''
SMALL: dict[str, Any] = {"rounds": 1, "epochs": 1, "batch": 4, "model": "cnn2", "width": 4}


def install(folder: Path, named: str, *more: str) -> str:
    done = CliRunner().invoke(app, ["deploy", "method", named, "--dir", str(folder), *more])
    if done.exception is not None:
        raise done.exception
    return done.output


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, single_thread: None) -> Path:
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "cache"))
    home = tmp_path / "f"
    limits = {"gather_seconds": 1.0, "wait_seconds": 1.0}
    init(home, ["a", "b", "c"], classes=list(CLASSES), image_size=16, **limits)
    for site in "abc":
        write_site(home / "sites" / site, images(tmp_path / "data" / site, CLASSES, n=5))
    (tmp_path / "damped.py").write_text(DAMPED)
    return home


def plan(home: Path, method: str = "damped", **options: Any) -> RunSpec:
    return plan_run(read_members(home / "server"), None, method, options, SMALL)


def test_server_and_sites_run_what_each_has_installed(
    federation: Path, tmp_path: Path, grid: Callable[..., Any]
) -> None:
    home, named = federation, f"{tmp_path / 'damped.py'}:Damped"
    for where in ((home,), (home, "--site", "a"), (home / "sites" / "b",)):
        assert "method damped is installed, SHA-256 " in install(where[0], named, *where[1:])
    spec = plan(home, share=0.25)
    assert str(tmp_path) not in pack(spec) and "aggregate" not in pack(spec)
    members, text = read_members(home / "server"), pack(spec)
    assert unpack(text, members.methods).hash == spec.hash
    out = run_folder(home / "server", spec)
    coordinator = grid(members, home / "sites", text, out)
    assert coordinator.config.method.options() == {"share": 0.25}
    coordinator.run()
    (record,) = read_records(out / "rounds.jsonl")
    assert record["clients"] == 2
    assert "method = 'damped' is not installed here" in record["problems"]["c"]


def test_another_file_is_neither_run_nor_sent_for(
    federation: Path, tmp_path: Path, grid: Callable[..., Any]
) -> None:
    home, named = federation, f"{tmp_path / 'damped.py'}:Damped"
    for where in ("server", "sites/a", "sites/b"):
        install(home / where, named)
    (tmp_path / "damped.py").write_text(DAMPED.replace("Half", "A third of"))
    install(home / "sites" / "c", named)
    (spoiled,) = (home / "sites" / "b" / "methods").glob("*/damped.py")
    spoiled.write_text(DAMPED + f"\nopen({str(tmp_path / 'pwned')!r}, 'w')\n")
    spec = plan(home)
    out = run_folder(home / "server", spec)
    members = read_members(home / "server")
    with pytest.raises(ProtofedError, match="and a round needs 2") as error:
        grid(members, home / "sites", pack(spec), out).run()
    assert "b: error 100: the file of method 'damped' is not the one that was pinned" in str(
        error.value
    )
    assert "c: error 100: method = 'damped' has the SHA-256 " in str(error.value)
    assert not (tmp_path / "pwned").exists()
    (own,) = (home / "server" / "methods").glob("*/damped.py")
    own.unlink()
    with pytest.raises(ProtofedError, match=r"not the one that was pinned here \(missing, not "):
        plan(home)


def test_a_spec_names_no_file(federation: Path, tmp_path: Path) -> None:
    """A hostile server cannot make a site execute a file that lies there."""
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')")
    parts = json.loads(pack(plan(federation, "fedavg")))
    for method in (
        {"name": f"{evil}:Evil", "options": {}},
        {"name": f"{evil}:Evil", "options": {}, "sha256": "0" * 64},
        {"name": "fedavg", "options": {}, "sha256": "0" * 64},
    ):
        with pytest.raises(ProtofedError, match="is not installed here"):
            unpack(json.dumps({**parts, "method": method}))
    spec = plan(federation, "fedavg")
    spec = replace(spec, config=replace(spec.config, model=f"{evil}:make", width=None))
    parts = json.loads(pack(spec))
    parts["settings"]["model"] = spec.config.model  # with its path, as no honest server sends it
    request = Request("a", spec.hash, 0, train=True, evaluate=False, accepted="")
    with pytest.raises(ProtofedError, match="this needs the code of model"):
        answer(read_site_config(federation / "sites" / "a"), json.dumps(parts), write(request))
    assert not (tmp_path / "pwned").exists()


def test_what_cannot_be_installed_or_started(federation: Path, tmp_path: Path) -> None:
    home, named = federation, f"{tmp_path / 'damped.py'}:Damped"
    with pytest.raises(ProtofedError, match="comes from a file that the sites do not have"):
        plan(home, named)
    for wrong, words in (
        ("fpl", "is not path/to/file.py:Class"),
        (f"{tmp_path / 'none.py'}:X", "there is no file"),
        (f"{tmp_path / 'damped.py'}:Other", "unknown method"),
    ):
        with pytest.raises(ProtofedError, match=words):
            install(home, wrong)
    install(home, named)
    toml = home / "server" / "federation.toml"
    good = toml.read_text()
    for old, new, words in (
        ("damped.py", "../damped.py", "needs a file's name"),
        ('[methods."damped"]', "[methods.fpl]", "'fpl' is a built-in method"),
        ('class = "Damped"', "", "is incomplete: 'class'"),
    ):
        assert old in good
        toml.write_text(good.replace(old, new))
        with pytest.raises(ProtofedError, match=words):
            read_members(home / "server")
