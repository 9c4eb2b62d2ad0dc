from __future__ import annotations

import pytest
import torch

from protofed.data.split import split
from protofed.data.task import Augment, Domain, Images, Task
from protofed.errors import ProtofedError

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
    with pytest.raises(ProtofedError, match=r"0\.1 of .*domain 'photo' is none"):
        split(task, {"photo": 1}, {"photo": 0.1}, 0)


@pytest.mark.parametrize("clients", [{}, {"scan": 0, "print": 0}])
def test_no_clients_at_all(task: Task, clients: dict[str, int]) -> None:
    with pytest.raises(ProtofedError, match="no domain has a client"):
        split(task, clients, {"scan": 1}, 0)


def test_no_number_of_samples(task: Task) -> None:
    with pytest.raises(ProtofedError, match=r"no number of samples .*'print'"):
        split(task, {"print": 1}, {"scan": 1}, 0)
