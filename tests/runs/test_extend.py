"""A run that is extended by more rounds equals one that was asked for all of them at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runs.diary import QUICK, TASK, At, Diary, ctrl_c, numbers, same, states

from protofed import tree
from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.federation.facts import discover
from protofed.method import Batch, Client, Method, Terms
from protofed.methods import METHODS, FedAvg, FedProc
from protofed.runs.folder import RunFolder
from protofed.runs.pool import shorter_run
from protofed.runs.result import load_run
from protofed.runs.run import run

pytestmark = pytest.mark.usefixtures("single_thread")


def settings(rounds: int, **more: Any) -> dict[str, Any]:
    return {**QUICK, "rounds": rounds, "participation": 0.75, **more}


@pytest.mark.parametrize("stopped", [False, True])
def test_an_extended_run_equals_a_fresh_one(tmp_path: Path, stopped: bool) -> None:
    whole, out = run(TASK, Diary(), **settings(5), out=tmp_path / "whole"), tmp_path / "run"
    if stopped:
        with pytest.raises(KeyboardInterrupt):
            run(TASK, Diary(), **settings(3), out=out, observers=[At(2, 1, ctrl_c)])
    else:
        run(TASK, Diary(), **settings(3), out=out)
    longer = run(TASK, Diary(), **settings(5), out=out, resume=True)
    assert same(whole, longer)
    assert numbers(out) == numbers(tmp_path / "whole")
    mine, theirs = states(whole.folder), states(out)
    assert mine.keys() == theirs.keys() and all(tree.equal(mine[n], theirs[n]) for n in mine)
    for name in ("model.safetensors", "config.toml", "clients.json"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    found, expected = load_run(out), load_run(tmp_path / "whole")
    when = {"seconds": 0, "finished": 0}
    assert {**found.summary, **when} == {**expected.summary, **when}
    assert RunFolder(out).facts() == RunFolder(tmp_path / "whole").facts()
    assert not RunFolder(out).damage()


def test_an_extension_that_is_interrupted(tmp_path: Path) -> None:
    whole, out = run(TASK, Diary(), **settings(5)), tmp_path / "run"
    run(TASK, Diary(), **settings(2), out=out)
    for at in (2, 3):  # before and after its first checkpoint
        with pytest.raises(KeyboardInterrupt):
            run(TASK, Diary(), **settings(5), out=out, resume=True, observers=[At(at, 1, ctrl_c)])
        assert not RunFolder(out).is_finished() and not RunFolder(out).has_model
    assert same(whole, run(TASK, Diary(), **settings(5), out=out, resume=True))


class Fading(FedAvg):
    name = "fading"

    def loss(self, client: Client, batch: Batch) -> Terms:
        weigh = lambda t: t * (1 - client.progress)  # noqa: E731
        return {name: weigh(t) for name, t in super().loss(client, batch).items()}


@pytest.mark.parametrize("method", [FedProc(), Fading()], ids=lambda m: m.name)
def test_a_method_that_depends_on_the_number_of_rounds_is_refused(
    tmp_path: Path, method: Method, digests: Callable[[Path], dict[str, str]]
) -> None:
    run(TASK, method, **settings(2), out=tmp_path)
    before = digests(tmp_path)
    with pytest.raises(
        ProtofedError, match=r"rounds 2 → 3: every round of \w+ depends on the total number"
    ):
        run(TASK, method, **settings(3), out=tmp_path, resume=True)
    assert digests(tmp_path) == before


def test_a_schedule_that_depends_on_the_number_of_rounds_is_refused(tmp_path: Path) -> None:
    run(TASK, FedAvg(), **settings(2, schedule="cosine"), out=tmp_path)
    with pytest.raises(
        ProtofedError, match="every round of a cosine schedule depends on the total number"
    ):
        run(TASK, FedAvg(), **settings(3, schedule="cosine"), out=tmp_path, resume=True)


def test_a_schedule_that_does_not_is_extended(tmp_path: Path) -> None:
    steps = {"schedule": "step", "step_every": 2, "warmup_rounds": 1}
    run(TASK, FedAvg(), **settings(2, **steps), out=tmp_path / "a")
    longer = run(TASK, FedAvg(), **settings(4, **steps), out=tmp_path / "a", resume=True)
    whole = run(TASK, FedAvg(), **settings(4, **steps), out=tmp_path / "b")
    assert tree.equal({"model": longer.model}, {"model": whole.model})
    lr = whole.config.lr
    assert whole.rounds["lr"] == [lr / 2, lr, lr, pytest.approx(lr / 10)]


def test_the_methods_that_depend_on_the_number_of_rounds() -> None:
    named = {name for name, cls in METHODS.items() if cls().uses_rounds}
    assert named == {"fedproc", "fedavg_ga", "fedga"}


@pytest.mark.parametrize("change", [{"lr": 0.5}, {"seed": 1}])
def test_only_the_rounds_may_differ(tmp_path: Path, change: dict[str, Any]) -> None:
    run(TASK, FedAvg(), **settings(2), out=tmp_path)
    name = next(iter(change))
    with pytest.raises(ProtofedError, match=rf"another configuration: .*{name} \S+ → "):
        run(TASK, FedAvg(), **settings(3, **change), out=tmp_path, resume=True)


def test_a_run_is_not_cut_short(tmp_path: Path) -> None:
    run(TASK, FedAvg(), **settings(3), out=tmp_path)
    with pytest.raises(ProtofedError, match="already has 3 rounds, but only 2 are asked for"):
        run(TASK, FedAvg(), **settings(2), out=tmp_path, resume=True)


def test_in_the_pool_it_is_a_new_run_and_the_old_one_stays(
    tmp_path: Path, digests: Callable[[Path], dict[str, str]]
) -> None:
    asked = make_config(TASK, Diary(), **settings(4)).for_task(TASK.info)
    facts = discover(asked, TASK)
    for rounds, more in ((1, {}), (2, {}), (3, {"lr": 0.3}), (5, {})):
        config = dataclasses.replace(asked, rounds=rounds, **more)
        run(TASK, config=config, out=tmp_path / facts.run_name(config))
    shorter = shorter_run(tmp_path, asked, facts)
    assert shorter is not None and len(shorter.records()) == 2
    before = digests(shorter.path)
    shorter.client_states.chmod(0o700)
    for path in shorter.client_states.iterdir():
        path.chmod(0o600)
    new = RunFolder(tmp_path / facts.run_name(asked))
    new.copy_progress(shorter)
    assert not new.is_finished()
    modes = {path.stat().st_mode & 0o777 for path in new.client_states.iterdir()}
    assert (new.client_states.stat().st_mode & 0o777, modes) == (0o700, {0o600})
    assert same(run(TASK, config=asked), run(TASK, config=asked, out=new.path, resume=True))
    assert digests(shorter.path) == before
    assert shorter_run(tmp_path, dataclasses.replace(asked, rounds=1), facts) is None
    (shorter.path / "rounds.jsonl").write_text("damaged\n")
    found = shorter_run(tmp_path, dataclasses.replace(asked, rounds=3), facts)
    assert found is not None and len(found.records()) == 1, "the damaged one is passed over"
