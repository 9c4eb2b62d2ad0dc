"""What is known about the published tasks without their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Spec:
    """A published task. Domains, classes and folders have aliases, as copies of the data differ.

    Aliases are compared by ``plain``. ``official`` has each domain's training and test images.
    ``test_splits`` are the ways to divide the images, the default first.
    """

    name: str
    domains: Mapping[str, tuple[str, ...]]
    classes: Mapping[str, tuple[str, ...]]
    folders: tuple[str, ...]
    clients: Mapping[str, int]
    samples: Mapping[str, float]
    official: Mapping[str, tuple[int, int]]
    test_splits: tuple[str, ...]
    about: str
    leftover: bool = False
    repair: bool = False
    whole_unseen: bool = True


@dataclass(frozen=True)
class Sample:
    """An image not yet decoded: its name for messages, its label, and its file's bytes or array."""

    name: str
    label: int
    read: Callable[[], bytes | NDArray[np.uint8]]


@dataclass(frozen=True)
class Plan:
    """Which images a task has, in their order, and what a reader of its numbers should know."""

    classes: tuple[str, ...]
    parts: Mapping[tuple[str, str], list[Sample]]
    notes: list[str] = field(default_factory=list)


def plain(name: str) -> str:
    """A name as aliases are compared: small letters, without punctuation."""
    return "".join(c for c in name.casefold() if c.isalnum())


def _own(*names: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(names, ())


SPECS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec(
            name="digits",
            domains={
                "mnist": (),
                "usps": (),
                "svhn": (),
                "syn": ("synthetic", "synthdigits", "syndigits"),
            },
            classes=_own(*"0123456789"),
            folders=("digits",),
            clients={"mnist": 6, "usps": 4, "svhn": 3, "syn": 7},
            # 1 % of the official training sets, as counts: so they hold for partial data too.
            samples={"mnist": 600, "usps": 72, "svhn": 732, "syn": 100},
            official={
                "mnist": (60000, 10000),
                "usps": (7291, 2007),
                "svhn": (73257, 26032),
                "syn": (10000, 2000),
            },
            test_splits=("standard",),
            about="Digits: handwritten (MNIST, USPS), of houses (SVHN), synthetic (SYN).",
            whole_unseen=False,
        ),
        Spec(
            name="office_caltech",
            domains={"caltech": ("caltech10", "caltech256"), "amazon": (), "webcam": (),
                     "dslr": ()},
            classes={
                "backpack": (),
                "bike": ("touringbike",),
                "calculator": (),
                "headphones": ("headphone",),
                "keyboard": ("computerkeyboard",),
                "laptop": ("laptopcomputer", "laptop101"),
                "monitor": ("computermonitor",),
                "mouse": ("computermouse",),
                "mug": ("coffeemug",),
                "projector": ("videoprojector",),
            },
            folders=("officecaltech", "officecaltech10"),
            clients={"caltech": 3, "amazon": 2, "webcam": 1, "dslr": 4},
            samples=dict.fromkeys(("caltech", "amazon", "webcam", "dslr"), 0.2),
            official={
                "caltech": (899, 224),
                "amazon": (768, 190),
                "webcam": (237, 58),
                "dslr": (127, 30),
            },
            test_splits=("mod10",),
            about="Office-Caltech-10: things of an office from four kinds of cameras.",
            repair=True,
        ),
        Spec(
            name="pacs",
            domains={"photo": (), "art_painting": ("art",), "cartoon": (), "sketch": ()},
            classes=_own("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
            folders=("pacs", "pacsdata"),
            clients={"photo": 3, "art_painting": 2, "cartoon": 1, "sketch": 4},
            samples=dict.fromkeys(("photo", "art_painting", "cartoon", "sketch"), 0.3),
            official={
                "photo": (1336, 334),
                "art_painting": (1640, 408),
                "cartoon": (1876, 468),
                "sketch": (3144, 785),
            },
            test_splits=("mod10", "kfold_leaky"),
            about="PACS: seven classes as photographs, paintings, cartoons and sketches.",
            leftover=True,
        ),
        Spec(
            name="vlcs",
            domains={
                "caltech": ("caltech101",),
                "labelme": (),
                "pascal": ("voc2007", "voc", "pascalvoc", "vocpascal"),
                "sun": ("sun09",),
            },
            classes={"bird": ("0",), "car": ("1",), "chair": ("2",), "dog": ("3",),
                     "person": ("4",)},
            folders=("vlcs",),
            clients={"caltech": 2, "labelme": 3, "pascal": 4, "sun": 1},
            samples=dict.fromkeys(("caltech", "labelme", "pascal", "sun"), 0.3),
            official={
                "caltech": (991, 424),
                "labelme": (1859, 797),
                "pascal": (2363, 1013),
                "sun": (2297, 985),
            },
            test_splits=("70_30", "mod10"),
            about="VLCS: five classes from four collections of photographs.",
            leftover=True,
        ),
    )
}  # fmt: skip
