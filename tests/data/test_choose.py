"""What is chosen by the images of a folder, and the reasons that are given."""

from __future__ import annotations

import pytest

from protofed.data import choose
from protofed.data.choose import Survey


@pytest.mark.parametrize(
    ("side", "size", "words"),
    [
        (12, 32, "shorter side is 12 pixels; they are enlarged to the size of the papers'"),
        (28, 32, "shorter side is 28 pixels; they are enlarged"),
        (32, 32, "shorter side is 32 pixels"),
        (100, 104, "shorter side is 100 pixels, rounded up to a multiple of 8"),
        (224, 224, "shorter side is 224 pixels"),
        (3000, 224, "they are shrunk to 224, as networks for ImageNet expect, --image-size N"),
    ],
)
def test_image_size(side: int, size: int, words: str) -> None:
    found = choose.image_size(Survey(side, {"a": side}))
    assert found.value == size and words in found.reason
    assert found.value >= side or "shrunk" in found.reason  # never without a word


def test_domains_of_different_sizes_are_named() -> None:
    reason = choose.image_size(Survey(100, {"a": 50, "b": 100})).reason
    assert "median shorter side is 100 pixels (a 50, b 100)" in reason


def test_large_images_have_another_network_and_augmentation() -> None:
    assert [choose.model(s).value for s in (95, 96)] == ["resnet10", "resnet18_imagenet"]
    assert [choose.augment(s).value for s in (95, 96)] == ["crop", "large"]


def test_batches_leave_the_smallest_client_several_steps() -> None:
    assert [choose.batch(32, [n, 9999]).value for n in (256, 255, 100, 10)] == [64, 32, 16, 8]
    assert [choose.batch(224, [n]).value for n in (128, 127)] == [32, 16]
    assert choose.batch(224, []).value == 32
    assert "smallest client has 100 training images" in choose.batch(32, [100]).reason


def test_epochs_make_about_a_hundred_steps() -> None:
    """As FPL's clients on Digits do: 600 images, batches of 64, 10 epochs."""
    assert choose.epochs(64, [600]).value == 10
    assert choose.epochs(64, [600, 6000]).value == 2
    assert choose.epochs(64, [10**6]).value == 1
    assert choose.epochs(8, [16]) == (10, "about 20 steps of a client between two averages")
    assert choose.epochs(64, []).value == 10
