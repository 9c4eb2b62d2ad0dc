from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats

from protofed import keys

N = 100_000
MASK = (1 << 64) - 1
# The first outputs of SplitMix64 from the seed 1234567, as published with other implementations.
PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def splitmix64(state: int) -> Iterator[int]:
    """SplitMix64 with unsigned numbers and a state, as in its paper."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


def draws(key: int, draw: int, n: int) -> list[int]:
    """The numbers of a draw: a stream that starts draw · 2⁴⁰ numbers after the key's."""
    start = (key + (draw << 40) * 0x9E3779B97F4A7C15) & MASK
    return list(itertools.islice(splitmix64(start), n))


def test_key_tells_parts_types_and_order_apart() -> None:
    parts: list[tuple[int | str, ...]] = [
        (),
        ("",),
        ("", ""),
        (0,),
        ("0",),
        (1,),
        ("1",),
        (True,),
        (-1,),
        (1, 2),
        (2, 1),
        (12,),
        ("12",),
        ("1", 2),
        (1, "2"),
        ("1", "2"),
        ("a", "b"),
        ("b", "a"),
        ("ab",),
        ("ab", ""),
        ("", "ab"),
        (0, 0, "client-0", 0, 0, "order"),
        (0, 0, "client-0", 0, 0, "augment"),
        (0, 0, "client-0", 0, 1, "order"),
        (0, 0, "client-0", 1, 0, "order"),
        (0, 0, "client-1", 0, 0, "order"),
        (0, 1, "client-0", 0, 0, "order"),
        (1, 0, "client-0", 0, 0, "order"),
    ]
    assert len({keys.key(*p) for p in parts}) == len(parts)


@pytest.mark.parametrize("text", ["a\x1fstr:b", "a\x1fb", "a', 'b", "a\x00b"])
def test_no_text_of_one_part_looks_like_two_parts(text: str) -> None:
    assert keys.key(text) != keys.key("a", "b")


def test_key_is_a_63_bit_number_and_the_same_each_time() -> None:
    numbers = [keys.key(i, "x") for i in range(2000)]
    assert numbers == [keys.key(i, "x") for i in range(2000)]
    assert all(0 <= k < 1 << 63 for k in numbers)
    assert max(numbers) > 0.99 * (1 << 63), "the upper bits are used"
    torch.tensor(max(numbers), dtype=torch.int64)  # fits


def test_generator_is_a_function_of_its_key() -> None:
    first, again = keys.generator(3, "a"), keys.generator(3, "a")
    np.testing.assert_array_equal(first.random(100), again.random(100))
    # what another generator draws in between changes nothing
    keys.generator(3, "b").random(7)
    np.testing.assert_array_equal(first.permutation(50), again.permutation(50))


def test_generators_of_different_keys_are_independent() -> None:
    streams = np.stack([keys.generator(0, i, "x").standard_normal(20_000) for i in range(6)])
    correlation = np.corrcoef(streams)[np.triu_indices(6, 1)]
    assert np.abs(correlation).max() < 4.5 / math.sqrt(20_000)


def test_hash_gives_the_published_numbers() -> None:
    hashed = keys._hash(torch.tensor(1234567), 0, 5).tolist()
    assert [h & MASK for h in hashed] == PUBLISHED
    assert list(itertools.islice(splitmix64(1234567), 5)) == PUBLISHED


@pytest.mark.parametrize("key", [0, 1, 1234567, (1 << 63) - 1, keys.key("x")])
@pytest.mark.parametrize("draw", [0, 1, 2, 1000])
def test_hash_equals_unsigned_splitmix64(key: int, draw: int) -> None:
    hashed = keys._hash(torch.tensor(key), draw, 200).tolist()
    assert [h & MASK for h in hashed] == draws(key, draw, 200)


def test_uniform_is_the_upper_23_bits_of_the_hash() -> None:
    key = keys.key("u")
    expected = [((z >> 41) + 0.5) / (1 << 23) for z in draws(key, 2, 500)]
    values = keys.uniform(torch.tensor(key), 2, (500,))
    assert values.dtype == torch.float32
    assert values.tolist() == expected  # each is a float32, so exactly


def test_uniform_never_reaches_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for extreme in (0, -1):  # all bits 0, all bits 1
        monkeypatch.setattr(keys, "_hash", lambda key, draw, n, e=extreme: torch.full((n,), e))
        value = keys.uniform(torch.tensor(0), 1, (1,))
        assert 0 < float(value) < 1
        assert torch.isfinite(keys.normal(torch.tensor(0), 1, (1,))).all()


def test_normal_is_box_and_muller_of_two_rows_of_uniforms() -> None:
    key, n = keys.key("n"), 300
    u = [((z >> 41) + 0.5) / (1 << 23) for z in draws(key, 5, 2 * n)]
    expected = [
        math.sqrt(-2 * math.log(a)) * math.cos(2 * math.pi * b)
        for a, b in zip(u[:n], u[n:], strict=True)
    ]
    values = keys.normal(torch.tensor(key), 5, (n,))
    assert values.dtype == torch.float32
    # to the bit: float32 logarithms and cosines would differ between devices
    assert torch.equal(values, torch.tensor(expected, dtype=torch.float64).float())


@pytest.mark.parametrize("key", [0, keys.key(0, "step"), (1 << 63) - 1])
def test_moments_of_uniform(key: int) -> None:
    u = keys.uniform(torch.tensor(key), 1, (N,)).double()
    assert u.min() > 0
    assert u.max() < 1
    assert u.min() < 1e-4
    assert u.max() > 1 - 1e-4
    # four standard errors of each estimate
    assert abs(float(u.mean()) - 1 / 2) < 4 * math.sqrt(1 / 12 / N)
    assert abs(float((u - 0.5).square().mean()) - 1 / 12) < 4 * math.sqrt((1 / 80 - 1 / 144) / N)
    filled = torch.histc(u, 64, 0, 1)
    chi_square = float(((filled - N / 64) ** 2 / (N / 64)).sum())
    assert abs(chi_square - 63) < 4 * math.sqrt(2 * 63)


@pytest.mark.parametrize("key", [0, keys.key(0, "step"), (1 << 63) - 1])
def test_moments_of_normal(key: int) -> None:
    z = keys.normal(torch.tensor(key), 1, (N,)).double()
    assert abs(float(z.mean())) < 4 / math.sqrt(N)
    assert abs(float(z.square().mean()) - 1) < 4 * math.sqrt(2 / N)
    assert abs(float(z.pow(3).mean())) < 4 * math.sqrt(15 / N)
    assert abs(float(z.pow(4).mean()) - 3) < 4 * math.sqrt(96 / N)
    within = float((z.abs() < 1.959964).double().mean())
    assert abs(within - 0.95) < 4 * math.sqrt(0.95 * 0.05 / N)


def test_draws_and_keys_are_uncorrelated() -> None:
    rows = [keys.uniform(torch.tensor(7), d, (N,)) for d in (1, 2, 3)]
    rows += [keys.uniform(torch.tensor(k), 1, (N,)) for k in (8, 9, keys.key("step"))]
    streams = torch.stack(rows).double()
    correlation = torch.corrcoef(streams)[*np.triu_indices(len(rows), 1)]
    assert float(correlation.abs().max()) < 4.5 / math.sqrt(N)
    first = streams[0]
    for lag in (1, 2, 17):
        lagged = torch.corrcoef(torch.stack([first[:-lag], first[lag:]]))[0, 1]
        assert abs(float(lagged)) < 4 / math.sqrt(N)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (5,), (2, 3), (2, 0, 3), (4, 1, 2, 3)])
def test_shapes(shape: tuple[int, ...]) -> None:
    key = torch.tensor(5)
    for draw in (keys.uniform, keys.normal):
        value = draw(key, 1, shape)
        assert value.shape == shape
    flat = keys.uniform(key, 1, (math.prod(shape),))
    assert torch.equal(keys.uniform(key, 1, shape).flatten(), flat)


def test_the_key_is_read_when_the_numbers_are_drawn() -> None:
    key = torch.tensor(5)
    before = keys.uniform(key, 1, (8,))
    key.fill_(6)
    after = keys.uniform(key, 1, (8,))
    assert not torch.equal(before, after)
    assert torch.equal(after, keys.uniform(torch.tensor(6), 1, (8,)))


@pytest.mark.parametrize("a", [0.001, 0.1, 0.5, 1.0, 4.0])
def test_beta_numbers_have_their_distribution(a: float) -> None:
    found = keys.beta(torch.tensor(3), 1, (N,), a)
    assert found.dtype == torch.float32 and bool(found.isfinite().all())
    assert float(found.min()) >= 0 and float(found.max()) <= 1
    for q in (1e-4, 0.01, 0.1, 0.3, 0.5, 0.8, 0.99, 1 - 1e-4):
        share = float((found < q).double().mean())
        assert share == pytest.approx(float(stats.beta(a, a).cdf(q)), abs=4 * 0.5 / math.sqrt(N))
    assert not torch.equal(found, keys.beta(torch.tensor(3), 2, (N,), a))
