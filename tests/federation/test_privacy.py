"""Differential privacy: what is bounded, how much noise there is, and what is spent."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.federation.one_client import all_of, client_data, network, setup, start

from protofed import tree
from protofed.config import make_config
from protofed.data.task import Images
from protofed.errors import ProtofedError
from protofed.federation import privacy
from protofed.federation.batches import ClientBatches
from protofed.federation.client_round import Reply, train_client
from protofed.federation.participants import participants
from protofed.federation.privacy import (
    COUNT_SHARE,
    Budget,
    Privacy,
    keyed_normal,
    noised_model,
    system_normal,
)
from protofed.federation.setup import ClientData
from protofed.federation.simulation import Federation, Observer
from protofed.method import Client, Output, PrototypeMethod, Sizes, Slots
from protofed.methods import METHODS, FedAvg, FedProto
from protofed.runs.result import load_run
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task
from protofed.tree import Slot, Tree

pytest.importorskip("dp_accounting")
pytestmark = pytest.mark.usefixtures("single_thread")

TASK = tiny_task()
SHORT: dict[str, Any] = {**TINY, "rounds": 2, "epochs": 1}
LOOSE = 1e5  # an ε with hardly any noise
PROTOTYPES = Budget("prototypes", 3.0, 1e-5, clip=1.0, releases=4)
SENDERS = sorted(n for n, m in METHODS.items() if "prototypes" in m().slots.up)


def no_noise(key: tuple[int | str, ...], shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape)


def make(method: str = "fpl", **more: Any) -> Federation:
    return Federation(make_config(TASK, METHODS[method](), **{**SHORT, **more}), TASK)


def reply(
    data: ClientData, budget: Budget = PROTOTYPES, normal: Any = no_noise, least: int = 1
) -> Reply:
    """What a client of FedProto sends; its network has BatchNorm."""
    net, own = network(norm=True), Privacy(prototypes=budget, normal=normal)
    s = replace(setup(FedProto(), epochs=2), privacy=own, min_class_count=least)
    received = {**start(net), **FedProto().init_server({}, s.sizes)}
    return train_client(s, net, data, tree.map_tensors(received, lambda t: t.double()), {}, 0)


# ---- the accountant ------------------------------------------------------------------------------


def delta_of(epsilon: float, sigma: float) -> float:
    """δ of one Gaussian release with this noise multiplier (Balle and Wang 2018, theorem 8)."""

    def phi(t: float) -> float:
        return 0.5 * math.erfc(-t / math.sqrt(2))

    a, b = 1 / (2 * sigma), epsilon * sigma
    return phi(a - b) - math.exp(epsilon) * phi(-a - b)


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 20.0])
@pytest.mark.parametrize("releases", [1, 40])
def test_the_noise_gives_the_budget_after_the_planned_releases(
    epsilon: float, releases: int
) -> None:
    budget = Budget("model", epsilon, 1e-5, clip=1.0, releases=releases)
    # k Gaussian releases are one of 1/√k the noise: the sum of their log likelihood ratios is one
    assert delta_of(epsilon, budget.multiplier / math.sqrt(releases)) == pytest.approx(1e-5)
    assert budget.spent(releases) == pytest.approx(epsilon)
    assert budget.spent(0) == 0
    for fewer in range(1, releases):
        assert delta_of(budget.spent(fewer), budget.multiplier / math.sqrt(fewer)) == pytest.approx(
            1e-5, rel=1e-4
        )


def test_a_library_that_composes_numerically_agrees() -> None:
    import dp_accounting

    event = dp_accounting.GaussianDpEvent(PROTOTYPES.multiplier)
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(event, PROTOTYPES.releases)
    assert accountant.get_epsilon(1e-5) == pytest.approx(PROTOTYPES.epsilon, rel=5e-3)


def test_noise_is_planned_for_the_rounds_in_which_a_client_trains() -> None:
    config = make_config(TASK, rounds=10, participation=0.5)
    times = np.zeros(4, int)
    for round in range(10):
        times[participants(config.seed, round, 4, 0.5)] += 1
    assert privacy.planned_releases(config) == times.max() < 10
    assert privacy.planned_releases(replace(config, participation=1.0)) == 10


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ProtofedError, match=r"dp-accounting(.|\n)*protofed\[privacy\]"):
        make("fpl", proto_epsilon=1.234).run_round()  # an ε that no other test has cached
    make("fpl").run_round()


# ---- prototypes ----------------------------------------------------------------------------------


def test_prototypes_are_clipped_features_of_the_received_model_in_evaluation_mode() -> None:
    data = client_data(20)
    message = reply(data, replace(PROTOTYPES, epsilon=LOOSE)).message
    x, y = all_of(data)
    net = network(norm=True).eval()  # as it was received: training has moved the client's own
    z = net(x).feature.detach()
    length = z.norm(dim=1, keepdim=True)
    assert (length > 1).any() and (length < 1).any()
    z = torch.where(length > 1, z / length, z)
    for k in range(4):
        torch.testing.assert_close(message["prototypes"]["mean"][k], z[y == k].mean(0))
    assert message["prototypes"]["count"].tolist() == [5.0] * 4


def clipped_sums(data: ClientData, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    net, s = network(norm=True), setup(FedProto())
    for name, value in more.items():
        net.state_dict()[name].fill_(value)
    net.train()  # as in a round: the sums must not depend on it
    view = Client(
        FedProto(), net, s.sizes, received={}, mine={}, clean=ClientBatches(s, data).clean
    )
    return view.clipped_sums(1.0)


def test_one_image_changes_one_row_by_at_most_the_bound() -> None:
    data = client_data(20)
    images = data.images
    largest = 0.0
    for left_out in range(20):
        rest = torch.arange(20) != left_out
        fewer = data.with_images(Images(images.x[rest], images.y[rest]))
        with_it, without = clipped_sums(data), clipped_sums(fewer)
        change_sum, change_count = with_it[0] - without[0], with_it[1] - without[1]
        row = int(images.y[left_out])
        assert change_count.tolist() == [float(k == row) for k in range(4)]
        others = torch.arange(4) != row
        assert change_sum[others].abs().max() < 1e-12
        largest = max(largest, float(change_sum[row].norm()))
    assert largest == pytest.approx(1.0)  # the bound is reached and not exceeded


def test_an_image_whose_feature_overflows_shows_nowhere() -> None:
    data = client_data(20)
    rest = torch.arange(20) > 0
    fewer = data.with_images(Images(data.images.x[rest], data.images.y[rest]))
    x = data.images.x.clone()
    x[1:] = 0
    x[0] = 255
    # weights under which the one bright image is infinite and black ones are not
    huge = {"encoder.2.weight": 1e308, "encoder.0.running_mean": -2.0}
    bright = clipped_sums(data.with_images(Images(x, data.images.y)), **huge)
    dark = clipped_sums(fewer.with_images(Images(x[1:], data.images.y[1:])), **huge)
    assert bright[0].isfinite().all()
    assert (bright[0] - dark[0]).norm(dim=1).max() <= 1.0


def test_sums_and_counts_have_the_planned_noise() -> None:
    data, exact, budget = client_data(400), 100, replace(PROTOTYPES, epsilon=200.0, clip=2.0)
    found = [reply(data, budget, noise_of(i)).message["prototypes"] for i in range(30)]
    mean, count = (torch.stack([f[n] for f in found]) for n in ("mean", "count"))
    z = budget.multiplier
    of_count = float((count - exact).std())
    assert of_count == pytest.approx(budget.count_noise, rel=0.03)
    of_sum = float((mean * count[..., None]).var(0).mean().sqrt())
    assert of_sum == pytest.approx(2 * z / math.sqrt(1 - COUNT_SHARE), rel=0.03)
    # one image moves both together by at most 1/z standard deviations
    assert (2 / of_sum) ** 2 + of_count**-2 == pytest.approx(z**-2, rel=0.05)


def noise_of(number: int) -> Any:
    return lambda key, shape: keyed_normal((number, *key), shape)


def test_a_class_without_a_clear_count_is_absent() -> None:
    y = torch.tensor([0] * 19 + [1])  # and none of 2 and 3
    data = client_data(20)
    data = data.with_images(Images(data.images.x, y))
    loose = replace(PROTOTYPES, epsilon=LOOSE)
    counts = reply(data, loose).message["prototypes"]["count"]
    assert counts.tolist() == [19.0, 1.0, 0.0, 0.0]
    # the noised counts, not the true ones, are compared with the fewest images of a class
    shifted = reply(data, replace(loose, epsilon=500.0), noise_of(1), least=2).message["prototypes"]
    for i in range(20):
        message = reply(data, replace(loose, epsilon=500.0), noise_of(i), least=2).message
        counts = message["prototypes"]["count"]
        assert all(c == 0 or c >= 2 for c in counts.tolist())
        assert not message["prototypes"]["mean"][counts == 0].any()
    assert shifted["count"][0] > 15
    # where noise hides everything, nothing is sent rather than noise
    assert not reply(data, replace(PROTOTYPES, epsilon=0.01)).message["prototypes"]["count"].any()


@pytest.mark.parametrize(("images", "there"), [(12, False), (25, True)])
def test_a_class_whose_mean_would_be_mostly_noise_is_absent(images: int, there: bool) -> None:
    budget = Budget("prototypes", 4.4, 1e-5, clip=1.0, releases=1)
    assert budget.multiplier == pytest.approx(1, rel=0.02)

    class View:
        network = network()

        def clipped_sums(self, clip: float) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.ones(1, 400), torch.tensor([float(images)])

        def use_sums(self, *sums: torch.Tensor) -> None:
            self.sums = sums

    view: Any = View()  # the noise of a sum is about √400 long, that of a count about 3
    privacy.collect_private(Privacy(budget, normal=no_noise), view, (), 1)
    assert bool(view.sums[1] > 0) == there


def test_a_mean_is_never_longer_than_a_feature() -> None:
    message = reply(client_data(40), replace(PROTOTYPES, epsilon=20.0), noise_of(0)).message
    mean = message["prototypes"]["mean"]
    assert mean.any() and float(mean.norm(dim=1).max()) <= 1.0 + 1e-9


# ---- updates -------------------------------------------------------------------------------------


def test_updates_are_clipped_and_get_noise_for_a_replaced_client() -> None:
    received = {"a": torch.zeros(200, 100), "b": torch.ones(5)}
    trained = {"a": torch.full((200, 100), 0.3), "b": torch.tensor([1.0, 1, 1, 1, math.inf])}
    budget = Budget("model", LOOSE, 1e-5, clip=1.5, releases=1)
    sent = noised_model(budget, no_noise, (), trained, received)
    change = torch.cat([(sent[n] - received[n]).flatten() for n in sent])
    assert float(change.norm()) <= 1.5 + 1e-5
    small = {n: t + 0.001 for n, t in received.items()}
    assert tree.equal(
        {"model": noised_model(budget, no_noise, (), small, received)}, {"model": small}
    )
    noisy = replace(budget, epsilon=2.0)
    other = noised_model(noisy, keyed_normal, (1,), small, received)
    # two clients' clipped updates are up to 2 · clip apart
    spread = float((other["a"] - small["a"]).std())
    assert spread == pytest.approx(2 * 1.5 * noisy.multiplier, rel=0.02)


def test_entries_that_a_server_chose_do_not_round_a_change_before_its_noise() -> None:
    """Next to 2⁵³, a change of 1 is lost, and so is noise of 1; their sum is not."""
    start = torch.tensor([2.0**53], dtype=torch.float64)
    budget = Budget("model", LOOSE, 1e-5, clip=1.0, releases=1)

    def one(key: tuple[int | str, ...], shape: tuple[int, ...]) -> np.ndarray:
        return np.full(shape, 1 / (2 * budget.clip * budget.multiplier))

    sent = noised_model(budget, one, (), {"a": start + 2}, {"a": start})  # clipped to 1
    assert sent["a"] == start + 2


def test_system_noise_is_standard_normal_and_not_repeated() -> None:
    a, b = (system_normal(("same", 1), (100, 300)) for _ in range(2))
    assert abs(a.mean()) < 0.03 and abs(a.std() - 1) < 0.03 and abs((a**4).mean() - 3) < 0.3
    assert abs((a * b).mean()) < 0.03


@pytest.mark.parametrize("normal", [keyed_normal, system_normal])
def test_a_parameter_that_is_a_number_gets_noise(normal: Any) -> None:
    budget = Budget("model", 1.0, 1e-5, 1.0, 1)
    scale = torch.ones(())
    sent = noised_model(budget, normal, (0,), {"scale": scale}, {"scale": scale})["scale"]
    assert sent.shape == () and sent != scale


# ---- whole runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in SENDERS if n not in ("fedgh", "fedplvm", "fedtgp")])
def test_every_method_with_class_means_can_protect_them(name: str) -> None:
    found = make(name, proto_epsilon=LOOSE)
    records = [found.run_round() for _ in range(2)]
    spent = [r["privacy"]["prototypes"] for r in records]
    assert spent[0]["epsilon"] < spent[1]["epsilon"] == pytest.approx(LOOSE)
    assert spent[1]["level"] == "sample" and spent[1]["delta"] == 1e-5
    with pytest.raises(ProtofedError, match="budget of the prototypes is spent"):
        found.run_round()


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        (FedAvg(), {"proto_epsilon": 1.0}, "proto_epsilon: fedavg sends no class means"),
        (METHODS["fedplvm"](), {"proto_epsilon": 1.0}, "sends no class means"),
        (METHODS["i2pfl"](lambda_inter=0.0), {"proto_epsilon": 1.0}, "sends no class means"),
        (METHODS["fedgh"](), {"proto_epsilon": 1.0}, "entries that clients keep"),
        (FedProto(share="prototypes"), {"proto_epsilon": 1.0}, "entries that clients keep"),
        (METHODS["scaffold"](), {"update_epsilon": 1.0, "norm": "group"}, "also sends"),
        (METHODS["local"](), {"update_epsilon": 1.0, "norm": "group"}, "sends no model"),
        (FedAvg(), {"update_epsilon": 1.0}, "no BatchNorm statistics may travel"),
        (METHODS["fedfa"](), {"update_epsilon": 1.0, "norm": "group"}, "sends the buffer running"),
    ],
)
def test_what_cannot_be_protected_is_refused(
    method: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ProtofedError, match=words):
        Federation(make_config(TASK, method, **{**SHORT, **settings}), TASK)


@dataclass(frozen=True)
class Leaky(PrototypeMethod):
    """Sends more than its class means, under their name or under another."""

    name: ClassVar[str] = "leaky"
    proto_pass: ClassVar[str] = "post"  # type: ignore[misc]
    slot: str = "prototypes"

    @property
    def slots(self) -> Slots:
        return Slots(up={"prototypes": "class means"}, down={"prototypes": "global prototypes"})

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        sent, mine = super().upload(client)
        if self.slot == "prototypes":
            mean = client.features()[0][:4]
            return {"prototypes": {**sent["prototypes"], "mean": mean}}, mine
        return {**sent, self.slot: {"images": client.features()[0]}}, mine


@pytest.mark.parametrize(
    ("slot", "words"), [("prototypes", "are not its class means"), ("aside", "aside, which its")]
)
def test_a_method_that_sends_something_else_is_stopped(slot: str, words: str) -> None:
    found = Federation(make_config(TASK, Leaky(slot), **SHORT, proto_epsilon=1.0), TASK)
    with pytest.raises(ProtofedError, match=words):
        found.run_round()


@dataclass(frozen=True)
class FarReaching(PrototypeMethod):
    """One image more moves more than its own feature, in one of several ways."""

    name: ClassVar[str] = "far_reaching"
    proto_pass: ClassVar[str] = "post"  # type: ignore[misc]
    by: str = "holdout"

    @property
    def holdout(self) -> float:
        return 0.1 if self.by == "holdout" else 0.0

    def init_client(self, model: Slot, sizes: Sizes) -> Tree:
        return {"kept": {"shift": torch.zeros(())}} if self.by == "kept" else {}

    def forward(self, client: Client, x: torch.Tensor) -> Output:
        z, logits = client.network(x)
        if self.by == "batch":
            z = z - z.mean(0)
        return Output(z + client.mine["kept"]["shift"] if self.by == "kept" else z, logits)


@pytest.mark.parametrize(
    ("by", "words"),
    [
        ("holdout", "holds out a part of the images"),
        ("batch", "depend on the other images of the batch"),
        ("kept", r"entries that clients keep \(kept"),
    ],
)
def test_an_image_must_not_move_the_features_of_others(by: str, words: str) -> None:
    with pytest.raises(ProtofedError, match=words):
        Federation(make_config(TASK, FarReaching(by), **SHORT, proto_epsilon=1.0), TASK)
    Federation(make_config(TASK, FarReaching(""), **SHORT, proto_epsilon=1.0), TASK)


def test_with_a_holdout_one_image_more_would_change_which_images_are_summed() -> None:
    """Why it is refused: the images held out are drawn by how many there are."""
    s = replace(setup(FarReaching()), privacy=Privacy(prototypes=PROTOTYPES, normal=no_noise))
    kept = [set(ClientBatches(s, client_data(n)).parts["train"].tolist()) for n in (40, 41)]
    assert len(kept[0] ^ kept[1]) > 1


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "fpl"])
def test_updates_of_a_run_carry_noise(name: str) -> None:
    more: dict[str, Any] = {"fedbn": {}, "fpl": {"train": "head"}}.get(name, {"norm": "group"})
    states = []
    for epsilon in (LOOSE, 10.0):
        found = make(name, update_epsilon=epsilon, **more)
        before = tree.copy(found.server.state)["model"]
        record = found.run_round()
        after = found.server.state["model"]
        changes = [(after[n].double() - t.double()).norm() for n, t in before.items()]
        states.append(torch.stack(changes).norm())
        assert record["privacy"]["model"]["level"] == "client"
        assert record["privacy"].keys() == {"model"}
    assert states[0] < 1.5 and states[1] > 10


def test_engines_and_a_resumed_run_draw_the_same_noise(tmp_path: Path) -> None:
    both = {"proto_epsilon": 300.0, "update_epsilon": 5000.0, "norm": "group", "rounds": 3}
    settings: dict[str, Any] = {**SHORT, **both, "checkpoint_every": 1}
    whole = run(TASK, "fpl", **settings)
    workers = run(TASK, "fpl", **{**settings, "engine": "workers", "workers": 2})
    assert tree.equal({"model": whole.model}, {"model": workers.model})

    class Stop(Exception):
        pass

    class Stopper(Observer):
        def round(self, record: Any) -> None:
            if record["round"] == 1:
                raise Stop

    with pytest.raises(Stop):
        run(TASK, "fpl", **settings, out=tmp_path / "a", observers=[Stopper()])
    resumed = run(TASK, "fpl", **settings, out=tmp_path / "a", resume=True)
    assert tree.equal({"model": whole.model}, {"model": resumed.model})
    assert (
        resumed.rounds["privacy.prototypes.epsilon"] == whole.rounds["privacy.prototypes.epsilon"]
    )
    words = load_run(tmp_path / "a").summary["privacy"]
    assert "(300, 1e-05)-DP at sample level" in words["prototypes"]
    assert "(5000, 1e-05)-DP at client level" in words["model"]
    assert words["losses"] == words["accuracies"] == "no guarantee"
    with pytest.raises(ProtofedError, match=r"cannot be extended(.|\n)*privacy budget"):
        run(TASK, "fpl", **{**settings, "rounds": 5}, out=tmp_path / "a", resume=True)


def test_the_unprotected_part_is_named() -> None:
    words = run(TASK, "fpl", **SHORT, proto_epsilon=10.0).summary["privacy"]
    assert words["model"] == "no guarantee"
    assert "given the received model" in words["prototypes"]
    assert "privacy" not in run(TASK, "fedavg", **SHORT).summary
