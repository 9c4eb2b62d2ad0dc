"""The task ``glyphs``: digits in four domains, generated from scans and a font.

``scan``, ``photo`` and ``inverse`` show scikit-learn's handwritten digits, ``print`` those of
Pillow's default font. Every scan is used once: in one domain, for training or for test.
"""

from __future__ import annotations

import itertools
import math
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont

from protofed.data import cache
from protofed.data.task import SPLITS, Augment, Task, TaskInfo

# Raise this whenever an image changes: older cache entries are then ignored.
GENERATOR = 1

SIDE = 32
CLASSES = tuple("0123456789")
COUNTS = {"scan": (50, 20), "print": (50, 20), "photo": (35, 20), "inverse": (25, 20)}
"""Training and test images of each class."""
DOMAINS = tuple(COUNTS)
INFO = TaskInfo(
    name="glyphs",
    domains=DOMAINS,
    classes=CLASSES,
    clients={"scan": 4, "print": 3, "photo": 2, "inverse": 1},
    samples={"scan": 100, "print": 80, "photo": 80, "inverse": 60},
    image_size=SIDE,
    flip=False,
    about="Digits made by the package itself, without a download, from scikit-learn's handwritten "
    "digits, Pillow's default font and random textures.",
)

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def load_glyphs(seed: int = 0) -> Task:
    """The task, from the cache or newly made.

    Results are comparable only with the same ``seed``: leave it at 0.
    """
    # what the images depend on besides the seed: the renderer, the scans, the random numbers
    versions = [version(package) for package in ("pillow", "scikit-learn", "numpy")]
    entry = cache.entry_name("glyphs", SIDE, GENERATOR, seed, *versions)
    images = cache.load(entry)
    if images is None:
        arrays = make(seed)
        names = list(itertools.product(DOMAINS, SPLITS))
        parts = [(d, s, arrays[f"{d}.{s}.y"].tolist()) for d, s in names]
        pixels = np.concatenate([arrays[f"{d}.{s}.x"] for d, s in names])
        images = cache.store(entry, pixels, CLASSES, parts)
    assert INFO.clients is not None and INFO.samples is not None
    return Task(
        name=INFO.name,
        classes=CLASSES,
        domains=images.domains,
        augment=Augment(padding=2, flip=INFO.flip, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
        clients=INFO.clients,
        samples=INFO.samples,
        note=INFO.about,
        whole_unseen=True,
    )


def make(seed: int) -> dict[str, NDArray[Any]]:
    """Every array of the task: ``{domain}.{split}.x`` uint8 [N, 3, 32, 32], ``.y`` int64 [N]."""
    scans, labels = _scans()
    arrays: dict[str, NDArray[Any]] = {}
    rows = sources(seed)
    for (d, domain), (s, split) in itertools.product(enumerate(DOMAINS, 1), enumerate(SPLITS, 1)):
        rng = np.random.default_rng([seed, d, s])  # [seed, 0, 0] deals out the scans
        if domain == "print":
            y = rng.permutation(np.repeat(np.arange(len(CLASSES)), COUNTS[domain][s - 1]))
            x = _print(y, rng)
        else:
            draw = {"scan": _scan, "photo": _photo, "inverse": _inverse}[domain]
            y = labels[rows[domain, split]]
            x = draw(scans[rows[domain, split]], rng)
        arrays[f"{domain}.{split}.x"] = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
        arrays[f"{domain}.{split}.y"] = y.astype(np.int64)
    return arrays


def sources(seed: int) -> dict[tuple[str, str], Ints]:
    """The scans that each (domain, split) shows, in order. No scan is used twice."""
    _, labels = _scans()
    rng = np.random.default_rng([seed, 0, 0])
    scanned = [d for d in DOMAINS if d != "print"]
    parts: dict[tuple[str, str], list[Ints]] = {(d, s): [] for d in scanned for s in SPLITS}
    for label in range(len(CLASSES)):
        free = rng.permutation(np.flatnonzero(labels == label))
        for (domain, split), part in parts.items():
            count = COUNTS[domain][SPLITS.index(split)]
            part.append(free[:count])
            free = free[count:]
    # Shuffled, so that the first n rows are not all of one class.
    return {key: rng.permutation(np.concatenate(part)) for key, part in parts.items()}


def _scans() -> tuple[Bytes, Ints]:
    """The handwritten digits: [1797, 8, 8], 0 paper to 255 ink, and their labels."""
    from sklearn.datasets import load_digits  # slow to import, not needed for a cached task

    digits = load_digits()
    return np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target.astype(np.int64)


def _enlarge(scan: Bytes, side: int) -> Image.Image:
    """A scan drawn ``side`` pixels wide in the middle of a black square."""
    canvas = Image.new("L", (SIDE, SIDE))
    large = Image.fromarray(scan).resize((side, side), Image.Resampling.BICUBIC)
    canvas.paste(large, ((SIDE - side) // 2, (SIDE - side) // 2))
    return canvas


def _warp(
    image: Image.Image, angle: float, shear: float, scale: float, shift: tuple[float, float]
) -> Image.Image:
    """Rotate (degrees), shear, scale and shift (pixels) ``image`` about its middle."""
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    # Pillow wants the inverse: from a pixel of the result to the place it is taken from.
    a, b = (cos + shear * sin) / scale, (shear * cos - sin) / scale
    d, e = sin / scale, cos / scale
    cx, cy = image.width / 2, image.height / 2
    x, y = cx + shift[0], cy + shift[1]
    back = (a, b, cx - a * x - b * y, d, e, cy - d * x - e * y)
    return image.transform(image.size, Image.Transform.AFFINE, back, Image.Resampling.BICUBIC)


def _painted(paper: Floats, ink: Floats, masks: list[Bytes]) -> Floats:
    """Ink on paper where the masks [SIDE, SIDE] are 255."""
    return paper + (ink - paper) * (np.stack(masks) / 255)[..., None]


def _quantize(x: Floats) -> Bytes:
    return np.clip(np.rint(x), 0, 255).astype(np.uint8)


def _scan(scans: Bytes, rng: np.random.Generator) -> Bytes:
    """Light strokes on black, as they were scanned."""
    sides = rng.choice([24, 26, 28], len(scans))
    pairs = zip(scans, sides, strict=True)
    gray = np.stack([np.asarray(_enlarge(scan, int(side))) for scan, side in pairs])
    return np.repeat(gray[..., None], 3, axis=-1)


def _print(labels: Ints, rng: np.random.Generator) -> Bytes:
    """A font's digits in one flat color on another, light on dark or dark on light."""
    fine = 3  # Drawn at three times the size and reduced, so that edges are smooth.
    fonts = [ImageFont.load_default(size=size) for size in range(72, 106)]
    masks = []
    for label in labels:
        font = fonts[int(rng.integers(72, 106)) - 72]
        sheet = Image.new("L", (SIDE * fine, SIDE * fine))
        # Centered by its own outline: by the font's line height a digit is too high or too low.
        stroke = int(rng.integers(0, 5))
        text = CLASSES[label]
        pen = ImageDraw.Draw(sheet)
        left, top, right, bottom = pen.textbbox((0, 0), text, font=font, stroke_width=stroke)
        corner = ((sheet.width - left - right) / 2, (sheet.height - top - bottom) / 2)
        pen.text(corner, text, fill=255, font=font, stroke_width=stroke)
        shift = (float(rng.uniform(-9, 9)), float(rng.uniform(-7, 7)))
        angle, shear = float(rng.uniform(-20, 20)), float(rng.uniform(-0.25, 0.25))
        masks.append(np.asarray(_warp(sheet, angle, shear, 1.0, shift).reduce(fine)))
    dark = rng.uniform(0, 110, (len(labels), 1, 1, 3))
    light = rng.uniform(145, 255, (len(labels), 1, 1, 3))
    swap = rng.random((len(labels), 1, 1, 1)) < 0.5
    paper, ink = np.where(swap, dark, light), np.where(swap, light, dark)
    return _quantize(_painted(paper, ink, masks))


def _photo(scans: Bytes, rng: np.random.Generator) -> Bytes:
    """|texture - digit| per channel: MNIST-M's recipe, with textures instead of photographs."""
    digit = np.stack([np.asarray(_enlarge(scan, 28), np.float64) for scan in scans])[..., None]
    # A stroke turns a value v into 255 - v and is invisible if v is in the middle: every
    # channel stays more or less on one side of it.
    count = len(scans)
    base = rng.uniform(20, 85, (count, 1, 1, 3))
    base = np.where(rng.random((count, 1, 1, 3)) < 0.5, base, 255 - base)
    texture = np.clip(base + rng.uniform(60, 130, (count, 1, 1, 1)) * _noise(count, rng), 0, 255)
    return _quantize(np.abs(texture - digit))


def _noise(count: int, rng: np.random.Generator) -> Floats:
    """Smooth color noise [count, 32, 32, 3] around 0, in octaves: the finer, the weaker."""
    total = np.zeros((count, SIDE, SIDE, 3))
    for cells, weight in ((2, 0.5), (4, 0.3), (8, 0.25), (16, 0.15)):
        grid = rng.uniform(-1, 1, (count, cells + 1, cells + 1, 3))
        place = np.arange(SIDE) * (cells / SIDE)
        low = place.astype(np.int64)
        part = place - low
        part = part * part * (3 - 2 * part)  # Smoothstep: no creases along the grid lines.
        # Plain arithmetic, no matrix product: the same bytes with any BLAS.
        across, down = part[None, None, :, None], part[None, :, None, None]
        wide = grid[:, :, low] * (1 - across) + grid[:, :, low + 1] * across
        total += weight * (wide[:, low] * (1 - down) + wide[:, low + 1] * down)
    return total


def _inverse(scans: Bytes, rng: np.random.Generator) -> Bytes:
    """Dark, thick, blurred strokes, moved and tilted, on light and slightly tinted paper."""
    masks = []
    for scan in scans:
        shift = (float(rng.uniform(-3, 3)), float(rng.uniform(-3, 3)))
        angle, shear = float(rng.uniform(-12, 12)), float(rng.uniform(-0.2, 0.2))
        moved = _warp(_enlarge(scan, 28), angle, shear, float(rng.uniform(0.8, 1.0)), shift)
        if rng.random() < 0.5:
            # One pixel thicker; Pillow's MaxFilter adds two and fills the loops of 6, 8 and 9.
            again = Image.new("L", moved.size)
            again.paste(moved, (1, 0))
            moved = ImageChops.lighter(moved, again)
        radius = float(rng.uniform(0.6, 1.1))
        masks.append(np.asarray(moved.filter(ImageFilter.GaussianBlur(radius))))
    count = len(scans)
    paper = rng.uniform(195, 240, (count, 1, 1, 1)) + rng.uniform(-12, 12, (count, 1, 1, 3))
    ink = rng.uniform(10, 80, (count, 1, 1, 1)) + rng.uniform(-8, 8, (count, 1, 1, 3))
    grain = rng.normal(0, 4, (count, SIDE, SIDE, 1))
    return _quantize(_painted(paper, ink, masks) + grain)
