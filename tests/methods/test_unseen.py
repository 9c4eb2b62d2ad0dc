"""Every method with a domain that no client has; and test images that nobody may learn from."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from tests.some_methods import made

from protofed import tree
from protofed.config import make_config
from protofed.data.task import Domain, Images
from protofed.federation.batches import ClientBatches
from protofed.federation.simulation import Federation
from protofed.keys import generator
from protofed.methods import METHODS, FedAvgGA
from protofed.runs.run import run
from protofed.testing.checks import CLASSES, SHORT, tiny_task

# clients leave some training images to nobody: public ones, for a method that needs them
SMALL = {**SHORT, "rounds": 2, "epochs": 1, "samples": 16}
UNSEEN = {"leave_out": "right", "clients": 2}


def task():
    """Two domains of two clients; one that is left out is tested on all of its images."""
    return dataclasses.replace(tiny_task(), whole_unseen=True)


# ---- nothing of a test set is learned from -------------------------------------------------------


def garbage(images, *key):
    """As many images of noise, all with the same label: no model scores on them as before."""
    x = generator("poison", *key).integers(0, 256, size=tuple(images.x.shape))
    return Images(torch.from_numpy(x).to(torch.uint8), torch.zeros_like(images.y))


def poisoned(clean, left_out):
    """The task with garbage for every image that is tested on."""
    domains = {
        name: Domain(
            garbage(images.train, name, "train") if name == left_out else images.train,
            garbage(images.test, name, "test"),
        )
        for name, images in clean.domains.items()
    }
    return dataclasses.replace(clean, domains=domains)


def without_accuracy(text):
    """A record or summary without times and scores: single ones, by domain, by client."""
    told = json.loads(text)
    for client in told.get("by_client", {}).values():
        client.pop("accuracy", None)
    single = {"average", "unseen_accuracy", "seen_average"}
    return {
        k: v
        for k, v in told.items()
        if k not in ("seconds", "finished", "beside", "checksum", "records")
        and not (k in single and isinstance(v, float))
        and not (k != "tested" and isinstance(v, dict) and v.keys() & {"left", "right"})
    }


def content(folder):
    """All that a run's folder holds but its accuracies and times: tensors to the last bit."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        if name == "summary.json":
            files[name] = without_accuracy(path.read_text("utf-8"))
        elif name == "rounds.jsonl":
            files[name] = [without_accuracy(t) for t in path.read_text("utf-8").splitlines()]
        elif name.endswith(".safetensors"):
            tensors, about = tree.load(path)
            bits = {
                f"{s}/{n}": t.numpy().tobytes() for s, e in tensors.items() for n, t in e.items()
            }
            # a checkpoint has a checksum of the rounds, a model what it scored
            files[name] = bits, {k: v for k, v in about.items() if k not in ("records", "accuracy")}
        else:
            files[name] = path.read_bytes()
    return files


@pytest.fixture(
    scope="module",
    params=[*((name, "right") for name in METHODS), ("fedavg_ga", None)],
    ids=lambda case: case[0] if case[1] else f"{case[0]}-in-domain",
)
def clean(request, tmp_path_factory):
    """A method's run on clean images, with a domain left out or none."""
    name, left_out = request.param
    settings = {**SMALL, **(UNSEEN if left_out else {}), "keep_rounds": "all"}
    result = run(task(), made(name), out=tmp_path_factory.mktemp(name) / "run", **settings)
    return name, left_out, settings, result


def test_no_test_image_is_used_for_training_weights_or_selection(clean, tmp_path):
    name, left_out, settings, result = clean
    spoilt = run(poisoned(task(), left_out), made(name), out=tmp_path / "spoilt", **settings)
    before, after = content(result.folder), content(spoilt.folder)
    assert list(before) == list(after)
    assert [f for f in before if before[f] != after[f]] == []
    assert {"checkpoint.safetensors", "model.safetensors", "snapshots/2.safetensors"} <= set(before)
    # the poison was there: the very same model scores differently on it
    assert [r["accuracy"] for r in result.rounds] != [r["accuracy"] for r in spoilt.rounds]


def test_the_unseen_domain_is_only_tested_on(clean):
    name, left_out, _, result = clean
    if left_out is None:
        assert result.summary.get("unseen") is None
        return
    assert {row["domain"] for row in result.summary["clients"]} == {"left"}
    assert result.summary["tested"] == {"left": 20, "right": 64}
    accuracy = result.summary["accuracy"]
    assert result.summary["unseen"] == "right"
    assert result.summary["unseen_accuracy"] == accuracy["right"]
    assert result.summary["seen_average"] == accuracy["left"]
    state, about = tree.load(result.folder / "checkpoint.safetensors")
    assert set(about["clients"]) <= {"left-0", "left-1"}
    assert all(t.isfinite().all() for slot in state.values() for t in slot.values())
    if made(name).evaluates != "global":
        return
    # the score is that of the shared model that was written down, counted once more
    federation = Federation(unseen_config(name), task())
    federation.server.state, federation.server.round = state, about["round"]
    again = federation.evaluate()["accuracy"]["right"]
    assert round(again, 4) == result.rounds[-1]["accuracy"]["right"]
    assert math.isclose(again * 64 / 100, round(again * 64 / 100), abs_tol=1e-9)


def test_the_poison_is_found_where_it_is_used():
    # the same comparison sees a difference as soon as one training image is another
    clean = task()
    images = clean.domains["left"].train
    x = images.x.clone()
    x[0] += 1
    other = Domain(Images(x, images.y), clean.domains["left"].test)
    changed = dataclasses.replace(clean, domains={**clean.domains, "left": other})
    a, b = run(clean, "fedavg", **SMALL), run(changed, "fedavg", **SMALL)
    assert not tree.equal({"model": a.model}, {"model": b.model})


# ---- the two that are made for it ---------------------------------------------------------------


def unseen_config(name):
    return make_config(task(), made(name), **SMALL, **UNSEEN)


def test_copa_asks_the_heads_of_the_seen_domains(tmp_path):
    result = run(task(), "copa", out=tmp_path, **SMALL, **UNSEEN)
    state, _ = tree.load(tmp_path / "checkpoint.safetensors")
    heads = state["heads"]
    assert heads["mask"].tolist() == [1, 1]  # left-0 and left-1, nobody else
    assert not torch.equal(heads["weight"][0], heads["weight"][1])
    federation = Federation(unseen_config("copa"), task())
    network = federation.make_network()
    own = {"head.weight": heads["weight"][0], "head.bias": heads["bias"][0]}
    network.load_state_dict({**state["model"], **own})
    network.eval()
    images, augment = federation.tests["right"], task().augment
    mean, std = (torch.tensor(v)[:, None, None] for v in (augment.mean, augment.std))
    with torch.no_grad():
        z = network((images.x / 255 - mean) / std).feature.double().numpy()
    votes = np.zeros((len(images), CLASSES))
    for weight, bias in zip(heads["weight"].numpy(), heads["bias"].numpy(), strict=True):
        logits = z @ weight.T.astype(float) + bias
        odds = np.exp(logits - logits.max(1, keepdims=True))
        votes += odds / odds.sum(1, keepdims=True) / 2
    right = (votes.argmax(1) == images.y.numpy()).mean()
    assert result.rounds[-1]["accuracy"]["right"] == pytest.approx(100 * right, abs=1e-3)


def test_ga_holds_out_samples_of_the_seen_domains(tmp_path):
    method = FedAvgGA(holdout=0.3)
    run(task(), method, out=tmp_path, **{**SMALL, "rounds": 4}, **UNSEEN)
    state, _ = tree.load(tmp_path / "checkpoint.safetensors")
    ledger = state["ga"]
    assert ledger["seen"].tolist() == [1, 1]
    assert ledger["weight"].sum() == pytest.approx(1)
    assert ledger["weight"].tolist() != [0.5, 0.5]  # the gaps moved them
    federation = Federation(make_config(task(), method, **SMALL, **UNSEEN), task())
    train, test = (task().domains["left"].train.x, task().domains["right"])
    for site in federation.clients.values():
        parts = ClientBatches(federation.setup, site).parts
        assert not set(parts["holdout"]) & set(parts["train"])
        assert len(parts["holdout"]) == 4  # of 16
        for x in site.images.x[torch.from_numpy(parts["holdout"])]:
            assert (train == x).flatten(1).all(1).any()
            assert not (test.test.x == x).flatten(1).all(1).any()


def test_a_run_says_which_domain_it_has_not_seen(tmp_path):
    run(task(), "fedavg", out=tmp_path, **SMALL, **UNSEEN)
    summary = json.loads((tmp_path / "summary.json").read_text("utf-8"))
    text = repr(run(task(), "fedavg", **SMALL, **UNSEEN))
    shown = f"right (unseen) {summary['unseen_accuracy']:.1f}, left {summary['seen_average']:.1f}"
    assert shown in text
    assert "seen average" in text
