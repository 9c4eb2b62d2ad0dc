from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from protofed.cli.app import app
from protofed.config import Config, make_config, read_config
from protofed.data import Augment, Domain, Images, Share, Task, distribution, distributions, split
from protofed.data.split import apportion
from protofed.errors import ProtofedError
from protofed.federation.client_round import evaluate
from protofed.method import Entry
from protofed.methods.fedavg import FedAvg
from protofed.observers.progress import client_lines
from protofed.runs.run import Federation, load_run, run
from protofed.studies.tables import caption
from protofed.testing.checks import TINY, tiny_task

DIGITS = ("mnist", "usps", "svhn", "syn")
OFFICE = ("caltech", "amazon", "webcam", "dslr")
PACS = ("photo", "art_painting", "cartoon", "sketch")
VLCS = ("caltech", "labelme", "pascal", "sun")


def images(labels: Sequence[int], side: int = 1) -> Images:
    y = torch.tensor(list(labels), dtype=torch.int64)
    shape = (len(y), 3, side, side)
    return Images(torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, np.uint8)), y)


def made(
    labels: Mapping[str, Sequence[int]],
    name: str = "made",
    classes: int = 5,
    clients: int | Mapping[str, int] = 2,
    samples: float = 0.2,
    leftover: bool = False,
    repair: bool = False,
    side: int = 1,
) -> Task:
    """A task with these training labels per domain and ten test images."""
    counts = clients if isinstance(clients, Mapping) else dict.fromkeys(labels, clients)
    return Task(
        name=name,
        classes=tuple(f"class {k}" for k in range(classes)),
        domains={d: Domain(images(y, side), images(range(10), side)) for d, y in labels.items()},
        augment=Augment(),
        clients=counts,
        samples=dict.fromkeys(labels, samples),
        leftover=leftover,
        repair=repair,
    )


def named(name: str, domains: Sequence[str]) -> Task:
    return made(dict.fromkeys(domains, range(5)), name)


def balanced(per_class: int, classes: int = 5, **kwargs: Any) -> Task:
    labels = [k for k in range(classes) for _ in range(per_class)]
    return made({"a": labels}, classes=classes, **kwargs)


def sizes(shares: Sequence[Share]) -> list[int]:
    return [len(s.rows) for s in shares]


def no_overlap(shares: Sequence[Share]) -> bool:
    seen = Counter((s.domain, int(r)) for s in shares for r in s.rows)
    return max(seen.values()) == 1


def class_counts(task: Task, share: Share) -> list[int]:
    labels = task.domains[share.domain].train.y[share.rows]
    return torch.bincount(labels, minlength=len(task.classes)).tolist()


def same(a: Sequence[Share], b: Sequence[Share]) -> bool:
    return all(torch.equal(s.rows, t.rows) for s, t in zip(a, b, strict=True))


# ---- named distributions -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "domains", "name", "counts"),
    [
        ("digits", DIGITS, "skewed", (6, 4, 3, 7)),
        ("digits", DIGITS, "equal", (5, 5, 5, 5)),
        ("digits", DIGITS, "printed", (3, 7, 6, 4)),
        ("digits", DIGITS, "fedseproto", (2, 3, 4, 1)),
        ("digits", DIGITS, "one", (1, 1, 1, 1)),
        ("office_caltech", OFFICE, "skewed", (3, 2, 1, 4)),
        ("office_caltech", OFFICE, "equal", (3, 3, 3, 3)),
        ("office_caltech", OFFICE, "fedseproto", (2, 3, 4, 1)),
        ("pacs", PACS, "skewed", (3, 2, 1, 4)),
        ("pacs", PACS, "equal", (3, 3, 3, 3)),
        ("pacs", PACS, "fedseproto", (2, 3, 4, 1)),
        ("vlcs", VLCS, "skewed", (2, 3, 4, 1)),
        ("vlcs", VLCS, "equal", (3, 3, 3, 3)),
        ("vlcs", VLCS, "fedseproto", (2, 3, 4, 1)),
    ],
)
def test_published_distributions(
    task: str, domains: Sequence[str], name: str, counts: tuple[int, ...]
) -> None:
    assert distribution(named(task, domains), name) == dict(zip(domains, counts, strict=True))


@pytest.mark.parametrize(
    ("task", "domains", "seed", "counts"),
    [
        ("digits", DIGITS, 0, [6, 4, 3, 7]),  # METHODS.md A3: what the code's draw gives
        ("digits", DIGITS, 1, [7, 6, 2, 5]),
        ("office_caltech", OFFICE, 0, [3, 2, 1, 4]),
        ("pacs", PACS, 0, [3, 2, 1, 4]),
    ],
)
def test_random_is_the_published_draw(
    task: str, domains: Sequence[str], seed: int, counts: list[int]
) -> None:
    assert list(distribution(named(task, domains), "random", seed).values()) == counts


def test_random_draws_keep_their_totals_and_limits() -> None:
    digits, office = named("digits", DIGITS), named("office_caltech", OFFICE)
    global_state = np.random.get_state()[1].copy()  # type: ignore[index]
    for seed in range(300):
        counts = distribution(digits, "random", seed).values()
        assert sum(counts) == 20
        assert max(counts) <= 10
        counts = distribution(office, "random", seed).values()
        assert sum(counts) == 10
        assert min(counts) >= 1
    assert np.array_equal(np.random.get_state()[1], global_state)  # type: ignore[index]


def test_a_draw_with_more_than_ten_clients_of_a_domain_is_repeated() -> None:
    rng = np.random.RandomState
    first = [np.bincount(rng(s).choice(4, 20), minlength=4).max() for s in range(2000)]
    seed = next(s for s, most in enumerate(first) if most > 10)
    stream = rng(seed)
    stream.choice(4, 20)
    again = np.bincount(stream.choice(4, 20), minlength=4).tolist()
    assert list(distribution(named("digits", DIGITS), "random", seed).values()) == again


def test_any_task_has_the_four_names() -> None:
    task = made({"a": range(9), "b": range(9), "c": range(9)}, clients={"a": 400, "b": 1, "c": 1})
    assert distributions(task) == ("skewed", "equal", "one", "random")
    assert distribution(task, "skewed") == {"a": 400, "b": 1, "c": 1}
    assert distribution(task, "equal") == {"a": 134, "b": 134, "c": 134}
    assert distribution(task, "one") == {"a": 1, "b": 1, "c": 1}
    assert sum(distribution(task, "random", 3).values()) == 402


def test_glyphs_have_enough_for_every_distribution() -> None:
    for name, counts in {"skewed": [4, 3, 2, 1], "equal": [3, 3, 3, 3], "one": [1] * 4}.items():
        config = make_config("glyphs", clients=name)
        assert list(config.clients.values()) == counts
        assert len(Federation(config).shares) == sum(counts)


def test_an_unknown_distribution_names_the_nearest() -> None:
    with pytest.raises(ProtofedError, match=r"distribution of digits 'eqal' \(did you mean equal"):
        distribution(named("digits", DIGITS), "eqal")
    with pytest.raises(ProtofedError, match="unknown client distribution of tiny 'printed'"):
        make_config(tiny_task(), clients="printed")


# ---- counts, what is left, errors ---------------------------------------------------------------


def test_counts_are_exact_and_without_overlap() -> None:
    task = made({"a": [0] * 50, "b": [1] * 31})
    shares = split(task, {"a": 4, "b": 3}, {"a": 12, "b": 0.3}, 0)
    assert sizes(shares) == [12] * 4 + [9] * 3  # int(0.3 · 31) = 9
    assert [s.name for s in shares[:2]] == ["a-0", "a-1"]
    assert no_overlap(shares)
    assert not any(s.note for s in shares)


def test_too_many_is_an_error_with_the_numbers() -> None:
    task = made({"a": [0] * 50})
    with pytest.raises(ProtofedError) as error:
        split(task, {"a": 4}, {"a": 13}, 0)
    assert "domain 'a' has 50 training images: too few for 4 clients with 13 each" in str(error)
    assert "at most 12 each for 4 clients" in str(error)
    with pytest.raises(ProtofedError, match=r"0\.01 of the 50 training images of domain 'a'"):
        split(task, {"a": 4}, {"a": 0.01}, 0)


@pytest.mark.parametrize(
    ("pool", "wanted"),
    [(3144, [943, 943, 943, 315]), (3531, [1059, 1059, 1059, 354]), (34, [10, 10, 10, 4])],
)
def test_the_fourth_sketch_client_gets_what_is_left(pool: int, wanted: list[int]) -> None:
    labels = [i % 7 for i in range(pool)]
    task = made({"sketch": labels}, "pacs", 7, clients=4, samples=0.3, leftover=True)
    shares = split(task, task.clients, task.samples, 0)
    assert sizes(shares) == wanted
    assert no_overlap(shares)
    each, last = wanted[0], wanted[-1]
    assert [s.note for s in shares] == [
        *[""] * 3,
        f"gets {last} of {each} samples: what was left",
    ]
    with pytest.raises(ProtofedError, match=f"too few for 4 clients with {each} each"):
        split(task, task.clients, task.samples, 0, leftover=False)
    # up to the fourth client the rule changes nothing
    assert same(shares[:3], split(task, {"sketch": 3}, task.samples, 0, leftover=False))


def test_what_is_left_is_never_nothing() -> None:
    task = made({"a": [0] * 20}, leftover=True)
    with pytest.raises(ProtofedError, match="3 clients with 10 each, nothing is left for a-2"):
        split(task, {"a": 3}, {"a": 10}, 0)


def test_pacs_numbers_of_the_clean_split() -> None:
    pools = dict(zip(PACS, (1336, 1640, 1876, 3144), strict=True))
    labels = {d: [i % 7 for i in range(n)] for d, n in pools.items()}
    task = made(labels, "pacs", 7, samples=0.3, leftover=True)
    config = make_config(task, clients="skewed", device="cpu")
    shares = split(task, config.clients, config.samples, 0, leftover=config.leftover)
    assert sizes(shares) == [400] * 3 + [492] * 2 + [562] + [943] * 3 + [315]


# ---- class repair -------------------------------------------------------------------------------


def test_repair_gives_every_class_and_keeps_the_size() -> None:
    labels = [0] * 60 + [1] * 30 + [2] * 3 + [3] * 2 + [4]
    task = made({"a": labels}, repair=True)
    plain = split(task, {"a": 4}, {"a": 12}, 0, repair=False)
    shares = split(task, {"a": 4}, {"a": 12}, 0)
    assert any(0 in class_counts(task, s) for s in plain)  # or this test tests nothing
    assert sizes(shares) == [12] * 4
    for before, after in zip(plain, shares, strict=True):
        missing = [k for k, n in enumerate(class_counts(task, before)) if not n]
        counts = class_counts(task, after)
        assert min(counts) >= 1
        assert all(counts[k] == 1 for k in missing)
        assert int((before.rows != after.rows).sum()) == len(missing)
        assert len(set(after.rows.tolist())) == 12  # its own samples are all different
        if missing:
            assert f"no sample of {', '.join(f'class {k}' for k in missing)}:" in after.note
        else:
            assert not after.note
    assert same(shares, split(task, {"a": 4}, {"a": 12}, 0))


def test_repair_leaves_what_a_domain_does_not_have_and_complete_clients() -> None:
    task = made({"a": [0, 1] * 20}, repair=True)
    shares = split(task, {"a": 2}, {"a": 10}, 0)
    assert same(shares, split(task, {"a": 2}, {"a": 10}, 0, repair=False))


def test_repair_replaces_only_classes_held_twice() -> None:
    task = made({"a": [0] * 40 + [1, 2, 3, 4]}, repair=True)
    share = split(task, {"a": 1}, {"a": 5}, 0)[0]
    assert class_counts(task, share) == [1, 1, 1, 1, 1]


def test_repair_that_cannot_be_is_an_error() -> None:
    task = balanced(8, repair=True)
    with pytest.raises(ProtofedError, match=r"a-0 has 4 samples of .* 5 classes of its domain"):
        split(task, {"a": 2}, {"a": 4}, 0)


def test_label_skew_turns_repair_off_unless_asked_for() -> None:
    task = balanced(100, repair=True)
    skewed = split(task, {"a": 4}, {"a": 20}, 0, dirichlet=0.01)
    assert any(0 in class_counts(task, s) for s in skewed)
    mended = split(task, {"a": 4}, {"a": 20}, 0, dirichlet=0.01, repair=True)
    assert all(0 not in class_counts(task, s) for s in mended)
    assert make_config(task, device="cpu").repair
    assert not make_config(task, device="cpu", dirichlet=0.1).repair
    assert make_config(task, device="cpu", dirichlet=0.1, repair=True).repair


# ---- label skew and quantity skew ---------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1e-6, 1e-3, 0.01, 0.3, 10.0, 1e6])
@pytest.mark.parametrize("each", [1, 30, 125])
def test_label_skew_keeps_sizes_without_overlap(alpha: float, each: int) -> None:
    task = balanced(100)
    for seed in range(5):
        shares = split(task, {"a": 4}, {"a": each}, seed, dirichlet=alpha)
        assert sizes(shares) == [each] * 4
        assert no_overlap(shares)
        assert same(shares, split(task, {"a": 4}, {"a": each}, seed, dirichlet=alpha))


def test_all_samples_are_dealt_even_with_rare_classes() -> None:
    labels = [0] * 97 + [1, 1, 2]
    task = made({"a": labels})
    shares = split(task, {"a": 10}, {"a": 10}, 0, dirichlet=1e-3)
    assert sorted(int(r) for s in shares for r in s.rows) == list(range(100))


def test_a_large_alpha_follows_the_domain_and_a_small_one_concentrates() -> None:
    task = balanced(400)
    even = split(task, {"a": 4}, {"a": 100}, 0, dirichlet=1e6)
    for share in even:
        assert all(abs(n - 20) <= 1 for n in class_counts(task, share))
    uneven = made({"a": [0] * 600 + [1] * 300 + [2] * 100})
    for share in split(uneven, {"a": 3}, {"a": 100}, 0, dirichlet=1e6):
        assert np.abs(np.array(class_counts(uneven, share)[:3]) - (60, 30, 10)).max() <= 1
    for share in split(task, {"a": 4}, {"a": 100}, 0, dirichlet=1e-3):
        assert max(class_counts(task, share)) >= 90

    def largest(alpha: float) -> float:
        """Mean share of a client's largest class, over many draws."""
        shares = [
            s for seed in range(40) for s in split(task, {"a": 4}, {"a": 50}, seed, dirichlet=alpha)
        ]
        return float(np.mean([max(class_counts(task, s)) / 50 for s in shares]))

    means = [largest(a) for a in (0.05, 0.5, 5.0, 500.0)]
    assert means == sorted(means, reverse=True)
    # E max of Dirichlet(0.5, ...) over five classes, simulated: 0.541
    draws = np.random.default_rng(0).dirichlet(np.full(5, 0.5), 20000).max(1).mean()
    assert abs(means[1] - draws) < 0.06


def test_label_skew_differs_between_clients_domains_and_seeds() -> None:
    labels = [k for k in range(5) for _ in range(200)]
    task = made({"a": labels, "b": labels})
    counts = [
        tuple(class_counts(task, s))
        for seed in (0, 1)
        for s in split(task, {"a": 2, "b": 2}, {"a": 100, "b": 100}, seed, dirichlet=0.5)
    ]
    assert len(set(counts)) == 8


@pytest.mark.parametrize("beta", [1e-6, 1e-3, 0.5, 5.0, 1e6])
def test_quantity_skew_keeps_the_total(beta: float) -> None:
    task = balanced(100)
    for seed in range(5):
        shares = split(task, {"a": 6}, {"a": 50}, seed, quantity=beta)
        assert sum(sizes(shares)) == 300
        assert min(sizes(shares)) >= 1
        assert no_overlap(shares)
        assert same(shares, split(task, {"a": 6}, {"a": 50}, seed, quantity=beta))
    if beta == 1e6:
        assert all(abs(n - 50) <= 1 for n in sizes(shares))
    if beta == 1e-3:
        assert max(sizes(shares)) >= 280


def test_quantity_skew_of_single_samples_and_of_what_is_left() -> None:
    task = balanced(4, leftover=True)
    assert sizes(split(task, {"a": 3}, {"a": 1}, 0, quantity=0.1)) == [1, 1, 1]
    shares = split(task, {"a": 3}, {"a": 8}, 0, quantity=0.5)
    assert sum(sizes(shares)) == 20
    assert shares[-1].note == "a's clients share 20 samples: what there is"


def test_both_skews_together() -> None:
    task = balanced(60)
    sized = split(task, {"a": 5}, {"a": 60}, 3, quantity=0.7)
    both = split(task, {"a": 5}, {"a": 60}, 3, quantity=0.7, dirichlet=0.05)
    assert sizes(both) == sizes(sized)
    assert no_overlap(both)


def test_without_options_the_split_is_a_permutation_cut_into_pieces() -> None:
    task = balanced(40)
    shares = split(task, {"a": 3}, {"a": 20}, 7)
    more = split(task, {"a": 5}, {"a": 20}, 7)
    assert same(shares, more[:3])
    assert not same(shares, split(task, {"a": 3}, {"a": 20}, 8))


@pytest.mark.parametrize(
    ("total", "weights", "wanted"),
    [
        (10, [1, 1, 1], [4, 3, 3]),
        (7, [0.5, 0.25, 0.25], [3, 2, 2]),
        (5, [0, 1, 0], [0, 5, 0]),
        (0, [0.2, 0.8], [0, 0]),
        (1, [0.2, 0.8], [0, 1]),
    ],
)
def test_apportion(total: int, weights: list[float], wanted: list[int]) -> None:
    assert apportion(total, np.array(weights, float)).tolist() == wanted


def test_apportion_always_adds_up() -> None:
    rng = np.random.default_rng(1)
    for _ in range(2000):
        weights = rng.dirichlet(np.full(rng.integers(1, 30), 10 ** rng.uniform(-4, 4)))
        total = int(rng.integers(0, 100_000))
        parts = apportion(total, weights)
        assert parts.sum() == total
        assert (parts >= 0).all()
        assert np.abs(parts - total * weights).max() <= 1 + 1e-6


# ---- configuration ------------------------------------------------------------------------------


def config_of(tmp_path: Path, task: Task, **settings: Any) -> tuple[Config, Config]:
    """A configuration, and what is read back from its TOML."""
    config = make_config(task, device="cpu", **settings)
    path = tmp_path / "config.toml"
    path.write_text(config.toml(), encoding="utf-8")
    return config, make_config(**{**read_config(path), "task": task})


def test_round_trip_of_all_settings(tmp_path: Path) -> None:
    task = named("digits", DIGITS)
    config, again = config_of(
        tmp_path,
        task,
        clients="equal",
        leave_out="svhn",
        dirichlet=0.5,
        quantity=2.0,
        leftover=True,
        repair=True,
    )
    assert again == config
    assert again.hash == config.hash
    assert config.clients == {"mnist": 5, "usps": 5, "svhn": 0, "syn": 5}
    assert 'leave_out = "svhn"' in config.toml()
    plain, again = config_of(tmp_path, task)
    assert again == plain
    assert (plain.leave_out, plain.dirichlet, plain.quantity) == (None, None, None)
    assert (plain.leftover, plain.repair) == (False, False)


def test_a_name_in_toml_becomes_numbers(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('task = "glyphs"\nclients = "equal"\nleave_out = "photo"\n', encoding="utf-8")
    config = make_config(**read_config(path))
    assert config.clients == {"scan": 3, "print": 3, "photo": 0, "inverse": 3}
    assert "[clients]\nscan = 3\nprint = 3\nphoto = 0\ninverse = 3\n" in config.toml()


def test_every_setting_changes_the_hash() -> None:
    task = tiny_task()
    settings: list[dict[str, Any]] = [
        {},
        {"leave_out": "left"},
        {"dirichlet": 0.5},
        {"quantity": 0.5},
        {"leftover": True},
        {"repair": True},
        {"clients": "one"},
    ]
    assert len({make_config(task, device="cpu", **s).hash for s in settings}) == len(settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dirichlet": 0.0}, "dirichlet must be a number from 1e-6 to 1e6, got 0.0"),
        ({"dirichlet": float("nan")}, "dirichlet must be"),
        ({"quantity": -1.0}, "quantity must be"),
        ({"leftover": "yes"}, "leftover must be true or false, got 'yes'"),
        ({"repair": 1}, "repair must be true or false"),
        ({"leave_out": "lft"}, r"unknown domain of tiny 'lft' \(did you mean left"),
        ({"leave_out": "left", "clients": {"left": 2, "right": 1}}, "left out, but has 2 clients"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ProtofedError, match=words):
        make_config(tiny_task(), device="cpu", **settings)


def test_clients_with_a_domain_left_out() -> None:
    task = tiny_task()

    def clients(**settings: Any) -> Mapping[str, int]:
        return make_config(task, device="cpu", leave_out="left", **settings).clients

    assert clients() == {"left": 0, "right": 1}
    assert clients(clients="skewed") == {"left": 0, "right": 2}
    assert clients(clients=2) == {"left": 0, "right": 2}
    assert clients(clients={"right": 2}) == {"left": 0, "right": 2}
    assert clients(clients={"left": 0, "right": 2}) == {"left": 0, "right": 2}


# ---- in a run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
def test_a_left_out_domain_is_only_tested_on(tmp_path: Path, whole: bool) -> None:
    plain = tiny_task()
    task = Task(**{**plain.__dict__, "whole_unseen": whole})
    result = run(task, leave_out="right", clients="skewed", out=tmp_path / "run", **TINY)
    assert {row["domain"] for row in result.summary["clients"]} == {"left"}
    assert result.summary["unseen"] == "right"
    assert result.summary["tested"] == {"left": 20, "right": 64 if whole else 20}
    assert all(set(r["accuracy"]) == {"left", "right"} for r in result.rounds)
    assert set(result.summary["accuracy"]) == {"left", "right", "average"}
    tested = 64 if whole else 20
    assert f"right left out of training and tested on {tested} images" in caption([result])
    assert f"tested on, with {tested} images" in client_lines(Federation(result.config, task))[1]
    # it trains as if the domain were not there
    other = run(task, clients={"left": 2, "right": 0}, **TINY)
    assert all(torch.equal(result.model[n], other.model[n]) for n in result.model)


def test_the_unseen_test_set_is_the_whole_domain() -> None:
    task = Task(**{**tiny_task().__dict__, "whole_unseen": True})
    config = make_config(task, leave_out="right", **TINY)
    tests, right = Federation(config, task).tests, task.domains["right"]
    assert torch.equal(tests["right"].x, torch.cat([right.test.x, right.train.x]))
    assert torch.equal(tests["right"].y, torch.cat([right.test.y, right.train.y]))
    assert torch.equal(tests["left"].x, task.domains["left"].test.x)


@dataclass(frozen=True)
class OwnNorm(FedAvg):
    """FedAvg whose clients keep their BatchNorm: there is no global model to test."""

    name: ClassVar[str] = "ownnorm"

    @property
    def evaluates(self) -> str:
        return "clients"

    def shared(self, entry: Entry) -> Literal["both", "no"]:
        return "no" if entry.kind == "bn" else "both"


def test_own_models_of_all_clients_are_tested_on_an_unseen_domain() -> None:
    task = tiny_task()
    result = run(task, OwnNorm(), leave_out="right", clients="skewed", **TINY)
    assert result.summary["evaluated"] != "global"
    assert all(list(r["accuracy"]) == ["left", "right"] for r in result.rounds)
    federation = Federation(result.config, task)
    federation.run_round()
    received = federation.server.broadcast()
    network = federation.make_network()
    scores = [
        evaluate(federation.setup, network, received, federation.store.get(name), federation.tests)
        for name in federation.sites
    ]
    mean = sum(s["accuracy"]["right"] for s in scores) / len(scores)
    assert federation.evaluate()["accuracy"]["right"] == pytest.approx(mean)


def test_clients_table_is_stored_and_shown(tmp_path: Path) -> None:
    labels = [0] * 10 + [1] * 10 + [2] * 4
    task = made({"a": labels, "b": labels}, samples=9, leftover=True, side=8)
    config = make_config(
        task, clients={"a": 3, "b": 1}, model="cnn2", width=4, device="cpu", rounds=1, epochs=1
    )
    federation = Federation(config, task)
    table = federation.table()
    assert [row["samples"] for row in table] == [9, 9, 6, 9]
    for row in table:
        assert sum(row["per_class"].values()) == row["samples"]
        assert len(row["per_class"]) == row["classes"]
    totals = sum((Counter(r["per_class"]) for r in table if r["domain"] == "a"), Counter[str]())
    assert totals == {"class 0": 10, "class 1": 10, "class 2": 4}
    lines = client_lines(federation)
    assert lines[0].startswith("  a  3 clients × 6–9 samples, ")
    assert lines[1].startswith("  b  1 client × 9 samples, ")
    assert lines[2] == "  a-2 gets 6 of 9 samples: what was left"

    result = run(tiny_task(), out=tmp_path / "run", dirichlet=0.1, **TINY)
    stored = json.loads((tmp_path / "run" / "clients.json").read_text("utf-8"))["clients"]
    assert stored == result.summary["clients"]
    assert stored[0].keys() == {"client", "domain", "model", "samples", "classes", "per_class"}
    assert "label skew Dirichlet(0.1)" in caption([result])


def test_clients_json_is_there_from_the_start(tmp_path: Path) -> None:
    from protofed.testing.checks import _Interrupt

    with pytest.raises(KeyboardInterrupt):
        run(tiny_task(), out=tmp_path / "run", observers=[_Interrupt(after=0)], **TINY)
    assert len(json.loads((tmp_path / "run" / "clients.json").read_text("utf-8"))["clients"]) == 4


def test_skewed_runs_resume_to_the_same_numbers(tmp_path: Path) -> None:
    from protofed.testing.checks import _Interrupt, _same

    settings = {**TINY, "dirichlet": 0.3, "quantity": 0.5, "repair": True}
    whole = run(tiny_task(), **settings)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_task(), out=tmp_path / "r", observers=[_Interrupt(after=1)], **settings)
    assert _same(whole, run(tiny_task(), out=tmp_path / "r", resume=True, **settings))


def test_command_line_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = "run --task glyphs --leave-out inverse --rounds 1 --epochs 1 --samples 20 --width 4"
    result = CliRunner().invoke(
        app, [*command.split(), "--dirichlet", "0.5", "--no-repair", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert "3 clients" in result.output
    assert "inverse  left out: only tested on, with 450 images" in result.output
    loaded = load_run(out)
    assert loaded.config.clients == {"scan": 1, "print": 1, "photo": 1, "inverse": 0}
    assert loaded.config.dirichlet == 0.5
    assert loaded.summary["unseen"] == "inverse"
    assert (out / "clients.json").is_file()


def test_command_line_says_what_is_wrong(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for words, command in {
        "unknown domain of glyphs 'invers' (did you mean inverse": "--leave-out invers",
        "unknown client distribution of glyphs 'equl' (did you mean equal": "--clients equl",
        "domain 'photo' has 350 training images: too few for 5 clients with 80": "--clients 5",
    }.items():
        result = CliRunner().invoke(app, ["run", "--out", str(out), *command.split()])
        assert result.exit_code
        assert words in str(result.exception)
    assert not out.exists()


@pytest.mark.parametrize("command", ["run", "compare"])
def test_help_has_every_option(command: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, "--help"])
    for option in ("leave-out", "dirichlet", "quantity", "leftover", "no-leftover", "repair"):
        assert f"--{option}" in result.output
