"""A frozen backbone: it stays as it is, is not sent, and is all that differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.some_methods import SOME, made
from torch import Tensor

from protofed import tree
from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.federation.simulation import Federation, Observer
from protofed.method import Method, Phase
from protofed.methods import METHODS, FedBN
from protofed.models.network import frozen
from protofed.models.weights import public_name
from protofed.observers.progress import protocol_line
from protofed.runs import load_run, run
from protofed.runs.records import without_times
from protofed.studies.tables import caption
from protofed.testing.checks import SHORT, tiny_task
from protofed.tree import Tree

HEAD = {**SHORT, "train": "head"}
IMAGENET = {**SHORT, "model": "resnet18_imagenet", "norm": None}


class Messages(Observer):
    def __init__(self) -> None:
        self.sent: list[Tree] = []

    def reply(self, round: int, name: str, message: Tree) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("name", SOME)
def test_a_frozen_backbone_stays_and_is_not_sent(name: str) -> None:
    task, seen = tiny_task(spare=12), Messages()
    federation = Federation(make_config(task, made(name), **HEAD), task)
    before = tree.copy({"model": federation.make_network().state_dict()})["model"]
    records = [federation.run_round([seen]) for _ in range(2)]
    after = [federation.model, *federation.own_models().values()]
    fixed = [n for n in before if n.startswith("encoder.")]
    for entries in after:
        assert all(torch.equal(entries[n], before[n]) for n in fixed if n in entries)
    for message in seen.sent:
        assert not [n for slot in message.values() for n in slot if n.startswith("encoder.")]
    assert records[0]["loss"] != records[1]["loss"], "the rest is trained"
    assert federation.batchnorm.startswith("all of it frozen")


@pytest.mark.parametrize("name", ["moon", "scaffold"])
def test_workers_equal_the_loop(name: str) -> None:
    for settings in ({"train": "head"}, {"freeze_bn": True}):
        one, two = (
            run(tiny_task(), name, **{**SHORT, **settings, "engine": engine})
            for engine in ("loop", "workers")
        )
        assert tree.equal({"model": one.model}, {"model": two.model})
        assert without_times(one.rounds) == without_times(two.rounds)


def test_frozen_statistics() -> None:
    task = tiny_task()
    federation = Federation(make_config(task, "moon", **SHORT, freeze_bn=True), task)
    before = tree.copy({"model": federation.model})["model"]
    network = federation.make_network()
    assert frozen(network) == {n for n, _ in network.named_buffers()}
    federation.run_round()
    for name, tensor in federation.model.items():
        assert torch.equal(tensor, before[name]) == (name in frozen(network)), name
    assert federation.batchnorm == (
        "running statistics frozen as at the start, and used in training; averaged like weights"
    )
    own = Federation(make_config(task, FedBN(), **SHORT, freeze_bn=True), task)
    assert own.batchnorm.endswith("; kept by each client")


def test_modules_that_stay_in_evaluation_mode() -> None:
    task = tiny_task()
    network = Federation(make_config(task, **HEAD), task).make_network().train()
    assert network.training and network.head.training
    assert not any(m.training for m in network.encoder.modules())


def test_a_phase_with_nothing_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    def phases(self: Method, round: int, epochs: int) -> tuple[Phase, ...]:
        return (Phase(self.loss, trainable=lambda name: name.startswith("encoder.")),)

    monkeypatch.setattr(METHODS["fedprox"], "phases", phases)
    with pytest.raises(ProtofedError, match=r"fedprox has a phase .*--train head"):
        run(tiny_task(), "fedprox", **HEAD)


# ---- weights from a file ------------------------------------------------------------------------


def weights(path: Path, scale: float = 1.0) -> dict[str, Tensor]:
    """A file of weights of a narrow ResNet-18, and what it holds by the encoder's names."""
    task = tiny_task()
    network = Federation(make_config(task, **IMAGENET, seed=9), task).make_network()
    state = {n: t * scale if t.is_floating_point() else t for n, t in
             network.encoder.state_dict().items()}  # fmt: skip
    torch.save({public_name(n, (2, 2, 2, 2)): t for n, t in state.items()}, path)
    return {f"encoder.{n}": t for n, t in state.items()}


@pytest.mark.parametrize("name", ["fpl", "fedproto", "i2pfl", "fedplvm", "moon"])
def test_a_loss_on_frozen_features_changes_nothing(name: str) -> None:
    models = [run(tiny_task(), m, **SHORT, train="head").model for m in ("fedavg", name)]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(t, models[1][n]) for n, t in models[0].items())


def test_a_run_starts_from_a_file(tmp_path: Path) -> None:
    held = weights(tmp_path / "w.pth")
    given: dict[str, Any] = {**IMAGENET, "train": "head", "rounds": 1}
    with_file = run(tiny_task(), weights=str(tmp_path / "w.pth"), out=tmp_path / "a", **given)
    assert all(torch.equal(with_file.model[n], t) for n, t in held.items())
    assert with_file.summary["pretrained"] == {
        "digest": with_file.facts["weights_digest"], "train": "head"
    }  # fmt: skip
    line = protocol_line(with_file.config)
    assert "weights from w.pth, backbone frozen," in line and line.count("w.pth") == 1
    digest = with_file.facts["weights_digest"]
    assert "1 round, clients" in caption([with_file])
    assert f"weights from w.pth ({digest}), backbone frozen" in caption([with_file])
    without = run(tiny_task(), **given)
    assert without.summary["pretrained"]["digest"] is None
    assert not torch.equal(without.model["encoder.0.weight"], held["encoder.0.weight"])
    # the same content anywhere is the same run; other content is another
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "w.pth").rename(tmp_path / "elsewhere" / "v.pth")
    again = run(tiny_task(), weights=str(tmp_path / "elsewhere" / "v.pth"), **given)
    assert again.summary["hash"] == with_file.summary["hash"] != without.summary["hash"]
    weights(tmp_path / "w.pth", scale=0.5)
    other = run(tiny_task(), weights=str(tmp_path / "w.pth"), **given)
    assert other.summary["hash"] != with_file.summary["hash"]
    assert other.config.hash == with_file.config.hash
    with pytest.raises(ProtofedError, match=r"another configuration: .*weights_digest"):
        run(tiny_task(), weights=str(tmp_path / "w.pth"), out=tmp_path / "a", resume=True,
            **{**given, "rounds": 2})  # fmt: skip
    # reading it needs no file
    (tmp_path / "w.pth").unlink()
    assert torch.equal(load_run(tmp_path / "a").network().state_dict()["encoder.0.weight"],
                       held["encoder.0.weight"])  # fmt: skip


def test_weights_that_cannot_be_used(tmp_path: Path) -> None:
    weights(tmp_path / "w.pth")
    given = {"weights": str(tmp_path / "w.pth")}
    with pytest.raises(ProtofedError, match=r"cannot read .*nothing.pth': No such file"):
        run(tiny_task(), **{**IMAGENET, "weights": str(tmp_path / "nothing.pth")})
    with pytest.raises(ProtofedError, match=r"do not fit resnet18_imagenet: .*of another size"):
        run(tiny_task(), **{**IMAGENET, **given, "width": 8})
    with pytest.raises(ProtofedError, match=r"not for cnn2"):
        run(tiny_task(), **{**SHORT, **given})
    with pytest.raises(ProtofedError, match=r"cannot fit both cnn3 and cnn2"):
        run(tiny_task(), "local", **{**SHORT, **given, "model": "cnn3,cnn2"})
