"""What ``protofed deploy init`` writes, and sites with image folders of their own."""

from __future__ import annotations

import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from tests.deploy.flower_world import CLASSES, images
from typer.testing import CliRunner

from protofed.cli.app import app
from protofed.deploy import operator as deploy
from protofed.deploy import programs
from protofed.deploy.members import read_members
from protofed.deploy.site import folder_images, open_home
from protofed.deploy.spec import pack
from protofed.errors import ProtofedError
from protofed.runs.records import read_records
from protofed.runs.result import load_run


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_init_writes_what_each_machine_needs(tmp_path: Path) -> None:
    out = tmp_path / "pets"
    words = ["deploy", "init", str(out), "--sites", "a,b,c", "--classes", "cat,dog"]
    done = CliRunner().invoke(app, [*words, "--domains", "a=north,b=north"])
    assert done.exit_code == 0, done.output
    members = read_members(out / "server" / "federation.toml")
    assert [m.domain for m in members.sites.values()] == ["north", "north", "c"]
    assert members.clients() == {"north": 2, "c": 1}
    assert members.minimum == 2 and members.classes == ("cat", "dog")
    for secret in ("server/server.key", "ca/ca.key", "sites/a/node.key"):
        assert stat.S_IMODE((out / secret).stat().st_mode) == 0o600
    for site in "abc":
        home = out / "sites" / site
        assert (home / "federation.toml").read_text() == (
            out / "server" / "federation.toml"
        ).read_text()
        assert (home / "node.key.pub").read_text().split()[0] == "ecdsa-sha2-nistp384"
        assert not (home / "ca.key").exists()
        assert open_home(home).name == site
        assert "# public = " in (home / "site.toml").read_text()
        unit = (home / "protofed-site.service").read_text()
        assert f"protofed deploy site --dir /srv/protofed/site --site {site} --data" in unit
        assert "EnvironmentFile=/srv/protofed/site/protofed.env" in unit
    env = (out / "server" / "protofed.env").read_text()
    assert "FLWR_TELEMETRY_ENABLED=0" in env and "FLWR_DISABLE_UPDATE_CHECK=1" in env
    assert "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1" in env
    page = (out / "README.md").read_text()
    for site in "abc":
        assert f"protofed deploy site --dir sites/{site} --site {site} --data" in page
    assert "`--public /path/to/public`" in page and "Without `--public`" not in page
    again = CliRunner().invoke(app, words)
    assert isinstance(again.exception, ProtofedError) and "there already" in str(again.exception)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"sites": ["a", "a"]}, "different names"),
        ({"sites": ["../a"]}, "cannot be a site's name"),
        ({"sites": ["a b"]}, "cannot be a site's name"),
        ({"sites": ["scan-1"], "task": "glyphs"}, "numbered from 0"),
        ({"sites": ["scan"], "task": "glyphs"}, "no client of a task"),
        ({"sites": ["moon-0"], "task": "glyphs"}, "unknown domain"),
        ({"sites": ["a"], "address": "here"}, "not host:port"),
        ({"sites": ["a"], "minimum": 2}, "minimum"),
        ({"sites": ["a"], "domains": {"b": "x"}}, "unknown site"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    sites = more.pop("sites")
    with pytest.raises(ProtofedError, match=words):
        deploy.init(tmp_path / "new", sites, **more)


def test_a_federation_file_is_checked(tmp_path: Path) -> None:
    deploy.init(tmp_path / "f", ["a", "b"], classes=["x", "y"])
    path = tmp_path / "f" / "server" / "federation.toml"
    good = path.read_text()
    for old, new, words in (
        ("minimum = 2", "minimum = 9", "minimum"),
        ("round_seconds = 3600", "round_seconds = 0", "round_seconds"),
        ('["x", "y"]', '["x", "x"]', "not all different"),
        ("minimum", "minimun", "did you mean minimum"),
        ("ecdsa-sha2-nistp384 ", "rot13 ", "is no key"),
    ):
        path.write_text(good.replace(old, new))
        with pytest.raises(ProtofedError, match=words):
            read_members(path)


def test_a_run_without_classes_asks_for_them(tmp_path: Path) -> None:
    deploy.init(tmp_path / "f", ["a", "b"])
    members = read_members(tmp_path / "f" / "server" / "federation.toml")
    with pytest.raises(ProtofedError, match="names no classes"):
        deploy.run_config(members, None, "fpl", {}, {"rounds": 1})
    assert "names no classes yet" in (tmp_path / "f" / "README.md").read_text()


def test_what_only_a_simulator_can_do_is_refused(tmp_path: Path) -> None:
    deploy.init(tmp_path / "f", ["a", "b"], classes=["x", "y"])
    members = read_members(tmp_path / "f" / "server" / "federation.toml")
    config, _ = deploy.run_config(members, None, "fpl", {}, {"rounds": 1})
    file = tmp_path / "again.toml"
    file.write_text(config.toml())
    again, _ = deploy.run_config(members, file, None, {}, {})  # its own configuration is fine
    assert again.hash == config.hash
    file.write_text(config.toml().replace("rounds = 1", "rounds = 1\ndirichlet = 0.5"))
    for where, settings, words in (
        (None, {"samples": 0.5}, "samples is for the simulator"),
        (None, {"samples": {"a": 30}}, "samples is for the simulator"),
        (None, {"quantity": 1.0}, "quantity is for the simulator"),
        (file, {}, "dirichlet is for the simulator"),
    ):
        with pytest.raises(ProtofedError, match=words):
            deploy.run_config(members, where, "fpl", {}, settings)


def test_what_cannot_be_deployed_is_said_before_anything_starts(tmp_path: Path) -> None:
    deploy.init(tmp_path / "f", ["a", "b"], classes=["x", "y"])
    members = read_members(tmp_path / "f" / "server" / "federation.toml")
    with pytest.raises(ProtofedError, match="needs the same model at all clients"):
        deploy.run_config(members, None, "fedavg", {}, {"model": "cnn3,cnn2"})
    own = Path(__file__).parents[2] / "examples" / "cosine_proto.py"
    for method, words in ((f"{own}:CosineProto", "comes from a file"), ("fedmd", "public images")):
        config, task = deploy.run_config(members, None, method, {}, {"rounds": 1})
        with pytest.raises(ProtofedError, match=words):
            deploy.start(tmp_path / "f" / "server", config, task, False, False)
    assert not (tmp_path / "f" / "server" / "apps").exists()


def test_a_sites_folder_is_labeled_as_the_federation_has_its_classes(
    tmp_path: Path, own_cache: None
) -> None:
    deploy.init(tmp_path / "f", ["a", "b"], classes=list(CLASSES), image_size=16)
    home = tmp_path / "f" / "sites" / "a"
    data = images(tmp_path / "a", ("dog", "eel"), split=True)
    train, test = folder_images(open_home(home, str(data)), CLASSES, 16)
    assert sorted(set(train.y.tolist())) == [1, 2] and len(train) == 18 and len(test) == 6
    images(tmp_path / "a", ("cat",), split=True)
    with pytest.raises(ProtofedError, match="unknown class of the federation"):
        folder_images(open_home(home, str(data)), ("dog", "eel"), 16)
    with pytest.raises(ProtofedError, match="has no images"):
        folder_images(open_home(home), CLASSES, 16)
    with pytest.raises(ProtofedError, match="no folder"):
        folder_images(open_home(home, str(tmp_path / "nowhere")), CLASSES, 16)


def test_sites_with_own_folders_train_a_model(
    tmp_path: Path, own_cache: None, grid: Callable[..., Any], single_thread: None
) -> None:
    deploy.init(tmp_path / "f", ["a", "b"], classes=list(CLASSES), image_size=16)
    for site, classes in (("a", CLASSES), ("b", CLASSES[:2])):
        data = images(tmp_path / "data" / site, classes)
        file = tmp_path / "f" / "sites" / site / "site.toml"
        file.write_text(f'site = "{site}"\ndata = "{data}"\ndevice = "cpu"\n')
    members = read_members(tmp_path / "f" / "server" / "federation.toml")
    settings = {"rounds": 2, "epochs": 1, "batch": 4, "model": "cnn2", "width": 4}
    config, task = deploy.run_config(members, None, "fpl", {"tau": 0.05}, settings)
    assert config.hash != deploy.run_config(members, None, "fpl", {}, settings)[0].hash
    out = tmp_path / "f" / "server" / "runs" / config.label
    grid(members, tmp_path / "f" / "sites", pack(config, task), out).run()
    records = read_records(out / "rounds.jsonl")
    assert [r["clients"] for r in records] == [2, 2]
    assert set(records[1]["accuracy"]) == {"a", "b"}
    result = load_run(out)
    about = {"client": "b", "domain": "b", "model": "cnn2", "samples": 20}
    assert result.summary["clients"][1] == about
    assert result.summary["classes"] == list(CLASSES)


def test_where_the_server_cannot_listen_it_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ProtofedError, match="in use") as caught:
            programs.check_free("127.0.0.1", port)
        assert "another server" in str(caught.value)
    for host in ("192.0.2.1", "no-such-host.invalid"):  # neither is this machine
        with pytest.raises(ProtofedError, match=f"cannot listen on {host}:8000") as caught:
            programs.check_free(host, 8000)
        assert "--host 0.0.0.0" in str(caught.value)
    assert programs.join_address("::1", 8000) == "[::1]:8000"


@pytest.mark.parametrize("file", ["ca.crt", "node.key"])
def test_a_site_without_its_key_or_certificate_does_not_start(tmp_path: Path, file: str) -> None:
    deploy.init(tmp_path / "f", ["scan-0"], task="glyphs", minimum=1)
    (tmp_path / "f" / "sites" / "scan-0" / file).unlink()
    with pytest.raises(ProtofedError, match=f"there is no '.*{file}'"):
        programs.join(open_home(tmp_path / "f" / "sites" / "scan-0"))


def test_without_a_server_it_says_how_to_start_one(tmp_path: Path) -> None:
    deploy.init(tmp_path / "f", ["a"], classes=["x", "y"], address="127.0.0.1:9", minimum=1)
    with pytest.raises(ProtofedError, match="no server answers at 127") as caught:
        programs.flwr(tmp_path / "f" / "server", "ls", programs.CONNECTION, seconds=60)
    assert "protofed deploy server --dir" in str(caught.value)


def test_status_and_stop_say_what_the_server_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy.init(tmp_path / "f", ["a", "b", "c"], classes=["x", "y"])
    home = tmp_path / "f" / "server"
    known = [{"run-id": 7, "status": "running"}, {"run-id": 5, "status": "finished:stopped"}]
    nodes = [{"node-id": 11, "status": "online"}, {"node-id": 12, "status": "offline"}]
    asked: list[tuple[str, ...]] = []

    def flwr(folder: Path, *words: str) -> dict[str, Any]:
        asked.append(words)
        return {"runs": known, "nodes": nodes}

    monkeypatch.setattr(deploy, "flwr", flwr)
    (home / "flower").mkdir()
    (home / programs.NODES).write_text('{"a": "11", "b": "12"}')
    out = home / "runs" / "folder-f-fpl-0-0123456789"
    out.mkdir(parents=True)
    (out / "config.toml").touch()
    (out / "rounds.jsonl").write_text('{"round": 0, "accuracy": {"a": 50.0}, "average": 50.0}\n')
    out.with_name(f"{out.name}.log").write_text("first\nround 2: asked a\n")
    done = CliRunner().invoke(app, ["deploy", "status", "--dir", str(tmp_path / "f")])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "site a (domain a): connected",
        "site b (domain b): lost",
        "site c (domain c): not registered",
        "run 7: running",
        "run 5: finished:stopped",
        f"{out.name}: 1 rounds: a 50.0  average 50.0",
        "last in the log: round 2: asked a",
    ]
    members = read_members(home / "federation.toml")
    config, task = deploy.run_config(members, None, "fpl", {}, {"rounds": 1})
    with pytest.raises(ProtofedError, match=r"run 7 is running \(wait for it"):
        deploy.start(home, config, task, False, False)
    assert deploy.stop(home, None) == 7 and asked[-1][:2] == ("stop", "7")
    known.pop(0)
    with pytest.raises(ProtofedError, match="no run is running"):
        deploy.stop(home, None)


def test_flower_is_told_nothing_but_where_the_server_is(tmp_path: Path) -> None:
    programs.write_connection(tmp_path, "127.0.0.1:1")
    text = (tmp_path / "operator" / "config.toml").read_text()
    assert "127.0.0.1:1" in text and "flower.ai" not in text
    env = programs.environment(tmp_path / "home")
    assert env["FLWR_TELEMETRY_ENABLED"] == "0" and env["FLWR_HOME"] == str(tmp_path / "home")
