"""Validation images: what they are, that nobody trains on them, where their accuracy goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs.diary import Diary, same

from protofed import tree
from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.federation.evaluation import evaluate
from protofed.federation.simulation import Federation, make_shares, rows_to_validate
from protofed.method import Method
from protofed.methods import METHODS, FedAvg, FedBN, Local
from protofed.observers.progress import client_lines
from protofed.runs.records import LAST, without_times
from protofed.runs.result import load_run
from protofed.runs.run import run
from protofed.studies.tables import caption, grid, rows
from protofed.testing.checks import TINY, _Interrupt, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")

TASK = tiny_task(samples=44, spare=24)
"""Two clients of 44 images and 24 unused ones in each of two domains."""
SHORT: dict[str, Any] = {**TINY, "rounds": 2, "epochs": 1}


def federation(method: Method | None = None, **more: Any) -> Federation:
    return Federation(make_config(TASK, method or FedAvg(), **{**SHORT, **more}), TASK)


@pytest.mark.parametrize("validate", ["unused", 0.3])
def test_validation_images_are_training_images_that_nobody_trains_on(validate: Any) -> None:
    found = federation(validate=validate)
    assert {d: len(i) for d, i in found.validation.items()} == (
        {"left": 24, "right": 24} if validate == "unused" else {"left": 26, "right": 26}
    )
    for domain, images in found.validation.items():
        train = {x.numpy().tobytes() for x in TASK.domains[domain].train.x}
        held = {x.numpy().tobytes() for x in images.x}
        used = {
            x.numpy().tobytes()
            for client in found.clients.values()
            if client.domain == domain
            for x in client.images.x
        }
        assert held < train and not held & used
        assert len(used) == (88 if validate == "unused" else 62)
    expected = "2 clients × 44 samples, 4 of 4 classes; validated on 24 other images"
    assert (expected in client_lines(found)[0]) == (validate == "unused")


def test_unused_images_leave_the_run_as_it_is() -> None:
    plain, validated = federation(), federation(validate="unused")
    for _ in range(2):
        (before, after) = without_times([plain.run_round(), validated.run_round()])
        assert set(after.pop("beside")) == {"validation"}
        assert after == before
    assert tree.equal(plain.server.state, validated.server.state)
    assert plain.hash != validated.hash


@pytest.mark.parametrize("validate", ["unused", 0.5])
@pytest.mark.parametrize("method", [FedAvg(), FedBN(), Local()], ids=lambda m: m.evaluates)
def test_the_accuracy_is_that_of_the_models_that_are_tested(method: Method, validate: Any) -> None:
    found = federation(method, validate=validate, clients={"left": 2, "right": 1})
    record = found.run_round()
    received, network = found.server.broadcast(), found.make_network()
    private = [{}] if method.evaluates == "global" else map(found.store.get, found.clients)
    owners = [
        "" if method.evaluates == "global" else found.clients.domain(n) for n in found.clients
    ]
    scores = [
        evaluate(found.setup, network, received, mine, found.validation)["accuracy"]
        for mine in private
    ]
    for domain in TASK.domains:
        every = [
            s[domain]
            for s, owner in zip(scores, owners, strict=False)
            if method.evaluates != "clients" or owner == domain
        ]
        mean = sum(every) / len(every)
        assert record["beside"]["validation"][domain] == pytest.approx(mean, abs=1e-4)
    assert ("own" in record["beside"]) == (method.evaluates == "everyone")


def test_workers_and_loop_agree() -> None:
    for method in (FedAvg(), Local()):
        records = [
            federation(method, validate=0.3, engine=engine, workers=workers).run_round()
            for engine, workers in (("loop", None), ("workers", 2), ("workers", 8))
        ]
        first, *others = without_times(records)
        assert all(other == first for other in others)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="lanes run on a GPU")
def test_lanes_and_loop_agree() -> None:
    for method in (FedAvg(), Local()):
        loop, lanes = (
            federation(method, validate=0.3, engine=e, device="cuda", precision="fp64").run_round()
            for e in ("loop", "lanes")
        )
        for name, scores in loop["beside"].items():
            assert lanes["beside"][name] == pytest.approx(scores, abs=100 / 26)  # one image


def test_a_domain_without_clients_is_not_validated_on() -> None:
    for validate in ("unused", 0.5):
        for method in (FedAvg(), FedBN()):
            found = federation(method, validate=validate, leave_out="right")
            record = found.run_round()
            assert set(record["accuracy"]) == {"left", "right"}
            assert set(record["beside"]["validation"]) == {"left"}
    assert "left out: only tested on" in client_lines(found)[1]
    assert "validated" not in client_lines(found)[1]


def test_clients_with_different_models() -> None:
    record = federation(Local(), validate=0.3, model="cnn3,cnn2").run_round()
    assert set(record["beside"]["validation"]) == {"left", "right"}


def test_an_interrupted_run_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    settings = {**TINY, "epochs": 1, "validate": 0.3}
    whole = run(TASK, Diary(), **settings)
    with pytest.raises(KeyboardInterrupt):
        run(TASK, Diary(), out=tmp_path / "r", observers=[_Interrupt(after=1)], **settings)
    other = {**settings, "validate": "unused"}
    with pytest.raises(ProtofedError, match=r"validate 0\.3 → unused"):
        run(TASK, Diary(), out=tmp_path / "r", resume=True, **other)
    assert same(whole, run(TASK, Diary(), out=tmp_path / "r", resume=True, **settings))


def test_where_the_accuracy_goes(tmp_path: Path) -> None:
    result = run(TASK, out=tmp_path / "r", validate=0.3, **SHORT)
    column = result.rounds["beside.validation.left"]
    assert len(column) == 2 < LAST
    assert result.validation["left"] == pytest.approx(sum(column) / 2)
    both = [result.validation[d] for d in ("left", "right")]
    assert result.validation["average"] == pytest.approx(sum(both) / 2)
    assert result.summary["beside"]["validation"] == result.validation
    assert result.summary["validated"] == {"left": 26, "right": 26}
    assert load_run(tmp_path / "r", model=False).validation == result.validation
    assert run(TASK, **{**SHORT, "rounds": 1}).validation == {}
    header, (line,) = grid(rows([result]))
    cell = line.cells[header.index("validation average")]
    assert cell.text == f"{result.validation['average']:.1f}"
    said = "validated on 30 % of each client's images, held out of its training (left 26, right 26)"
    assert said in caption([result])


def test_too_few_images_stop_a_run_before_it_has_a_folder(tmp_path: Path) -> None:
    few = tiny_task()
    for validate, words in (("unused", "0 of domain 'left', 0 of domain 'right'"), (0.1, "4 of")):
        with pytest.raises(ProtofedError, match=words):
            run(few, out=tmp_path / "r", validate=validate, **SHORT)
    assert not (tmp_path / "r").exists()


def test_a_method_is_not_validated_on_public_images_that_it_trains_on() -> None:
    fedmd = METHODS["fedmd"]
    for public in ("unused", "left"):
        with pytest.raises(ProtofedError, match=f"public images from '{public}'") as error:
            federation(fedmd(public=public), validate="unused")
        assert "--validate 0.1" in error.value.hint
    whole = replace(TASK, name="glyphs")
    config = make_config(whole, fedmd(public="glyphs"), validate=0.3, **SHORT)
    with pytest.raises(ProtofedError, match="public images from 'glyphs'"):
        rows_to_validate(config, whole, make_shares(config, whole))
    held_out = federation(fedmd(public="unused"), validate=0.3)
    assert held_out.setup.public is not None
    public = {x.numpy().tobytes() for r in range(3) for x in held_out.setup.public.draw(r).x}
    validation = torch.cat([i.x for i in held_out.validation.values()])
    assert not public & {x.numpy().tobytes() for x in validation}
