"""A task at a glance: how many images each class has, and a contact sheet of them."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from protofed.data.task import Images, Task

_GAP = 4
_MARGIN = 10
_INK, _FAINT, _PAPER = "#222222", "#b0b0b0", "white"


def class_counts(task: Task) -> dict[str, dict[str, list[int]]]:
    """The number of images of each class, by domain and split."""

    def per_class(images: Images) -> list[int]:
        return torch.bincount(images.y, minlength=len(task.classes)).tolist()

    return {
        name: {"train": per_class(d.train), "test": per_class(d.test)}
        for name, d in task.domains.items()
    }


def contact_sheet(task: Task, each: int = 4) -> bytes:
    """A PNG with a row per domain and a column per class, ``each`` images in every cell.

    They are evenly spaced training images; small ones are enlarged.
    """
    zoom = max(1, 64 // task.image_size)
    side = task.image_size * zoom
    across = 1 if each == 1 else 2
    down = -(-each // across)
    font = _font(15)
    width = max([across * (side + _GAP), *(_length(c, font) + 12 for c in task.classes)])
    height = down * (side + _GAP)
    left = max(_length(d, font) for d in task.domains) + 2 * _MARGIN
    top = 40
    size = (
        left + len(task.classes) * (width + _MARGIN),
        top + len(task.domains) * (height + _MARGIN),
    )
    page = Image.new("RGB", size, _PAPER)
    pen = ImageDraw.Draw(page)
    for column, name in enumerate(task.classes):
        middle = left + column * (width + _MARGIN) + width // 2
        pen.text((middle, top // 2), name, _INK, font, anchor="mm")
    for row, (name, domain) in enumerate(task.domains.items()):
        y = top + row * (height + _MARGIN)
        pen.text((_MARGIN, y + height // 2), name, _INK, font, anchor="lm")
        for column in range(len(task.classes)):
            x = left + column * (width + _MARGIN) + (width - across * (side + _GAP)) // 2
            rows = torch.nonzero(domain.train.y == column).flatten()
            if not len(rows):
                pen.text(
                    (x + across * (side + _GAP) // 2, y + height // 2),
                    "none",
                    _FAINT,
                    font,
                    anchor="mm",
                )
            n = min(each, len(rows))
            for i in range(n):
                pixels = domain.train.x[rows[i * len(rows) // n]].permute(1, 2, 0).numpy()
                image = Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST)
                corner = (x + i % across * (side + _GAP), y + i // across * (side + _GAP))
                page.paste(image, corner)
    buffer = io.BytesIO()
    page.save(buffer, "PNG")
    return buffer.getvalue()


def _length(text: str, font: ImageFont.FreeTypeFont) -> int:
    return int(font.getlength(text)) + 1


def _font(size: int) -> ImageFont.FreeTypeFont:
    # Pillow's own font has Latin letters only; matplotlib ships one with many scripts.
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(path, size)
