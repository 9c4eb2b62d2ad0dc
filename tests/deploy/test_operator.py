"""The operator's commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from typer.testing import CliRunner

from protofed.cli.app import app
from protofed.data.augment import AUGMENTS
from protofed.deploy import operator as deploy
from protofed.deploy import programs
from protofed.deploy.members import Members, read_members
from protofed.deploy.run_log import log_path
from protofed.deploy.setup import init
from protofed.deploy.spec import pack, unpack
from protofed.errors import ProtofedError


@pytest.fixture
def members(tmp_path: Path) -> Members:
    """A federation in ``f`` of two sites and two classes."""
    init(tmp_path / "f", ["a", "b"], classes=["x", "y"])
    return read_members(tmp_path / "f" / "server")


def test_a_run_without_classes_asks_for_them(tmp_path: Path) -> None:
    init(tmp_path / "f", ["a", "b"])
    members = read_members(tmp_path / "f" / "server")
    with pytest.raises(ProtofedError, match="names no classes"):
        deploy.plan_run(members, None, "fpl", {}, {"rounds": 1})
    assert "names no classes yet" in (tmp_path / "f" / "README.md").read_text()


def test_resume_says_that_there_is_no_such_run(
    tmp_path: Path, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more rounds, for example, it is another run: sites would train from the beginning."""
    monkeypatch.setattr(deploy, "runs", lambda folder: [])
    monkeypatch.setattr(deploy, "flwr", lambda *_: {"run-id": 1})
    home = tmp_path / "f" / "server"
    asked = ["deploy", "start", "--dir", str(home), "--resume", "--rounds", "3"]
    said = CliRunner().invoke(app, asked).output
    assert "no run to resume" in said and "starts from the beginning" in said
    folder = deploy.run_folder(home, deploy.plan_run(members, None, None, {}, {"rounds": 3}))
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    assert "no run to resume" not in CliRunner().invoke(app, asked).output


def test_what_only_a_simulator_can_do_is_refused(tmp_path: Path, members: Members) -> None:
    spec = deploy.plan_run(members, None, "fpl", {}, {"rounds": 1})
    toml, file = spec.config.toml(), tmp_path / "again.toml"
    file.write_text(toml)
    assert deploy.plan_run(members, file, None, {}, {}).hash == spec.hash  # its own is fine
    file.write_text(toml.replace("rounds = 1", "rounds = 1\ndirichlet = 0.5"))
    for where, settings, words in (
        (None, {"samples": 0.5}, "samples works only in the simulator"),
        (None, {"samples": {"a": 30}}, "samples works only in the simulator"),
        (None, {"quantity": 1.0}, "quantity works only in the simulator"),
        (file, {}, "dirichlet works only in the simulator"),
        (None, {"validate": 0.1}, "validate works only in the simulator: sites report"),
    ):
        with pytest.raises(ProtofedError, match=words):
            deploy.plan_run(members, where, "fpl", {}, settings)


def test_a_config_file_sets_what_the_options_do(tmp_path: Path, members: Members) -> None:
    file = tmp_path / "own.toml"
    file.write_text('method = "fpl"\naugment = "large"\nflip = false\nimage_size = 32\n')
    spec = deploy.plan_run(members, file, None, {}, {})
    assert spec.task.augment == AUGMENTS["large"](False)
    settings = {"augment": "large", "flip": False}
    assert spec.hash == deploy.plan_run(members, None, "fpl", {}, settings).hash
    assert unpack(pack(spec)).task.augment == spec.task.augment
    file.write_text("image_size = 64\n")
    with pytest.raises(ProtofedError, match="image_size is 64, but the sites agreed on 32"):
        deploy.plan_run(members, file, "fpl", {}, {})


def test_what_cannot_be_deployed_fails_before_anything_starts(
    tmp_path: Path, members: Members
) -> None:
    with pytest.raises(ProtofedError, match="needs the same model at all clients"):
        deploy.plan_run(members, None, "fedavg", {}, {"model": "cnn3,cnn2"})
    own = Path(__file__).parents[2] / "examples" / "cosine_proto.py"
    for method, words in ((f"{own}:CosineProto", "comes from a file"), ("fedmd", "public images")):
        with pytest.raises(ProtofedError, match=words):
            deploy.plan_run(members, None, method, {}, {"rounds": 1})
    large = {"model": "resnet18_imagenet", "weights": str(own)}
    with pytest.raises(ProtofedError, match=r"fedbn keeps entries of the backbone at the sites"):
        deploy.plan_run(members, None, "fedbn", {}, large)
    (tmp_path / "net.py").write_text("def f(size): ...")
    with pytest.raises(ProtofedError, match=r"net.py:f comes from a file"):
        deploy.plan_run(members, None, "fedavg", {}, {"model": f"{tmp_path / 'net.py'}:f"})


def test_status_and_stop_say_what_the_server_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(tmp_path / "f", ["a", "b", "c"], classes=["x", "y"])
    home = tmp_path / "f" / "server"
    known = [{"run-id": 7, "status": "running"}, {"run-id": 5, "status": "finished:stopped"}]
    nodes = [{"node-id": 11, "status": "online"}, {"node-id": 12, "status": "offline"}]
    asked: list[tuple[str, ...]] = []

    def flwr(folder: Path, *words: str) -> dict[str, Any]:
        asked.append(words)
        return {"runs": known, "nodes": nodes}

    monkeypatch.setattr(deploy, "flwr", flwr)
    (home / "flower").mkdir()
    (home / programs.NODES_FILE).write_text('{"a": "11", "b": "12"}')
    out = home / "runs" / "folder-f-fpl-0-0123456789"
    out.mkdir(parents=True)
    (out / "config.toml").touch()
    (out / "rounds.jsonl").write_text('{"round": 0, "accuracy": {"a": 50.0}, "average": 50.0}\n')
    out.with_name(f"{out.name}.log").write_text("first\nround 2: sent to a\n")
    done = CliRunner().invoke(app, ["deploy", "status", "--dir", str(tmp_path / "f")])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "site a (domain a): connected",
        "site b (domain b): lost",
        "site c (domain c): not registered",
        "run 7: running",
        "run 5: finished:stopped",
        f"{out.name}: 1 rounds: a 50.0  average 50.0",
        "last in the log: round 2: sent to a",
    ]
    members = read_members(home)
    spec = deploy.plan_run(members, None, "fpl", {}, {"rounds": 1})
    with pytest.raises(ProtofedError, match=r"run 7 is running \(wait for it"):
        deploy.start(home, spec, False, False)
    assert deploy.stop(home, None) == 7 and asked[-1][:2] == ("stop", "7")
    known.pop(0)
    with pytest.raises(ProtofedError, match="no run is running"):
        deploy.stop(home, None)


def test_lines_that_are_logged_before_a_start_returns_are_shown(
    tmp_path: Path, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower takes seconds to say that a run is started; on a busy machine it is over by then."""
    home = tmp_path / "f" / "server"
    spec = deploy.plan_run(members, None, "fpl", {}, {"rounds": 1})
    log = log_path(deploy.run_folder(home, spec))
    log.parent.mkdir(parents=True)
    log.write_text("an earlier attempt\n")

    def start(*args: Any, **more: Any) -> int:
        with log.open("a") as file:
            file.write("waiting for sites\nthe run ended\n")
        return 7

    monkeypatch.setattr(deploy, "start", start)
    monkeypatch.setattr(deploy, "runs", lambda _: [{"run-id": 7, "status": "finished:failed"}])
    words = ["deploy", "start", "--dir", str(home), "--method", "fpl", "--rounds", "1", "--wait"]
    said = CliRunner().invoke(app, words).output
    assert "waiting for sites" in said and "an earlier attempt" not in said
