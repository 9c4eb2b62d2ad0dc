"""Runs that are not the federation's own, and replies made to do harm: nothing of it is let in."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Error, Message, RecordDict
from tests.deploy.flower_world import CLASSES, images
from tests.deploy.spoiled import set_values

from protofed import tree
from protofed.config import Config, make_config
from protofed.data import Task
from protofed.deploy import server_app
from protofed.deploy.coordinator import Coordinator
from protofed.deploy.members import read_members
from protofed.deploy.messages import Request, write
from protofed.deploy.site import answer, open_home
from protofed.deploy.spec import folder_skeleton, pack
from protofed.deploy.wire import Refused, add_tree
from protofed.errors import ProtofedError
from protofed.runs.records import read_records

BAD = "print-0"
SMALL: dict[str, Any] = {"model": "cnn2", "width": 4, "rounds": 1, "epochs": 1, "batch": 4}
OUTSIDE = "a/../../../../outside"


@pytest.fixture
def home(tmp_path: Path, world: Callable[..., Any]) -> Path:
    """A site with images of its own."""
    key = next(iter(world().members.sites.values())).key
    folder = tmp_path / "federation" / "site"
    data = images(tmp_path / "images", CLASSES)
    folder.mkdir(parents=True)
    (folder / "federation.toml").write_text(
        f'name = "own"\naddress = "127.0.0.1:1"\nminimum = 1\nclasses = {json.dumps(CLASSES)}\n'
        f'image_size = 16\n[sites.here]\ndomain = "here"\nkey = "{key}"\n'
    )
    (folder / "site.toml").write_text(
        f'site = "here"\ndevice = "cpu"\ndata = {json.dumps(str(data))}\n'
    )
    return folder


def made(home: Path, **more: Any) -> tuple[Config, str]:
    """A run's configuration and text as an operator makes them, or as somebody else does."""
    members = read_members(home / "federation.toml")
    task: Task = replace(members.skeleton(), **more)
    config = make_config(task, "fedavg", **SMALL, device="cpu", engine="loop")
    return config, pack(config, task)


def last_message(home: Path, config: Config, spec: str) -> RecordDict:
    """The message that closes a run: the site keeps the model under the run's name."""
    folder = read_members(home / "federation.toml")
    coordinator = Coordinator(None, folder, config, folder.skeleton(), home)  # type: ignore[arg-type]
    asked = Request("here", config.hash, 1, train=False, evaluate=True, accepted="", kept="")
    content = add_tree(write(asked), coordinator.server.broadcast())
    return answer(open_home(home), spec, content)


def test_the_federations_own_run_leaves_its_model(home: Path, tmp_path: Path) -> None:
    config, spec = made(home)
    last_message(home, config, spec)
    assert (home / "models" / f"{config.label}.safetensors").is_file()


@pytest.mark.parametrize("name", [OUTSIDE, f"{OUTSIDE}:x", "glyphs", "folder:/etc", "folder:other"])
def test_a_run_about_something_else_is_refused_by_a_site(
    home: Path, tmp_path: Path, name: str
) -> None:
    """Its name would be part of a path: a file could be written anywhere."""
    config, spec = made(home, name=name)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(Refused, match=r"the run is about .*this federation about 'folder:own'"):
        last_message(home, config, spec)
    assert set(tmp_path.rglob("*")) == before


def test_what_a_federation_agreed_on_is_not_the_servers_to_change(home: Path) -> None:
    members = read_members(home / "federation.toml")
    larger = folder_skeleton("own", CLASSES, 1024, members.clients())
    assert "1024 pixels, in federation.toml 16" in members.foreign(larger)
    fewer = folder_skeleton("own", CLASSES[:2], 16, members.clients())
    assert "classes are not those of federation.toml" in members.foreign(fewer)
    assert members.foreign(members.skeleton()) == ""


def test_sites_of_a_task_read_no_other_folder(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(rounds=1)
    parts = json.loads(w.spec)
    parts["task"]["name"] = "folder:/etc"
    parts["hash"] = replace(w.config, task="folder:/etc").hash
    home = open_home(w.folder / "homes" / BAD)
    asked = Request(BAD, parts["hash"], 0, train=True, evaluate=False, accepted="", kept="")
    monkeypatch.setattr("protofed.deploy.site.load_task", lambda *a, **b: pytest.fail("it looked"))
    with pytest.raises(Refused, match="the run is about 'folder:/etc', this federation about 'gl"):
        answer(home, json.dumps(parts), write(asked))


def test_the_server_writes_no_run_of_another_name(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, spec = made(home, name=OUTSIDE)
    monkeypatch.setenv(server_app.VARIABLE, str(home))
    context = Context(1, 1, {}, RecordDict(), {"spec": spec, "overwrite": True})
    before = set(tmp_path.rglob("*"))
    with pytest.raises(ProtofedError, match="the run is about"):
        server_app.main(None, context)  # type: ignore[arg-type]
    assert set(tmp_path.rglob("*")) == before


SENT: dict[str, Callable[[RecordDict], None]] = {
    "no steps": lambda c: set_values(c, steps=0),
    "a long name of a loss": lambda c: set_values(
        c, loss_terms=["x" * 10**6], loss_totals=[1.0], loss_steps=[1]
    ),
    "many losses": lambda c: set_values(
        c, loss_terms=[f"t{i}" for i in range(900)], loss_totals=[1.0] * 900, loss_steps=[1] * 900
    ),
    "a long name of a site": lambda c: set_values(c, site="y" * 10**6),
    "a long key": lambda c: set_values(c, **{"z" * 10**6: 1}),
    "a second line": lambda c: set_values(c, site="s\n2025-01-01 INFO the run is complete\x1b[2J"),
}


@pytest.mark.parametrize("kind", SENT)
def test_a_report_made_to_do_harm_is_refused_in_a_line(
    world: Callable[..., Any], caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Without steps FedNova's server would divide by zero, and the run end for all."""
    w = world("fednova", rounds=1)

    def change(name: str, reply: Message) -> Message:
        if name == BAD and len(w.grid.seen) <= 3:
            SENT[kind](reply.content)
        return reply

    w.grid.spoil = change
    with caplog.at_level(logging.WARNING, "protofed.deploy"):
        w.coordinator().run()
    (record,) = read_records(w.out / "rounds.jsonl")
    assert record["clients"] == 2
    assert record["problems"][BAD].startswith("refused: ")
    assert len((w.out / "rounds.jsonl").read_bytes()) < 5000
    assert all(m.isprintable() and len(m) < 1000 for m in caplog.messages), caplog.messages


def test_a_sites_error_is_one_line(
    world: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    w = world(rounds=1)

    def change(name: str, reply: Message) -> Message:
        if name == BAD and len(w.grid.seen) <= 3:
            reply.__dict__["_content"] = None
            reply.__dict__["_error"] = Error(7, "oh\n2025-01-01 INFO fine " + "x" * 10**5)
        return reply

    w.grid.spoil = change
    w.coordinator().run()
    problem = read_records(w.out / "rounds.jsonl")[0]["problems"][BAD]
    assert problem.startswith("error 7: oh 2025") and len(problem) == 500


def test_prototypes_of_an_attempt_that_failed_are_not_kept(world: Callable[..., Any]) -> None:
    """Who replied only then did not take part in the round."""
    w = world(rounds=1, minimum=2, keep_rounds="all")
    gone = {"photo-0", BAD}

    def change(name: str, reply: Message) -> Message:
        first = len(w.grid.seen) <= 3
        if name in gone if first else name == "scan-0" and len(w.grid.seen) <= 6:
            set_values(reply.content, round=9)
        return reply

    w.grid.spoil = change
    w.coordinator().run()
    assert read_records(w.out / "rounds.jsonl")[0]["clients"] == 2
    about = tree.load(w.out / "prototypes" / "1.safetensors")[1]
    assert [c["client"] for c in about["clients"]] == [BAD, "photo-0"]


def test_two_servers_do_not_write_one_run(world: Callable[..., Any]) -> None:
    w = world(rounds=2)
    told: list[str] = []

    def change(name: str, reply: Message) -> Message:
        if not told:
            with pytest.raises(ProtofedError) as error:
                w.coordinator().run(resume=True)
            told.append(str(error.value))
        return reply

    w.grid.spoil = change
    w.coordinator().run()
    assert "another process has a run under way" in told[0]
    assert len(read_records(w.out / "rounds.jsonl")) == 2
