"""FedRDN: its equations in plain numbers, who is drawn, and what a model's file tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import protofed
from protofed import keys, tree
from protofed.config import make_config
from protofed.data.augment import normalized
from protofed.federation.simulation import Federation
from protofed.method import Client, Sizes
from protofed.methods import FedAvg, FedRDN
from protofed.models import build
from protofed.runs.run import run
from protofed.testing.checks import SHORT, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")

STYLES = torch.from_numpy(keys.generator("styles").uniform(0.2, 2.0, (3, 2, 3)))


def numbers(*shape: int) -> Tensor:
    return torch.from_numpy(keys.generator("fedrdn").standard_normal(shape))


def a_client(mask: list[float], draw: str = "image") -> Client:
    method = FedRDN(draw=draw)
    backbone = build("cnn2", 4, 8, 4, "batch")
    network = method.network(backbone, Sizes.of(backbone, 4, 8)).double()
    received = {"statistics": {"style": STYLES, "mask": torch.tensor(mask)}}
    client = Client(method, network, Sizes.of(network, 4, 8), received=received, mine={})
    client.begin_step(5)
    return client


def drawn(client: Client, x: Tensor) -> Tensor:
    return client.method.between(client, "pixels", x)


def by_hand(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return torch.stack([(x[c] - mean[c]) / std[c] for c in range(3)])


def test_each_image_takes_both_statistics_of_one_known_client() -> None:
    client, x = a_client([1, 0, 1]), numbers(200, 3, 4, 4)
    seen = []
    for image, result in zip(x, drawn(client, x), strict=True):
        fits = [torch.allclose(result, by_hand(image, *s)) for s in STYLES]
        assert sum(fits) == 1
        seen.append(fits.index(True))
    assert {*seen} == {0, 2}
    assert 60 < seen.count(0) < 140  # each with probability ½


def test_as_released_a_batch_takes_a_mean_and_a_deviation() -> None:
    x, seen = numbers(5, 3, 4, 4), set()
    client = a_client([1, 1, 1], "batch")
    for step in range(60):
        client.begin_step(step)
        result = drawn(client, x)
        pairs = [
            (i, j)
            for i, a in enumerate(STYLES)
            for j, b in enumerate(STYLES)
            if all(
                torch.allclose(r, by_hand(image, a[0], b[1]))
                for r, image in zip(result, x, strict=True)
            )
        ]
        assert len(pairs) == 1
        seen |= {*pairs}
    assert len(seen) == 9  # independent of each other


def test_without_statistics_images_stay_as_they_are() -> None:
    client, x = a_client([0, 0, 0]), numbers(5, 3, 4, 4)
    client.received["statistics"]["style"] = torch.tensor([[[0.0] * 3, [1.0] * 3]] * 3)
    assert torch.equal(drawn(client, x), x)


def test_evaluation_uses_the_mean_statistics_and_training_does_not() -> None:
    client, x = a_client([1, 1, 1]), numbers(4, 3, 8, 8)
    network = client.network
    network.statistics = torch.as_tensor([[0.5, -1.0, 0.0], [2.0, 0.5, 1.0]]).double()
    normal = torch.stack([by_hand(image, *network.statistics) for image in x])
    network.eval()
    expected = network.head(network.encoder(normal))
    assert torch.allclose(client.forward(x).logits, expected)
    assert torch.allclose(client.forward_with({}, x).logits, expected)
    network.train()
    plain = client.forward(x, between=lambda stage, x: x)
    assert torch.allclose(plain.feature, network.encoder(x))


def federation(**settings: Any) -> Federation:
    return Federation(make_config(tiny_task(), FedRDN(), **{**SHORT, **settings}), tiny_task())


def test_statistics_are_those_of_the_images_in_every_round() -> None:
    fed = federation()
    expected = []
    for site in fed.clients.values():
        x = normalized(site.images.x, tiny_task().augment, torch.float64)
        per_image = x.mean((2, 3)), (x.var((2, 3)) + 1e-6).sqrt()
        expected.append(torch.stack([t.mean(0) for t in per_image]).numpy())
    for _ in range(2):
        fed.run_round()
        state = fed.server.state
        np.testing.assert_allclose(state["statistics"]["style"], expected, atol=1e-5)
        np.testing.assert_allclose(state["model"]["statistics"], np.mean(expected, 0), atol=1e-5)
        assert state["statistics"]["mask"].tolist() == [1] * 4


def test_a_client_with_too_few_images_tells_nothing() -> None:
    fed = federation(samples={"left": 22, "right": 5}, min_class_count=6)
    fed.run_round()
    statistics = fed.server.state["statistics"]
    assert statistics["mask"].tolist() == [1, 1, 0, 0]
    assert torch.equal(statistics["style"][2:], torch.tensor([[[0.0] * 3, [1.0] * 3]] * 2))
    mean = fed.server.state["model"]["statistics"]
    torch.testing.assert_close(mean, statistics["style"][:2].mean(0))


def test_a_deviation_of_almost_0_is_raised() -> None:
    """Others divide by it."""

    class Sent(dict[str, Any]):
        name = "left-0"

    fed = federation()
    sent = Sent(statistics={"style": torch.tensor([[0.1, 0.2, 0.3], [0.0, -1.0, 1.0]])})
    model = fed.server.state["model"]
    state = fed.method.aggregate(fed.server.view(), model, [sent])  # type: ignore[list-item]
    assert state["statistics"]["style"][0, 1].tolist() == pytest.approx([1e-3, 1e-3, 1])


def test_it_starts_as_fedavg_does() -> None:
    """Round 0 has no statistics."""
    ours, plain = (run(tiny_task(), m, **{**SHORT, "rounds": 1}) for m in (FedRDN(), FedAvg()))
    trained = {n: t for n, t in ours.model.items() if n != "statistics"}
    assert tree.equal({"model": trained}, {"model": plain.model})


def test_a_models_file_has_the_mean_and_no_clients_statistics(tmp_path: Path) -> None:
    task = tiny_task()
    result = run(task, FedRDN(), out=tmp_path / "run", **SHORT)
    model = protofed.load_model(tmp_path / "run")
    accuracy = {}
    for name, domain in task.domains.items():
        said = model.logits(domain.test.x).argmax(1)
        accuracy[name] = round(100 * float((said == domain.test.y.numpy()).mean()), 4)
    assert accuracy == result.rounds[-1]["accuracy"]
    slots, _ = tree.load(tmp_path / "run" / "model.safetensors")
    assert {slot for slot, entries in slots.items() if entries} == {"model"}
    assert slots["model"]["statistics"].shape == (2, 3)
