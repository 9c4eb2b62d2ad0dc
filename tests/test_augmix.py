"""AugMix: its operations against Pillow and by hand, and what is drawn for each image."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from protofed import augmix
from protofed.augmix import COLORS, GEOMETRY, Draws


def pixels(n=4, side=24, seed=0):
    """Images in [0, 1] of whole 8-bit values, each of another brightness."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (n, 3, side, side)) * np.linspace(0.4, 1, n)[:, None, None, None]
    return torch.from_numpy(x.round() / 255)


def each(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None, None, None]


def by_pillow(x, change):
    images = (x * 255).round().byte().permute(0, 2, 3, 1).numpy()
    changed = [np.array(change(i, Image.fromarray(a))) for i, a in enumerate(images)]
    return torch.from_numpy(np.stack(changed)).permute(0, 3, 1, 2).double() / 255


LEVELS = (0.5, 1.5, 2.6, 9.0)
SIGNED = (0.5, -1.5, 2.6, -9.0)
EXACT = {
    augmix.equalize: lambda i, image: ImageOps.equalize(image),
    augmix.posterize: lambda i, image: ImageOps.posterize(image, (4, 4, 3, 1)[i]),
}
NEAR = {  # Pillow rounds to whole values
    augmix.autocontrast: lambda i, image: ImageOps.autocontrast(image),
    augmix.brightness: lambda i, image: ImageEnhance.Brightness(image),
    augmix.contrast: lambda i, image: ImageEnhance.Contrast(image),
    augmix.color: lambda i, image: ImageEnhance.Color(image),
    augmix.sharpness: lambda i, image: ImageEnhance.Sharpness(image),
}


@pytest.mark.parametrize("change", [*EXACT, *NEAR], ids=lambda f: f.__name__)
def test_an_operation_is_pillows(change):
    def expected(i, image):
        found = {**EXACT, **NEAR}[change](i, image)
        return found if isinstance(found, Image.Image) else found.enhance(1 + 0.09 * SIGNED[i])

    x = pixels()
    found = change(x, each(*LEVELS), each(*SIGNED))
    limit = 1e-12 if change in EXACT else 2 / 255
    assert (found - by_pillow(x, expected)).abs().max() <= limit
    assert not torch.equal(found, x)


def test_solarize_inverts_what_is_bright():
    x = torch.tensor([0.0, 0.69, 0.71, 1.0]).double().view(1, 1, 2, 2)
    found = augmix.solarize(x, each(3.0), each(3.0)).flatten().tolist()
    assert found == pytest.approx([0.0, 0.69, 0.29, 0.0])


@pytest.mark.parametrize("change", COLORS, ids=lambda f: f.__name__)
def test_an_image_of_one_color_stays_finite(change):
    x = torch.full((2, 3, 6, 6), 0.25)
    found = change(x, each(1.0, 3.0), each(-1.0, 3.0))
    assert found.isfinite().all() and found.min() >= 0 and found.max() <= 1


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 2), (2, 5), (5, 1)])
def test_images_of_few_pixels_have_nothing_to_sharpen(height, width):
    x = pixels(n=2, side=8)[:, :, :height, :width]
    assert torch.equal(augmix.sharpness(x, each(1.0, 3.0), each(-1.0, 3.0)), x)
    assert augmix.augmix(x, drawn(2), 3.0).isfinite().all()


def test_an_image_of_one_color_stays_so_after_sharpness():
    """Autocontrast would make black and white of the rounding that sharpness leaves."""
    x = (torch.arange(256) / 255)[:, None, None, None].expand(256, 3, 8, 8).contiguous()
    for level in torch.linspace(0.1, 3, 30).tolist():
        values = torch.full((256, 1, 1, 1), level)
        found = augmix.autocontrast(augmix.sharpness(x, values, -values), values, values)
        assert torch.allclose(found, x, rtol=0, atol=1e-6)


def test_translations_move_by_whole_pixels_and_leave_black():
    x = pixels(n=3, side=30)
    found = augmix.moved(x, torch.tensor([3, 4, 9]), torch.tensor([2.0, -3.0, 5.0]).double())
    assert torch.allclose(found[0, :, :, :-2], x[0, :, :, 2:]) and not found[0, :, :, -2:].any()
    assert torch.allclose(found[1, :, 3:], x[1, :, :-3]) and not found[1, :, :3].any()
    assert torch.allclose(found[2], x[2])  # not an operation of geometry


@pytest.mark.parametrize(
    ("operation", "a", "b", "c", "d"),
    [
        (0, math.cos(0.1 * math.pi), -math.sin(0.1 * math.pi), math.sin(0.1 * math.pi), None),
        (1, 1, 0.18, 0, 1),
        (2, 1, 0, 0.18, 1),
    ],
    ids=["rotate", "shear x", "shear y"],
)
def test_rotations_and_shears_are_linear_maps(operation, a, b, c, d):
    # of an image that is linear in its place, bilinear interpolation finds every value exactly
    place = (2 * torch.arange(20).double() + 1) / 20 - 1
    x = (3 + place + 2 * place[:, None]).expand(1, 3, 20, 20)
    found = augmix.moved(x, torch.tensor([operation]), torch.tensor([6.0]).double())
    column = a * place + b * place[:, None]
    row = c * place + (a if d is None else d) * place[:, None]
    expected = 3 + column + 2 * row
    inside = slice(5, 15)
    assert torch.allclose(found[0, 0, inside, inside], expected[inside, inside])


# ---- the mixture ---------------------------------------------------------------------------------


def drawn(n, chains=3, depth=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (chains * n,), (depth, 3, chains * n), (chains, n), (n,)
    return Draws(*(torch.rand(s, generator=generator, dtype=torch.float64) for s in shapes))


def test_images_stay_in_range_and_differ_by_what_was_drawn():
    x = pixels(n=1).repeat(6, 1, 1, 1)
    one, other = (augmix.augmix(x, drawn(6, seed=seed), 3.0) for seed in (0, 1))
    assert not torch.equal(one, other)
    assert one.min() >= 0 and one.max() <= 1
    assert len({tuple(image.flatten().tolist()) for image in one}) == 6
    mild, strong = ((augmix.augmix(x, drawn(6), s) - x).abs().mean() for s in (0.1, 10.0))
    assert mild < strong


def test_chains_are_mixed_by_their_weights_and_with_the_image():
    """Two images, two chains of up to two operations, step by step."""
    x = pixels(n=2, side=20)
    operations = len(GEOMETRY) + len(COLORS)
    names = [f.__name__ for f in COLORS]

    def at(name):
        return (len(GEOMETRY) + names.index(name) + 0.5) / operations

    plan = [  # chain, image, its operations: (name, level from 0 to 1, sign from 0 to 1)
        (0, 0, [("brightness", 0.5, 0.9)]),
        (0, 1, [("solarize", 1.0, 0.1), ("color", 0.2, 0.2)]),
        (1, 0, [("posterize", 0.1, 0.5), ("contrast", 0.7, 0.6)]),
        (1, 1, [("autocontrast", 0.3, 0.3)]),
    ]
    draws = drawn(2, chains=2, depth=2)
    weight = -draws.weight.log() / -draws.weight.log().sum(0)
    expected = draws.share[:, None, None, None] * x
    for chain, image, todo in plan:
        place, value = 2 * chain + image, x[image : image + 1]
        draws.length[place] = 0.25 if len(todo) == 1 else 0.75
        for number, (name, level, sign) in enumerate(todo):
            drawn_here = torch.tensor([at(name), level, sign], dtype=torch.float64)
            draws.operation[number, :, place] = drawn_here
            level = 0.1 + 2.9 * level
            signed = level if sign > 0.5 else -level if sign < 0.5 else 0.0
            value = getattr(augmix, name)(value, each(level), each(signed))
        expected[image] += (1 - draws.share[image]) * weight[chain, image] * value[0]
    assert torch.allclose(augmix.augmix(x, draws, 3.0), expected, rtol=0, atol=1e-12)
