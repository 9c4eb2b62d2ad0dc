"""benchmarks/prototype_attacks.py: an attack that finds nothing would make prototypes look safe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture
def attacks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, without the cases that need the extra `privacy`."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import prototype_attacks

    monkeypatch.setattr(prototype_attacks, "EPSILONS", ())
    return prototype_attacks


@pytest.fixture
def shown(attacks: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What an attack shows, by case."""
    found: dict[str, str] = {}
    monkeypatch.setattr(attacks, "show", lambda _, case, numbers: found.update({case: numbers}))
    return found


def test_a_lone_image_is_reconstructed_unless_its_class_is_not_sent(
    attacks: Any, shown: dict[str, str], tmp_path: Path
) -> None:
    world = attacks.hostile_world()
    # images of the other domains would make the server's training longer
    world.server_has = {attacks.DOMAIN: world.server_has[attacks.DOMAIN]}
    attacks.reconstruction(world, trials=2, steps=200, out=tmp_path)
    found = shown["1 image of the class"].split("found")[1].split("%")[0]
    assert float(found) >= 70  # of ten images; 2.5 by chance
    assert "sent  0 of 10 classes, found   0%" in shown["1 image, min_class_count 2"]
    assert (tmp_path / "reconstruction.png").is_file()


def test_members_are_told_from_others_unless_their_class_is_not_sent(
    attacks: Any, shown: dict[str, str]
) -> None:
    world = attacks.World({})
    attacks.membership(world, attacks.honest(world, steps=100), trials=2)
    assert float(shown["1 image of the class"].split("AUC")[1]) >= 0.7
    assert "sent  0 of 10 classes, AUC 0.500" in shown["1 image, min_class_count 2"]
