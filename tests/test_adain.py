"""AdaIN: the layout of the public release, what files are accepted, and images of any size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from protofed import keys
from protofed.adain import DECODER, ENCODER, style_transfer
from protofed.errors import ProtofedError
from protofed.styles import style_of
from tests.some_methods import adain_options, adain_weights

pytestmark = pytest.mark.usefixtures("single_thread")

# net.py of the public release: what a convolution's input and output channels are, by its number
VGG = {
    0: (3, 3), 2: (3, 64), 5: (64, 64), 9: (64, 128), 12: (128, 128), 16: (128, 256),
    19: (256, 256), 22: (256, 256), 25: (256, 256), 29: (256, 512),
    # behind relu4_1
    32: (512, 512), 35: (512, 512), 38: (512, 512), 42: (512, 512), 45: (512, 512),
    48: (512, 512), 51: (512, 512),
}  # fmt: skip
PSI = {
    1: (512, 256), 5: (256, 256), 8: (256, 256), 11: (256, 256), 14: (256, 128), 18: (128, 128),
    21: (128, 64), 25: (64, 64), 28: (64, 3),
}  # fmt: skip
POOLS, UPS = (7, 14, 27), (3, 16, 23)
LIKE = torch.zeros((), dtype=torch.float64)


def images(*shape: int) -> Tensor:
    return torch.from_numpy(keys.generator("adain").uniform(0, 1, shape))


def release(shapes: dict[int, tuple[int, int]]) -> dict[str, Tensor]:
    rng, found = np.random.default_rng(1), {}
    for place, (inputs, outputs) in shapes.items():
        side = 3 if place else 1
        weight = rng.standard_normal((outputs, inputs, side, side), np.float32)
        found[f"{place}.weight"] = torch.from_numpy(weight * (2 / (inputs * side**2)) ** 0.5)
        found[f"{place}.bias"] = torch.from_numpy(rng.random(outputs, np.float32) / 10)
    return found


def as_modules(
    shapes: dict[int, tuple[int, int]], weights: dict[str, Tensor], other: dict[int, nn.Module]
) -> nn.Sequential:
    """The layers of the release one by one, with its own classes, for float64."""
    last, layers = max(shapes), []
    for place in range(last + 1):
        if place in shapes:
            layers.append(nn.Conv2d(*shapes[place], 3 if place else 1))
        elif place + 1 in shapes:
            layers.append(nn.ReflectionPad2d(1))
        else:
            layers.append(other.get(place, nn.ReLU()))
    found = nn.Sequential(*layers)
    found.load_state_dict(weights)
    return found.double()


def named(encoder: Any, decoder: Any) -> Any:
    return style_transfer(f"file:{encoder}", f"file:{decoder}", LIKE)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Random weights in the layout of the release, as its own files are."""
    folder = tmp_path_factory.mktemp("adain")
    paths = folder / "vgg_normalised.pth", folder / "decoder.pth"
    used = {place: shape for place, shape in VGG.items() if place < 31}
    behind = {
        f"{p}.{kind}": torch.zeros(1) for p in VGG.keys() - used for kind in ("weight", "bias")
    }
    torch.save(release(used) | behind, paths[0])  # small, and never looked at
    torch.save(release(PSI), paths[1])
    return paths


@pytest.mark.parametrize("side", [16, 21])
def test_it_computes_what_the_layers_of_the_release_do(real: tuple[Path, Path], side: int) -> None:
    used = {place: shape for place, shape in VGG.items() if place < 31}
    weights = {n: t for n, t in torch.load(real[0]).items() if int(n.partition(".")[0]) < 31}
    pools = {place: nn.MaxPool2d(2, 2, ceil_mode=True) for place in POOLS}
    ups = {place: nn.UpsamplingNearest2d(scale_factor=2) for place in UPS}
    phi = nn.Sequential(as_modules(used, weights, pools), nn.ReLU())
    psi = as_modules(PSI, torch.load(real[1]), ups)
    x, style = images(2, 3, side, side), 1 + images(2, 2, 512)
    transfer = named(*real)
    with torch.no_grad():
        map_ = phi(x)
        mean, std = map_.mean((2, 3)), (map_.var((2, 3)) + 1e-5).sqrt()
        normal = (map_ - mean[:, :, None, None]) / std[:, :, None, None]
        image = psi(normal * style[:, 1, :, None, None] + style[:, 0, :, None, None])
    (found,) = transfer.maps(x)
    assert transfer.channels == 512 and found.shape == (2, 512, *map_.shape[2:])
    assert torch.allclose(found, map_, rtol=0, atol=1e-10)
    if image.shape != x.shape:  # 21 pixels became 24
        assert image.shape[2:] == (24, 24)
        image = F.interpolate(image, (side, side), mode="bilinear", antialias=True)
    assert image.max() > 1 or image.min() < 0
    assert torch.allclose(transfer.restyled(x, style), image.clamp(0, 1), rtol=0, atol=1e-10)


def narrow(folder: Path, kind: str = "safetensors") -> list[Path]:
    """Copies of the tests' small files."""
    paths = []
    for name, value in adain_options().items():
        weights = load_file(value.removeprefix("file:"))
        paths.append(folder / f"{name}.{kind}")
        if kind == "safetensors":
            save_file(weights, paths[-1])
        else:
            torch.save({"state_dict": {f"module.{n}": t for n, t in weights.items()}}, paths[-1])
    return paths


def test_both_kinds_of_files_are_read(tmp_path: Path) -> None:
    x, style = images(3, 3, 12, 12), images(3, 2, 5)
    one, two = (named(*narrow(tmp_path, kind)) for kind in ("safetensors", "pth"))
    assert torch.equal(one.restyled(x, style), two.restyled(x, style))


def test_every_channel_of_the_tests_own_files_depends_on_the_image(tmp_path: Path) -> None:
    """Or tests that use them would see little of what they are about."""
    transfer, x = named(*narrow(tmp_path)), images(8, 3, 32, 32)
    styles = style_of(next(transfer.maps(x)))
    assert styles[:, 1].mean(0).min() > 0.03
    redrawn = transfer.restyled(x, styles.flip(0))
    inside = ((redrawn > 0) & (redrawn < 1)).double().mean((0, 2, 3))
    assert inside.min() > 0.1 and redrawn.std((2, 3)).mean() > 0.1


def test_images_are_enlarged_and_come_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer, x, style = named(*narrow(tmp_path)), images(7, 3, 10, 10), images(7, 2, 5)
    whole, image = [*transfer.maps(x, 2)], transfer.restyled(x, style, 2)
    assert len(whole) == 1 and image.shape == x.shape
    monkeypatch.setattr("protofed.adain._PIXELS_AT_ONCE", 3 * 20**2)
    parts = [*transfer.maps(x, 2)]
    assert [len(part) for part in parts] == [3, 3, 1]
    assert torch.allclose(torch.cat(parts), whole[0])
    assert torch.allclose(transfer.restyled(x, style, 2), image)
    larger = F.interpolate(x, (20, 20), mode="bilinear")
    assert torch.allclose(next(transfer.maps(larger)), parts[0])


def test_images_may_be_too_small(tmp_path: Path) -> None:
    transfer = named(*narrow(tmp_path))
    assert next(transfer.maps(images(1, 3, 9, 9))).shape[2:] == (2, 2)
    with pytest.raises(ProtofedError, match="8×8 pixels are too small"):
        next(transfer.maps(images(1, 3, 8, 8)))


def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    paths = narrow(tmp_path)
    first = named(*paths)
    assert named(*paths) is first
    weights = load_file(paths[0])
    weights["29.bias"] += 1
    save_file(weights, paths[0])
    os.utime(paths[0], ns=(1, 1))
    x = images(1, 3, 16, 16)
    assert not torch.equal(next(named(*paths).maps(x)), next(first.maps(x)))


def changed(weights: dict[str, Tensor], name: str, value: Tensor | None) -> dict[str, Tensor]:
    return {n: t for n, t in (weights | {name: value}).items() if t is not None}  # type: ignore[dict-item]


WRONG: dict[str, tuple[int, str, Any, str]] = {
    "missing": (0, "16.weight", None, "entry 16.weight is missing"),
    "unknown": (1, "30.weight", torch.zeros(1), "entry 30.weight is unknown"),
    "a word": (0, "x", torch.zeros(1), "entry x is unknown"),
    "kernel": (0, "2.weight", torch.zeros(6, 3, 5, 5), r"2.weight is \(6, 3, 5, 5\)"),
    "no kernel": (1, "5.weight", torch.tensor(1.0), r"5.weight is \(\)"),
    "chain": (0, "12.weight", torch.zeros(6, 9, 3, 3), r"12.weight is \(6, 9, 3, 3\)"),
    "bias": (0, "9.bias", torch.zeros(9), r"with a bias of \(9,\)"),
    "whole numbers": (1, "28.weight", torch.zeros(3, 6, 3, 3).long(), "entry 28.weight"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_file_with_other_layers_is_refused(tmp_path: Path, kind: str) -> None:
    which, name, value, words = WRONG[kind]
    paths = narrow(tmp_path)
    save_file(changed(load_file(paths[which]), name, value), paths[which])
    what = ("encoder", "decoder")[which]
    with pytest.raises(ProtofedError, match=f"does not hold the {what} of AdaIN: .*{words}"):
        named(*paths)


def test_files_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    encoder, decoder = narrow(tmp_path)
    with pytest.raises(ProtofedError, match="does not hold the encoder of AdaIN"):
        named(decoder, encoder)
    rng = np.random.default_rng(0)
    for layers, channels, path in (
        (DECODER, (6, 4, 3, 4, 3, 3, 4, 2, 3, 3), decoder),
        (ENCODER, (1, 3, 2, 3, 3, 4, 4, 3, 4, 3, 6), encoder),
    ):
        save_file(adain_weights(rng, layers, channels), path)
        with pytest.raises(ProtofedError, match=r"makes \d channels of \d, .* 3 of 6"):
            named(encoder, decoder)


def test_files_are_named_and_read_safely(tmp_path: Path) -> None:
    encoder, decoder = narrow(tmp_path)
    for missing in ("", str(encoder)):
        with pytest.raises(ProtofedError, match="file with the weights of its encoder") as error:
            style_transfer(missing, f"file:{decoder}", LIKE)
        assert "--set encoder=file:vgg_normalised.pth" in error.value.hint
    with pytest.raises(ProtofedError, match=r"cannot read weights from .*No such file"):
        named(encoder, tmp_path / "none.pth")
    torch.save({"0.weight": print}, tmp_path / "code.pth")
    with pytest.raises(ProtofedError, match="holds more than tensors"):
        named(tmp_path / "code.pth", decoder)
