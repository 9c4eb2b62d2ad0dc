"""A client's batches: order, augmentation, holdout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from tests.federation.one_client import (
    SIZES,
    Recorder,
    all_of,
    client_data,
    network,
    setup,
    train,
)

from protofed.data.task import Augment, Images
from protofed.errors import ProtofedError
from protofed.federation import batches as batches_module
from protofed.federation.batches import ClientBatches
from protofed.method import Client, Method
from protofed.methods import FedAvg
from protofed.tree import Tree

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.mark.parametrize(
    ("n", "batch", "sizes"), [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 4, [3]), (5, 1, [1] * 5)]
)
def test_the_last_batch_may_be_small_and_is_not_dropped(
    n: int, batch: int, sizes: list[int]
) -> None:
    reply = train(setup(Recorder(), batch=batch, epochs=2), client_data(n))
    assert [len(b.y) for b, _ in Recorder.seen] == sizes * 2
    assert reply.steps == 2 * len(sizes)


def test_an_epoch_is_every_sample_once_in_another_order() -> None:
    data = client_data(30)
    train(setup(Recorder(), batch=7, epochs=2), data)
    rows = torch.cat([b.rows for b, _ in Recorder.seen]).reshape(2, 30)
    for order in rows:
        assert sorted(order.tolist()) == list(range(30))
        assert order.tolist() != list(range(30))
    assert not torch.equal(rows[0], rows[1])
    x, y = all_of(data)
    for b, _ in Recorder.seen:
        assert torch.equal(b.x, x[b.rows])
        assert torch.equal(b.y, y[b.rows])


def test_order_depends_on_round_client_and_seed_only() -> None:
    def order(name: str = "left-0", round: int = 0, seed: int = 0) -> list[int]:
        s = replace(setup(Recorder(), batch=7), seed=seed)
        train(s, client_data(30, name=name), round=round)
        return torch.cat([b.rows for b, _ in Recorder.seen]).tolist()

    first = order()
    assert first == order()
    assert first != order(name="left-1")
    assert first != order(round=1)
    assert first != order(seed=1)


@pytest.mark.parametrize("limit", [1, 20_000, 100_000])
def test_batches_do_not_depend_on_the_size_of_chunks(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    s, data = setup(Recorder(), Augment(padding=2), batch=7), client_data(30)
    train(s, data)
    whole = list(Recorder.seen)
    monkeypatch.setattr(batches_module, "_CHUNK_BYTES", limit)
    train(s, data)
    for (a, _), (b, _) in zip(whole, Recorder.seen, strict=True):
        assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def test_augmentation_changes_with_the_epoch_and_not_the_clean_pass() -> None:
    data = client_data(12)
    train(setup(Recorder(passes="post"), Augment(padding=2), batch=12, epochs=2), data)
    first, second = (b.x[b.rows.argsort()] for b, _ in Recorder.seen)
    assert not torch.equal(first, second)
    assert not torch.equal(first, all_of(data)[0])


def test_balanced_epochs_have_every_class_equally_often() -> None:
    data = client_data(21)
    y = torch.tensor([0] * 15 + [1] * 4 + [3] * 2)  # and none of class 2
    data = data.with_images(Images(data.images.x, y))
    reply = train(setup(Recorder(), batch=5, epochs=2, sampling="balanced"), data)
    assert (reply.samples, reply.steps) == (21, 10)
    epochs = torch.cat([b.rows for b, _ in Recorder.seen]).reshape(2, 21)
    assert not torch.equal(*epochs)
    for rows in epochs:
        assert y[rows].bincount(minlength=4).tolist() == [7, 7, 0, 7]
        assert y[rows].tolist() != sorted(y[rows].tolist())
        assert len(set(rows[y[rows] == 0].tolist())) == 7, "none twice where there are enough"
        assert rows[y[rows] == 1].bincount()[15:19].sort().values.tolist() == [1, 2, 2, 2]
    for b, _ in Recorder.seen:
        assert torch.equal(b.y, y[b.rows])


def test_balanced_epochs_depend_on_round_client_and_seed_only() -> None:
    def order(n: int = 22, name: str = "left-0", round: int = 0, seed: int = 0) -> list[int]:
        s = replace(setup(Recorder(), batch=7, sampling="balanced"), seed=seed)
        train(s, client_data(n, name=name), round=round)
        return torch.cat([b.rows for b, _ in Recorder.seen]).tolist()

    first = order()
    assert first == order()
    assert all(first != order(**other) for other in ({"name": "b"}, {"round": 1}, {"seed": 1}))
    counts = torch.tensor(order(23)).remainder(4).bincount()
    assert counts.max() - counts.min() == 1, "23 images of 4 classes"


def test_an_image_that_comes_again_is_augmented_anew() -> None:
    data = client_data(12)
    y = torch.tensor([1] * 11 + [2])
    data = data.with_images(Images(data.images.x, y))
    train(setup(Recorder(), Augment(padding=2), batch=12, sampling="balanced"), data)
    ((batch, _),) = Recorder.seen
    rare = batch.x[batch.rows == 11]
    assert len(rare) == 6
    assert len(rare.flatten(1).unique(dim=0)) > 1


def test_public_images_have_no_classes_to_balance() -> None:
    data = replace(client_data(9), public=True)
    orders = [
        ClientBatches(setup(sampling=how), data).draw((0, "key"))[0].tolist()
        for how in ("uniform", "balanced")
    ]
    assert orders[0] == orders[1]


def test_holdout_is_the_same_in_every_round_and_not_trained_on() -> None:
    seen = []
    for round in range(2):
        reply = train(setup(Recorder(kept=0.3)), client_data(20), round=round)
        assert reply.samples == 14
        seen.append(set(Recorder.seen[0][0].rows.tolist()))
    assert seen[0] == seen[1]
    assert len(seen[0]) == 14


def test_too_few_samples_to_hold_out_and_nothing_to_evaluate() -> None:
    with pytest.raises(ProtofedError, match=r"left-0 has 4 samples.*10%"):
        train(setup(Recorder(kept=0.1)), client_data(4))

    @dataclass(frozen=True)
    class Asks(Method):
        name: ClassVar[str] = "asks"

        def upload(self, client: Client) -> tuple[Tree, Tree]:
            client.evaluate(client.start)
            return {}, {}

    with pytest.raises(RuntimeError, match="left-0 has no samples in its holdout"):
        train(setup(Asks()), client_data())
    net = network()
    with pytest.raises(RuntimeError, match="server"):
        Client(FedAvg(), net, SIZES, received={}, mine={}).features()
