"""Analyses, against values made by hand and on tiny runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protofed import analysis
from protofed.data.augment import normalized
from protofed.errors import ProtofedError
from protofed.runs.folder import RunFolder
from protofed.runs.result import Result, load_run
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

TASK = tiny_task()
QUICK: dict[str, Any] = {**TINY, "epochs": 1, "samples": 12, "task": TASK}


@pytest.fixture(scope="module")
def fpl(tmp_path_factory: pytest.TempPathFactory) -> Result:
    out = tmp_path_factory.mktemp("runs") / "fpl"
    return run(**QUICK, method="fpl", out=out, keep_rounds=[1, "last"])


def network_of(result: Result, model: dict[str, torch.Tensor]) -> torch.nn.Module:
    from protofed.federation.simulation import initial_network

    network = initial_network(result.found_config, TASK)
    network.load_state_dict(model)
    return network.eval()


@pytest.mark.parametrize("split", ["test", "train"])
def test_features_are_those_of_the_final_model(fpl: Result, split: str) -> None:
    z, y = analysis.features(fpl, "right", split, task=TASK)
    images = getattr(TASK.domains["right"], split)
    with torch.no_grad():
        out = network_of(fpl, fpl.model)(normalized(images.x, TASK.augment, torch.float32))
    np.testing.assert_allclose(z, out.feature, rtol=1e-5, atol=1e-6)
    assert y.tolist() == images.y.tolist()


def test_features_of_an_earlier_round(fpl: Result) -> None:
    assert fpl.folder is not None
    model = RunFolder(fpl.folder).artifact("snapshots", 1)[0]["model"]
    z, _ = analysis.features(fpl, "left", round=1, task=TASK)
    with torch.no_grad():
        x = normalized(TASK.domains["left"].test.x, TASK.augment, torch.float32)
        out = network_of(fpl, model)(x)
    np.testing.assert_allclose(z, out.feature, rtol=1e-5, atol=1e-6)
    last, _ = analysis.features(fpl, "left", round=3, task=TASK)
    assert np.array_equal(last, analysis.features(fpl, "left", task=TASK)[0])
    assert not np.allclose(z, last)
    with pytest.raises(ProtofedError, match="kept no snapshots of round 2; it kept rounds 1, 3"):
        analysis.features(fpl, "left", round=2, task=TASK)


def test_a_limit_takes_the_same_images_always(fpl: Result) -> None:
    z, y = analysis.features(fpl, "left", task=TASK, limit=7)
    again, _ = analysis.features(fpl, "left", task=TASK, limit=7)
    every, _ = analysis.features(fpl, "left", task=TASK)
    assert len(z) == len(y) == 7
    assert np.array_equal(z, again)
    assert all(np.isclose(every, row, atol=1e-6).all(1).any() for row in z)
    assert len(analysis.features(fpl, "left", task=TASK, limit=999)[0]) == 20


def test_names_that_are_not_there(fpl: Result) -> None:
    with pytest.raises(ProtofedError, match="unknown domain of tiny 'middle'"):
        analysis.features(fpl, "middle", task=TASK)
    with pytest.raises(ProtofedError, match="unknown split"):
        analysis.features(fpl, "left", "validation", task=TASK)


def test_confusion_agrees_with_the_recorded_accuracy(fpl: Result) -> None:
    for domain in ("left", "right"):
        counts = analysis.confusion(fpl, domain, task=TASK)
        assert counts.shape == (4, 4) and counts.sum() == 20
        assert counts.sum(1).tolist() == [5, 5, 5, 5]  # rows are true classes
        assert 100 * counts.trace() / 20 == pytest.approx(fpl.rounds[-1]["accuracy"][domain])
    assert np.array_equal(
        analysis.confusion(fpl, "left", round=1, task=TASK).trace() * 5,
        fpl.rounds[0]["accuracy"]["left"],
    )


def test_confusion_of_clients_with_own_models(tmp_path: Path) -> None:
    result = run(**QUICK, method="fedbn", out=tmp_path)
    assert result.config.method.evaluates == "clients"
    counts = analysis.confusion(result, "left", task=TASK)
    assert counts.sum() == 40  # both clients of the domain
    assert 100 * counts.trace() / 40 == pytest.approx(result.rounds[-1]["accuracy"]["left"])
    with pytest.raises(ProtofedError, match="keep their own models"):
        analysis.features(result, "left", round=1, task=TASK)


def test_a_run_in_memory_has_features_and_no_prototypes() -> None:
    result = run(**QUICK, method="fedavg")
    assert analysis.features(result, "left", task=TASK)[0].shape[0] == 20
    assert analysis.prototype_rounds(result) == []
    assert analysis.clusters(result) == []
    with pytest.raises(ProtofedError, match="no folder, and so no prototypes"):
        analysis.prototypes(result)


def test_counts() -> None:
    out = analysis.Outputs(np.zeros((4, 1)), np.array([0, 0, 1, 2]), np.array([0, 1, 1, 0]))
    assert analysis.counts(out, 3).tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 0]]


# ---- prototypes --------------------------------------------------------------------------------


@pytest.fixture
def handmade(fpl: Result, tmp_path: Path) -> Result:
    """A run that kept prototypes of two clients along x and two along y; c1 lacks class b."""
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    kept = {"down": {"cluster.mean": torch.stack([x, y])[None].repeat(2, 1, 1),
                     "cluster.mask": torch.tensor([[1.0, 1.0], [1.0, 0.0]])}}  # fmt: skip
    for i, (way, count) in enumerate(((x, 3), (2 * x, 0), (y, 3), (3 * y, 1))):
        mean = torch.stack([way, way])
        kept[f"up{i}"] = {"p.mean": mean, "p.count": torch.tensor([5.0, float(count)])}
    clients = [{"client": f"c{i}", "domain": "xxyy"[i]} for i in range(4)]
    metadata = {"clients": clients, "classes": ["a", "b"]}
    RunFolder(tmp_path).save_artifact("prototypes", 3, kept, metadata)
    return Result(fpl.config, fpl.rounds, fpl.summary, fpl.stored, tmp_path)


def test_prototypes_as_rows(handmade: Result) -> None:
    kept = analysis.prototypes(handmade)
    assert (kept.round, kept.classes) == (3, ("a", "b"))
    assert kept.domains == {"c0": "x", "c1": "x", "c2": "y", "c3": "y"}
    assert kept.sent["c1"][0].tolist() == [[2, 0]] and kept.sent["c1"][1].tolist() == [0]
    assert kept.sent["c3"][1].tolist() == [0, 1]
    rows, classes = kept.made["cluster"]
    assert rows.tolist() == [[1, 0], [0, 1], [1, 0]] and classes.tolist() == [0, 0, 1]


def test_prototype_distances_by_hand(handmade: Result) -> None:
    found = analysis.prototype_distances(handmade, 3)
    assert found.clients == ("c0", "c1", "c2", "c3") and found.classes == ("a", "b")
    # lengths do not matter: same axis 0, other axis 1
    assert found.cosine[0].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert np.isnan(found.cosine[1, 1]).all() and np.isnan(found.cosine[1, :, 1]).all()
    assert found.cosine[1, 0, 2] == 1 and found.cosine[1, 2, 3] == pytest.approx(0)


def test_clusters_by_hand(handmade: Result) -> None:
    (found,) = analysis.clusters(handmade)
    assert found.round == 3
    assert found.members["a"] == (("c0", "c1"), ("c2", "c3"))
    assert found.counts["a"] == 2
    # three of b: FINCH links the lone c0 to a neighbor, so there is one cluster
    assert sum(map(len, found.members["b"])) == 3


@pytest.mark.parametrize("level", ["first", "last"])
def test_clusters_are_those_that_fpls_server_made(tmp_path: Path, level: str) -> None:
    result = run(**QUICK, method="fpl", options={"finch_level": level}, out=tmp_path)
    found = analysis.clusters(result)
    assert [f.round for f in found] == [1, 2, 3] == analysis.prototype_rounds(result)
    for f in found:
        _, classes = analysis.prototypes(result, f.round).made["cluster"]
        made = np.bincount(classes, minlength=4)
        assert list(f.counts.values()) == made.tolist()
        for members in f.members.values():
            clients = sorted(c for own in members for c in own)
            assert clients == ["left-0", "left-1", "right-0", "right-1"]


def test_several_prototypes_a_class(tmp_path: Path) -> None:
    result = run(**QUICK, method="fedplvm", out=tmp_path)
    kept = analysis.prototypes(result)
    assert all(len(z) >= 4 for z, _ in kept.sent.values())
    assert analysis.prototype_distances(result).cosine.shape == (4, 4, 4)
    assert all(f.counts["a"] >= 1 for f in analysis.clusters(result))


# ---- features ----------------------------------------------------------------------------------


def test_tsne_is_deterministic_and_keeps_groups_apart() -> None:
    rng = np.random.default_rng(0)
    z = np.concatenate([rng.normal(c, 0.1, size=(20, 5)) for c in (0, 5)])
    places = analysis.tsne(z)
    assert places.shape == (40, 2)
    assert np.array_equal(places, analysis.tsne(z))
    assert not np.array_equal(places, analysis.tsne(z, seed=1))
    a, b = places[:20], places[20:]
    within = max(np.linalg.norm(g - g.mean(0), axis=1).mean() for g in (a, b))
    assert np.linalg.norm(a.mean(0) - b.mean(0)) > 2 * within


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_tsne_of_very_few(n: int) -> None:
    places = analysis.tsne(np.eye(6)[:n])
    assert places.shape == (n, 2) and np.isfinite(places).all()


def test_gap_by_hand() -> None:
    axes = np.eye(4)
    y = np.repeat([0, 1], 10)
    near = np.concatenate([np.tile(axes[k], (10, 1)) for k in (0, 1)])
    far = np.concatenate([np.tile(axes[k], (10, 1)) for k in (2, 3)])
    same = analysis.gap({"a": (near, y), "b": (2 * near, y)})
    assert same.distance == pytest.approx(0) and same.ratio == pytest.approx(0)
    assert same.classes == pytest.approx(1) and same.chance == 50
    apart = analysis.gap({"a": (near, y), "b": (far, y)})
    assert apart.distance == pytest.approx(1) and apart.ratio == pytest.approx(1)
    assert apart.probe == 100
    half = analysis.gap({"a": (near, y), "b": (near + far, y)})
    assert half.distance == pytest.approx(1 - 1 / np.sqrt(2))


def test_the_probe_is_at_chance_where_domains_cannot_be_told() -> None:
    rng = np.random.default_rng(1)
    z, y = rng.normal(size=(3, 200, 5)), np.zeros(200, dtype=np.int64)
    blind = analysis.gap({str(i): (z[i], y) for i in range(3)})
    assert blind.chance == pytest.approx(100 / 3)
    assert abs(blind.probe - blind.chance) < 8
    # one class only: nothing to measure the distance by
    assert np.isnan(blind.ratio)


def test_classes_that_only_one_domain_has_do_not_count() -> None:
    a = (np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([0, 1]))
    b = (np.array([[0.0, 1.0], [0.0, 1.0]]), np.array([1, 1]))
    assert analysis.gap({"a": a, "b": b}).distance == pytest.approx(0)


def test_domain_gap_of_a_run(fpl: Result) -> None:
    found = analysis.domain_gap(fpl, task=TASK)
    pairs = {d: analysis.features(fpl, d, task=TASK) for d in TASK.domains}
    assert found == analysis.gap(pairs)
    assert 0 <= found.distance <= 2 and 0 <= found.probe <= 100


def test_a_folder_is_as_good_as_a_result(tmp_path: Path) -> None:
    small = {**TINY, "rounds": 1, "epochs": 1, "samples": 10, "clients": 1}
    result = run("glyphs", "fedproto", out=tmp_path, **small)
    z, y = analysis.features(tmp_path, "photo", limit=10)
    assert np.array_equal(z, analysis.features(str(tmp_path), "photo", limit=10)[0])
    assert np.array_equal(z, analysis.features(load_run(tmp_path), "photo", limit=10)[0])
    assert z.shape[0] == y.shape[0] == 10
    total = analysis.confusion(tmp_path, "photo")
    assert 100 * total.trace() / total.sum() == pytest.approx(
        result.rounds[-1]["accuracy"]["photo"]
    )
