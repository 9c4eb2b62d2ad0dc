"""ProtoStyle: pseudo-domains, how models and styles are balanced over them, and the edges."""

import pytest
import torch
from tests.methods.helpers import D, K, numbers

from protofed.federation.spool import Spool
from protofed.method import ServerView, Sizes, Update
from protofed.methods import ProtoStyle
from protofed.methods.protostyle import pseudo_domains
from protofed.runs.run import run
from protofed.testing.checks import SHORT, tiny_task

SIZES = Sizes(K, D, 8)
NAMES = tuple("abcdef")


def styles_of(*means: float | None) -> dict[str, torch.Tensor]:
    """Styles [2, 2 channels] at two stages around these means; None: a client without."""
    found = []
    for i, mean in enumerate(means):
        near = 0.1 * numbers(50 + i, 2, 2).abs()
        found.append(torch.zeros(2, 2).double() if mean is None else near + mean)
    return {"pixels": torch.stack(found), "stage1": torch.stack(found) * 2}


def updates_of(names: str, samples: list[int], styles: dict[str, torch.Tensor]) -> list[Update]:
    spool = Spool()
    for name in names:
        place = NAMES.index(name)
        spool.put(name, {"styles": {stage: s[place] for stage, s in styles.items()}})
    return [Update(n, count, 1, 0.1, spool) for n, count in zip(names, samples, strict=True)]


def view(state=None) -> ServerView:
    state = state or {"styles": {**styles_of(None), "until": torch.zeros(1)}}
    return ServerView(state, 1, 3, NAMES, SIZES, 0, NAMES)


def test_clients_of_like_styles_are_a_pseudo_domain() -> None:
    assert pseudo_domains(styles_of(1, 5, 1, 5, 1)).tolist() == [0, 1, 0, 1, 0]
    # the scale of a stage does not matter, nor how many channels it has
    wide = styles_of(1, 5, 1, 5, 1)
    wide["stage1"] = wide["stage1"].repeat(1, 1, 50) * 1000
    assert pseudo_domains(wide).tolist() == [0, 1, 0, 1, 0]


def test_clients_without_a_style_have_no_pseudo_domain() -> None:
    assert pseudo_domains(styles_of(None, 5, 1, 5, 1)).tolist() == [-1, 0, 1, 0, 1]
    assert pseudo_domains(styles_of(None, None)).tolist() == [-1, -1]


@pytest.mark.parametrize("means", [(1.0,), (1.0, 5.0), (1.0, 3.0, 5.0)])
def test_a_single_pseudo_domain_is_every_client_its_own(means: tuple[float, ...]) -> None:
    assert pseudo_domains(styles_of(*means)).tolist() == [*range(len(means))]


def test_pseudo_domains_count_alike_and_clients_within_by_samples() -> None:
    updates = updates_of("abcde", [10, 7, 20, 1, 10], styles_of(1, 5, 1, 5, None))
    found = ProtoStyle().weights(view(), updates)
    assert found == pytest.approx([10 / 30, 7 / 8, 20 / 30, 1 / 8, 1.0])
    assert ProtoStyle(balanced=False).weights(view(), updates) is None
    assert ProtoStyle(p=0).weights(view(), updates) is None


def test_styles_are_drawn_evenly_over_pseudo_domains_and_their_clients() -> None:
    method, styles = ProtoStyle(), styles_of(None, 5, 1, 5, 1, 5)
    state = method.aggregate(view(), {}, updates_of("abcdef", [1] * 6, styles))
    expected = [0, 2 / 12, 5 / 12, 7 / 12, 10 / 12, 1]
    assert state["styles"]["until"].tolist() == pytest.approx(expected, rel=1e-6)
    # a, who has no style, is never drawn, nor is a number above the last one's possible
    edges = torch.tensor([1e-9, 0.5, 1 - 2**-24])
    assert torch.searchsorted(state["styles"]["until"], edges).tolist() == [1, 3, 5]


def test_a_client_that_sits_out_keeps_its_style() -> None:
    method, styles = ProtoStyle(), styles_of(1, 5, 1, 5, 1)
    first = method.aggregate(view(), {}, updates_of("abcde", [1] * 5, styles))
    second = method.aggregate(view(first), {}, updates_of("b", [1], styles_of(*[9] * 5)))
    assert torch.equal(second["styles"]["pixels"][0], styles["pixels"][0])
    assert not torch.equal(second["styles"]["pixels"][1], styles["pixels"][1])
    assert torch.equal(first["styles"]["pixels"][1], styles["pixels"][1])  # not changed in place


@pytest.mark.parametrize("settings", [{"rounds": 1}, {"min_class_count": 100}])
def test_without_styles_both_views_are_alike(settings) -> None:
    result = run(tiny_task(), "protostyle", **{**SHORT, **settings})
    assert result.rounds[-1]["loss"]["view"] == pytest.approx(0, abs=1e-6)


def test_one_client_trains_in_its_own_style() -> None:
    result = run(tiny_task(), "protostyle", **{**SHORT, "clients": 1})
    assert result.rounds[-1]["loss"]["view"] > 1e-6
