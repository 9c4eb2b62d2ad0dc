from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from protofed.config import make_config
from protofed.data import DataMissing, Share, describe, load_task
from protofed.data.split import apportion, hold_out, split, unused, validation_rows
from protofed.data.task import Augment, Domain, Images, Task
from protofed.errors import ProtofedError
from protofed.federation.simulation import make_shares
from tests.data.made_tasks import balanced, class_counts, made, no_overlap, same, sizes

SIZES = {"scan": 40, "print": 30, "photo": 7}


def images(n: int) -> Images:
    return Images(torch.zeros(n, 3, 8, 8, dtype=torch.uint8), torch.arange(n) % 4)


@pytest.fixture
def task() -> Task:
    domains = {name: Domain(images(n), images(4)) for name, n in SIZES.items()}
    return Task("toy", tuple("abcd"), domains, Augment(), dict.fromkeys(SIZES, 1), {})


def test_counts_names_and_domains(task: Task) -> None:
    shares = split(task, {"scan": 3, "photo": 2}, {"scan": 13, "photo": 2}, seed=0)
    assert [(s.name, s.domain, len(s.rows)) for s in shares] == [
        ("scan-0", "scan", 13),
        ("scan-1", "scan", 13),
        ("scan-2", "scan", 13),
        ("photo-0", "photo", 2),
        ("photo-1", "photo", 2),
    ]


def test_order_is_the_tasks_whatever_the_order_given(task: Task) -> None:
    samples = dict.fromkeys(SIZES, 2)
    one = split(task, {"photo": 1, "print": 1, "scan": 1}, samples, 0)
    two = split(task, {"scan": 1, "print": 1, "photo": 1}, samples, 0)
    assert [s.name for s in one] == [s.name for s in two] == ["scan-0", "print-0", "photo-0"]
    assert all(torch.equal(a.rows, b.rows) for a, b in zip(one, two, strict=True))


def test_no_row_is_given_twice_and_all_can_be_used(task: Task) -> None:
    shares = split(task, {"scan": 4, "print": 3}, {"scan": 10, "print": 9}, seed=3)
    for domain, used in (("scan", 40), ("print", 27)):
        rows = torch.cat([s.rows for s in shares if s.domain == domain])
        assert len(rows) == len(rows.unique()) == used
        assert int(rows.min()) >= 0
        assert int(rows.max()) < SIZES[domain]


def test_rows_are_a_function_of_the_seed(task: Task) -> None:
    arguments = (task, {"scan": 2, "print": 2}, {"scan": 10, "print": 10})
    first, again, other = split(*arguments, 5), split(*arguments, 5), split(*arguments, 6)
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a.rows, b.rows)
        assert not torch.equal(a.rows, c.rows)
        assert set(a.rows.tolist()) != set(c.rows.tolist())


def test_rows_are_random_and_domains_are_shuffled_apart() -> None:
    domains = {name: Domain(images(200), images(4)) for name in ("a", "b")}
    task = Task("toy", tuple("abcd"), domains, Augment(), {}, {})
    a, b = split(task, {"a": 1, "b": 1}, {"a": 50, "b": 50}, seed=0)
    assert not torch.equal(a.rows, b.rows)
    assert a.rows.tolist() != sorted(a.rows.tolist())
    assert abs(float(a.rows.double().mean()) - 99.5) < 4 * 57.7 / 50**0.5


def test_a_clients_samples_do_not_depend_on_other_domains(task: Task) -> None:
    alone = split(task, {"print": 2}, {"print": 5}, 1)
    among = split(task, {"scan": 2, "print": 2}, {"scan": 5, "print": 5}, 1)
    assert torch.equal(alone[1].rows, among[3].rows)


@pytest.mark.parametrize(
    ("samples", "count"), [(1, 1), (1.0, 40), (0.5, 20), (0.26, 10), (40, 40), (0.025, 1)]
)
def test_an_int_is_a_count_and_a_float_a_fraction(task: Task, samples: float, count: int) -> None:
    (share,) = split(task, {"scan": 1}, {"scan": samples}, 0)
    assert len(share.rows) == count


@pytest.mark.parametrize(("fraction", "count"), [(0.29, 29), (0.57, 57), (0.07, 7), (0.001, 0)])
def test_a_fraction_is_not_rounded_down_by_floating_point(fraction: float, count: int) -> None:
    task = Task("toy", ("a",), {"d": Domain(images(100), images(4))}, Augment(), {}, {})
    if count:
        assert len(split(task, {"d": 1}, {"d": fraction}, 0)[0].rows) == count
    else:
        with pytest.raises(ProtofedError):
            split(task, {"d": 1}, {"d": fraction}, 0)


def test_a_domain_may_have_no_clients(task: Task) -> None:
    for clients in ({"scan": 1}, {"scan": 1, "photo": 0}):
        shares = split(task, clients, {"scan": 1}, 0)
        assert [s.name for s in shares] == ["scan-0"]


def test_too_many_clients_for_the_pool(task: Task) -> None:
    with pytest.raises(ProtofedError) as error:
        split(task, {"print": 4}, {"print": 8}, 0)
    text = str(error.value)
    for part in ("'print'", "30 training images", "4 clients", "8 each", "at most 7 each"):
        assert part in text
    assert len(split(task, {"print": 4}, {"print": 7}, 0)) == 4, "what the hint says works"


@pytest.mark.parametrize("where", ["clients", "samples"])
def test_unknown_domain_names_the_nearest(task: Task, where: str) -> None:
    good, bad = {"scan": 1}, {"scan": 1, "phto": 1}
    with pytest.raises(ProtofedError, match=r"phto.*did you mean photo"):
        split(task, *((bad, good) if where == "clients" else (good, bad)), 0)  # type: ignore[arg-type]


def test_a_fraction_that_is_no_sample(task: Task) -> None:
    with pytest.raises(ProtofedError, match=r"0\.1 of .*domain 'photo' is less than one"):
        split(task, {"photo": 1}, {"photo": 0.1}, 0)


@pytest.mark.parametrize("clients", [{}, {"scan": 0, "print": 0}])
def test_no_clients_at_all(task: Task, clients: dict[str, int]) -> None:
    with pytest.raises(ProtofedError, match="no domain has a client"):
        split(task, clients, {"scan": 1}, 0)


def test_no_number_of_samples(task: Task) -> None:
    with pytest.raises(ProtofedError, match=r"no sample count .*'print'"):
        split(task, {"print": 1}, {"scan": 1}, 0)


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
    with pytest.raises(ProtofedError, match="3 clients with 10 each; nothing is left for a-2"):
        split(task, {"a": 3}, {"a": 10}, 0)


def test_pacs_numbers_of_the_clean_split() -> None:
    pools = {"photo": 1336, "art_painting": 1640, "cartoon": 1876, "sketch": 3144}
    labels = {d: [i % 7 for i in range(n)] for d, n in pools.items()}
    info = describe("pacs")
    assert info.clients is not None and info.samples is not None
    shares = split(made(labels, "pacs", 7), info.clients, info.samples, 0, leftover=info.leftover)
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


def test_repair_of_a_client_does_not_look_at_all_images(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    def counting(function: Any) -> Any:
        def counted(*arrays: Any, **more: Any) -> Any:
            nonlocal looked
            looked += sum(map(np.size, arrays))
            return function(*arrays, **more)

        return counted

    for name in ("unique", "setdiff1d", "flatnonzero"):
        monkeypatch.setattr(np, name, counting(getattr(np, name)))
    clients, images = 200, 4000  # 20 each, of 5 classes
    split(balanced(images, repair=True), {"a": clients}, {"a": images // clients}, 0)
    assert looked < 0.05 * clients * images


def test_repair_that_cannot_be_is_an_error() -> None:
    task = balanced(8, repair=True)
    with pytest.raises(ProtofedError, match=r"a-0 has 4 samples of .* 5 classes of its domain"):
        split(task, {"a": 2}, {"a": 4}, 0)


def test_label_skew_turns_repair_off_unless_asked_for() -> None:
    task = balanced(100, repair=True)
    skewed = split(task, {"a": 4}, {"a": 20}, 0, dirichlet=0.01)
    assert any(0 in class_counts(task, s) for s in skewed)
    repaired = split(task, {"a": 4}, {"a": 20}, 0, dirichlet=0.01, repair=True)
    assert all(0 not in class_counts(task, s) for s in repaired)


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
    assert shares[-1].note == "a's clients share 20 samples: all there are"


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
    for _ in range(500):
        weights = rng.dirichlet(np.full(rng.integers(1, 30), 10 ** rng.uniform(-4, 4)))
        total = int(rng.integers(0, 100_000))
        parts = apportion(total, weights)
        assert parts.sum() == total
        assert (parts >= 0).all()
        assert np.abs(parts - total * weights).max() <= 1 + 1e-6


# ---- validation ---------------------------------------------------------------------------------


def labels(task: Task, share: Share, rows: torch.Tensor) -> list[int]:
    return torch.bincount(task.domains[share.domain].train.y[rows], minlength=5).tolist()


def test_a_part_of_each_class_is_held_out() -> None:
    task = balanced(100)
    before = split(task, {"a": 2}, {"a": 200}, seed=1)
    after = hold_out(task, before, 0.1, seed=1)
    for old, new in zip(before, after, strict=True):
        assert sorted([*new.rows.tolist(), *new.held_out.tolist()]) == sorted(old.rows.tolist())
        assert len(new.held_out) == 20
        kept = [row for row in old.rows.tolist() if row not in new.held_out.tolist()]
        assert new.rows.tolist() == kept, "in their order"
        whole = labels(task, old, old.rows)
        for all_of, held in zip(whole, labels(task, new, new.held_out), strict=True):
            assert abs(held - all_of / 10) < 1
    assert same(after, hold_out(task, before, 0.1, seed=1))
    assert not same(after, hold_out(task, before, 0.1, seed=2))


def test_which_classes_are_rounded_up_is_drawn() -> None:
    task = balanced(100)
    rows = torch.arange(500).reshape(5, 20, 5)  # 20 clients with five images of each class
    shares = [Share(f"a-{i}", "a", rows[:, i].flatten()) for i in range(20)]
    held = [labels(task, s, s.held_out) for s in hold_out(task, shares, 0.08, seed=0)]
    assert {sum(own) for own in held} == {2}
    assert min(map(sum, zip(*held, strict=True))) > 2, "two of five classes each, not the first two"


def test_a_client_keeps_an_image_of_each_class() -> None:
    task = made({"a": [0] * 40 + [1, 2, 3, 4]})
    (share,) = hold_out(task, split(task, {"a": 1}, {"a": 44}, seed=0), 0.9, seed=0)
    assert labels(task, share, share.rows) == [4, 1, 1, 1, 1]
    assert labels(task, share, share.held_out) == [36, 0, 0, 0, 0]


def test_what_another_client_trains_on_is_not_held_out() -> None:
    """The repair rule gives images that another client may hold too."""
    task = made({"a": [0] * 50 + [1] * 10}, classes=2)
    for seed in range(10):
        shares = split(task, {"a": 6}, {"a": 10}, seed, repair=True)
        after = hold_out(task, shares, 0.5, seed)
        trained = {row for s in after for row in s.rows.tolist()}
        held = [row for s in after for row in s.held_out.tolist()]
        assert len(held) == len(set(held)) > 10
        assert not trained & set(held)


def test_the_unused_images() -> None:
    task = made({"a": [0, 1, 2, 3, 4] * 20, "b": [0, 1] * 10, "c": [0] * 9}, classes=5)
    shares = split(task, {"a": 2, "b": 1}, {"a": 20, "b": 5}, seed=0)
    found = unused(task, shares)
    assert {d: len(rows) for d, rows in found.items()} == {"a": 60, "b": 15}
    for domain, rows in found.items():
        held = torch.cat([s.rows for s in shares if s.domain == domain])
        assert not set(rows.tolist()) & set(held.tolist())
    # an image that is held out has a use
    assert {d: len(r) for d, r in unused(task, hold_out(task, shares, 0.2, 0)).items()} == {
        "a": 60, "b": 15,
    }  # fmt: skip


def test_domains_with_too_few_images_to_validate_on_are_named() -> None:
    task = made({"a": [0, 1] * 100, "b": [0, 1] * 30, "c": [0, 1] * 40})
    shares = split(task, {"a": 2, "b": 2}, {"a": 90, "b": 21}, seed=0)
    assert validation_rows(task, shares, None) == {}
    with pytest.raises(ProtofedError, match=r"unused leaves too few.*: 18 of domain 'b' "):
        validation_rows(task, shares, "unused")
    held = hold_out(task, shares, 0.2, seed=0)
    with pytest.raises(ProtofedError, match=r"0\.2 leaves too few.*: 8 of domain 'b' ") as error:
        validation_rows(task, held, 0.2)
    assert "raise --validate to 0.53, or" in error.value.hint
    with pytest.raises(ProtofedError) as error:
        validation_rows(task, hold_out(task, shares, 1e-9, seed=0), 1e-9)
    assert "raise --validate to 0.50, or" in error.value.hint
    half = hold_out(task, shares, 0.5, seed=0)
    found = validation_rows(task, half, 0.5)
    assert {d: len(rows) for d, rows in found.items()} == {"a": 90, "b": 22}
    assert set(found["b"].tolist()) == {r for s in half[2:] for r in s.held_out.tolist()}


@pytest.mark.parametrize("seed", range(3))
def test_what_office_caltech_leaves_unused(seed: int) -> None:
    try:
        task = load_task("office_caltech")
    except DataMissing:
        pytest.skip("needs the images of office_caltech")
    config = make_config("office_caltech", seed=seed)
    found = validation_rows(task, make_shares(config, task), "unused")
    expected = {"caltech": 362, "amazon": 462, "webcam": 190, "dslr": 28}
    assert {d: len(r) for d, r in found.items()} == pytest.approx(expected, abs=8)  # repair
