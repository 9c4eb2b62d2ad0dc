"""``min_class_count``: prototypes of few images stay with the client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.methods.helpers import recorded

from protofed import tree
from protofed.config import make_config
from protofed.data.task import Images
from protofed.federation.client_round import train_client
from protofed.federation.simulation import Federation
from protofed.method import Client
from protofed.methods import METHODS, FedPLVM
from protofed.prototypes import Prototypes
from protofed.testing.checks import TINY, tiny_task
from protofed.tree import Tree

pytestmark = pytest.mark.usefixtures("single_thread")

SENDERS = sorted(n for n, m in METHODS.items() if "prototypes" in m().slots.up)
TASK = tiny_task(samples=24)
SHORT: dict[str, Any] = {**TINY, "rounds": 2, "epochs": 1}


def federation(name: str, **more: Any) -> Federation:
    return Federation(make_config(TASK, METHODS[name](), **{**SHORT, **more}), TASK)


def classes_sent(message: Tree) -> list[bool]:
    slot = message["prototypes"]
    count = slot["count"] if "count" in slot else slot["mask"].sum(1)
    assert not slot["mean"][count == 0].any()
    return (count > 0).tolist()


@pytest.mark.parametrize("name", SENDERS)
def test_a_class_of_fewer_images_is_sent_as_absent(name: str) -> None:
    found = federation(name)
    client = found.clients["left-0"]
    y = torch.tensor([0] + [1] * 2 + [2] * 3 + [3] * (len(client.images) - 6))
    client = client.with_images(Images(client.images.x, y))
    received, mine = found.server.broadcast(), found.store.get("left-0")
    replies = [
        train_client(
            replace(found.setup, min_class_count=least), found.make_network(), client,
            received, mine, 0,
        )
        for least in (1, 3)
    ]  # fmt: skip
    assert [classes_sent(r.message) for r in replies] == [[True] * 4, [False] * 2 + [True] * 2]
    rest = [{slot: r.message[slot] for slot in r.message if slot != "prototypes"} for r in replies]
    assert tree.equal(*rest)


@pytest.mark.parametrize("name", SENDERS)
def test_a_run_in_which_nobody_sends_a_prototype(name: str) -> None:
    found = federation(name, min_class_count=1000)
    sent = recorded(found)
    for _ in range(2):
        found.run_round()
        assert not any(any(classes_sent(r.message)) for r in sent.values())


def test_the_workers_agree_with_the_loop() -> None:
    loop, workers = (
        federation("fpl", min_class_count=8, engine=e, workers=2 if e == "workers" else None)
        for e in ("loop", "workers")
    )
    assert loop.run_round()["accuracy"] == workers.run_round()["accuracy"]
    assert tree.equal(loop.server.state, workers.server.state)


def test_features_are_those_of_classes_with_enough_images() -> None:
    found = federation("fedavg")
    x = torch.zeros(6, 3, TASK.image_size, TASK.image_size, dtype=found.setup.dtype)
    y = torch.tensor([0, 1, 1, 3, 3, 3])
    client = Client(
        METHODS["fedavg"](), found.make_network(), found.sizes, received={}, mine={},
        small_classes=torch.tensor([True, True, False, False]),
        clean=lambda part: iter([(x, y)]),
    )  # fmt: skip
    z, labels = client.features()
    assert len(z) == 3 and labels.tolist() == [3, 3, 3]


def test_clusters_of_fewer_rows_are_left_out() -> None:
    """Two directions in a class of six rows: four rows of one, two of the other."""
    rows = torch.tensor([[1.0, 0.0]] * 4 + [[0.0, 1.0]] * 2)
    counts = [int(Prototypes.clusters([rows], least=n).mask.sum()) for n in (1, 2, 3, 4, 5)]
    assert counts == [2, 2, 1, 1, 0]
    assert Prototypes.clusters([rows], least=3).mean.tolist() == [[[1.0, 0.0]]]


def test_fedplvm_sends_no_cluster_of_fewer_images() -> None:
    found = federation("fedplvm")
    net = found.make_network()
    x = torch.zeros(6, 3, TASK.image_size, TASK.image_size, dtype=found.setup.dtype)
    x[:4, 0], x[4:, 1] = 1, 1  # two looks of one class
    client = Client(
        FedPLVM(), net, found.sizes, received={}, mine={}, min_class_count=3,
        clean=lambda part: iter([(x, torch.zeros(6, dtype=torch.int64))]),
    )  # fmt: skip
    net.eval()
    sent = FedPLVM().upload(client)[0]["prototypes"]
    assert sent["mask"].sum() == 1
    assert torch.allclose(sent["mean"][0, 0], client.forward_with({}, x[:1]).feature[0])
