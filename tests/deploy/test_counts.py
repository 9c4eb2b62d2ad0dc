"""Sites declare their images once; the operator confirms them; a run holds them to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Message
from tests.deploy.flower_world import images, make_members, write_homes, write_site
from tests.deploy.spoiled import set_values
from tests.some_methods import options_of
from typer.testing import CliRunner

from protofed.cli.app import app
from protofed.config import make_config
from protofed.deploy.counts import Count, Counts, expected_work
from protofed.deploy.spec import make_spec, pack, unpack
from protofed.errors import ProtofedError
from protofed.federation.simulation import Federation
from protofed.methods import METHODS
from protofed.runs.records import read_records
from protofed.testing.checks import TINY, tiny_task

BAD = "print-0"


def test_declared_and_confirmed(tmp_path: Path) -> None:
    counts = Counts(tmp_path, {"scan-0": Count(30, 9)}, most=1000)
    assert counts.confirmed("scan-0") == Count(30, 9) and counts.confirmed("north") is None
    with pytest.raises(ProtofedError, match=r"declared its images: 'north' \(there is none\)"):
        counts.confirm(["north"])
    assert not counts.declare("north", Count(120, 30)) and counts.confirmed("north") is None
    again = Counts(tmp_path, {}, most=1000)  # the operator's command
    with pytest.raises(ProtofedError, match="unknown site that has declared its images: 'noth'"):
        again.confirm(["noth"])
    assert again.confirm(()) == {"north": Count(120, 30)} and again.confirm(()) == {}
    assert counts.confirmed("north") == Count(120, 30)
    assert counts.declare("north", Count(120, 30))
    assert not counts.declare("north", Count(10**9, 30))  # has to be confirmed anew
    assert counts.confirmed("north") is None


def test_a_declaration_and_a_confirmation_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would otherwise write back the file as it was before the other."""
    counts, operator = (Counts(tmp_path, {}, most=1000) for _ in range(2))
    counts.declare("north", Count(120, 30))
    declared = threading.Thread(target=counts.declare, args=("south", Count(50, 10)))
    write = operator._write

    def slow(said: Any) -> None:
        declared.start()
        declared.join(0.5)  # it waits
        write(said)

    monkeypatch.setattr(operator, "_write", slow)
    assert operator.confirm(["north"]) == {"north": Count(120, 30)}
    declared.join()
    assert counts.confirmed("north") == Count(120, 30)
    assert Counts(tmp_path, {}, most=1000).confirm(["south"]) == {"south": Count(50, 10)}


def test_a_cap_on_what_can_be_declared() -> None:
    counts = Counts(None, {}, most=1000)
    assert not counts.check(Count(1000, 1))
    for bad in (Count(1001, 1), Count(0, 1), Count(5, 0), Count(5, 1001)):
        assert "max_samples is 1000" in counts.check(bad)
    assert counts.declare("north", Count(5, 1))  # without an operator


@pytest.mark.parametrize("method", METHODS)
def test_the_work_follows_from_the_images(method: str, single_thread: None) -> None:
    """Samples, steps and learning rate that a client reports, from its images alone."""
    task = tiny_task(samples=21, clients=1, spare=9)
    options = options_of(method) | ({"images": 10} if METHODS[method]().public_images else {})
    given = {**TINY, "batch": 4, "rounds": 3, "schedule": "cosine"}
    fed = Federation(make_config(task, method, options, **given), task)
    public = sum(fed.setup.public.counts.values()) if fed.setup.public else 0
    fed.run_round()
    names = fed.server.sample()
    replies = fed.engine.train(
        [fed.clients[n] for n in names], fed.server.broadcast(), fed.store.get, 1
    )
    for _, reply in replies:
        work = (reply.samples, reply.steps, reply.lr)
        assert work == expected_work(fed.setup, 21, public, 1)
        assert reply.lr < TINY["lr"]


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "a billion samples": ({"samples": 10**9}, "the reply has 1000000000 samples"),
    "a few more samples": ({"samples": 25}, "24 training and"),
    "more steps": ({"steps": 10**6}, "1000000 steps"),
    "another learning rate": ({"lr": 1e6}, "lr 1000000.0"),
    "more test images": ({"right": 10**6, "tested": 10**6}, "is about 1000000 test images"),
    "fewer test images": ({"right": 1, "tested": 1}, "is about 1 test images"),
}


def test_a_site_cannot_claim_more_than_it_declared(world: Callable[..., Any]) -> None:
    """A site that claimed 1e9 samples used to own the model."""
    w = world("fednova", rounds=len(LIES) + 1)
    lies = [{}, *(values for values, _ in LIES.values())]

    def change(name: str, reply: Message) -> Message:
        round = (len(w.grid.seen) - 1) // 3
        if name == BAD and round < len(lies):
            set_values(reply.content, **lies[round])
        return reply

    w.grid.spoil = change
    w.coordinator().run()
    first, *others = read_records(w.out / "rounds.jsonl")
    assert "problems" not in first
    for (kind, (_, words)), record in zip(LIES.items(), others, strict=True):
        assert words in record["problems"][BAD] and record["clients"] == 2, kind


def test_accuracy_is_shown_by_site_and_its_count(world: Callable[..., Any]) -> None:
    """A site may lie about its own images; nobody else's number moves."""
    w = world("fedavg", rounds=1)
    w.grid.spoil = lambda name, reply: reply
    w.coordinator().run()
    (honest,) = read_records(w.out / "rounds.jsonl")
    v = world("fedavg", rounds=1)

    def perfect(name: str, reply: Message) -> Message:
        if name == BAD and len(v.grid.seen) > 3:
            set_values(reply.content, right=v.run.counts[BAD].tests)
        return reply

    v.grid.spoil = perfect
    v.coordinator().run()
    (lied,) = read_records(v.out / "rounds.jsonl")
    for record in (honest, lied):
        tests = {name: own["tested"] for name, own in record["by_client"].items()}
        assert tests == {name: w.run.counts[name].tests for name in w.members.sites}
    assert lied["by_client"].pop(BAD)["accuracy"] == 100
    assert honest["by_client"].pop(BAD)["accuracy"] < 100
    assert lied["by_client"] == honest["by_client"]
    assert lied["accuracy"].pop("print") == 100 and honest["accuracy"].pop("print") < 100
    assert lied["accuracy"] == honest["accuracy"]


@pytest.fixture
def folders(
    tmp_path: Path, grid: Callable[..., Any], single_thread: None, own_cache: None
) -> Callable[..., Any]:
    """A coordinator of two sites with folders of their own, with the operator's counts."""

    def make(**more: Any) -> Any:
        sites = ("north-0", "south-0")
        members, _ = make_members(
            sites, task=None, classes=("cat", "dog"), image_size=16, minimum=2, **more
        )
        homes = tmp_path / "homes"
        if not homes.exists():
            write_homes(members, homes)
        about = (homes / sites[0] / "federation.toml").read_text()
        about = about.replace('task = "glyphs"', 'classes = ["cat", "dog"]\nimage_size = 16')
        for site in sites:
            (homes / site / "federation.toml").write_text(about)
            write_site(homes / site, images(tmp_path / "data" / site, ("cat", "dog")))
        task = members.skeleton()
        config = make_config(
            task, "fpl", rounds=2, epochs=1, batch=4, model="cnn2", width=2, device="cpu"
        )
        spec = make_spec(config, task)
        assert unpack(pack(spec)).counts == {}
        made = grid(members, homes, pack(spec), tmp_path / "run")
        made.counts = Counts(tmp_path, spec.counts, members.max_samples)
        return made

    return make


def test_a_run_waits_for_the_operator(
    folders: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = folders()

    def operate() -> None:
        while not (tmp_path / "counts.json").is_file():
            time.sleep(0.01)
        time.sleep(0.1)
        Counts(tmp_path, {}, 1000).confirm(())

    thread = threading.Thread(target=operate)
    thread.start()
    coordinator.run()
    thread.join()
    for site in ("north-0", "south-0"):
        assert f"site {site} declares " in caplog.text
        assert f"protofed deploy confirm {site}" in caplog.text
    assert [r["clients"] for r in read_records(tmp_path / "run" / "rounds.jsonl")] == [2, 2]


def test_without_a_confirmation_nothing_is_trained(folders: Callable[..., Any]) -> None:
    with pytest.raises(ProtofedError, match="0 sites are connected"):
        folders(wait_seconds=0.2, gather_seconds=0.1).run()


def test_a_declaration_above_the_cap_is_not_admitted(
    folders: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = folders(wait_seconds=0.2, gather_seconds=0.1, max_samples=3)
    with pytest.raises(ProtofedError, match="0 sites are connected"):
        coordinator.run()
    assert "site north-0 is not admitted: it declares" in caplog.text


def test_a_site_whose_images_have_changed_declares_them_again(
    folders: Callable[..., Any], tmp_path: Path
) -> None:
    coordinator = folders()
    stale, south = Count(19, 4), Count(20, 4)
    for site, count in (("north-0", stale), ("south-0", south)):
        coordinator.counts.declare(site, count)
    coordinator.counts.confirm(())
    with pytest.raises(ProtofedError, match=r"north-0: refused: .*deploy confirm --again SITE"):
        coordinator.run()

    (tmp_path / "server.crt").touch()
    (tmp_path / "federation.toml").write_bytes(
        (tmp_path / "homes" / "north-0" / "federation.toml").read_bytes()
    )
    command = ["deploy", "confirm", "--dir", str(tmp_path), "--again"]
    assert CliRunner().invoke(app, command).exit_code != 0  # whose?
    assert CliRunner().invoke(app, [*command, "nobody"]).exit_code != 0
    assert CliRunner().invoke(app, [*command, "north-0"]).exit_code == 0
    counts = Counts(tmp_path, {}, 1000)
    assert counts.confirmed("north-0") is None and counts.confirmed("south-0") == south
    assert not counts.declare("north-0", south) and counts.confirm(()) == {"north-0": south}
    assert counts.confirmed("north-0") == south
