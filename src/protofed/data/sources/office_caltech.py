"""Office-Caltech-10 (Gong et al. 2012): objects of an office, from four kinds of cameras."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from protofed.data.sources.image_tree import mod10, read_tree
from protofed.data.sources.published import ManualDownload, PublishedTask
from protofed.data.task import Plan, TaskInfo

DOMAINS = ("caltech", "amazon", "webcam", "dslr")


def plan(paths: Sequence[Path], test_split: str) -> Plan:
    return read_tree(TASK, paths).plan(mod10)


TASK = PublishedTask(
    info=TaskInfo(
        name="office_caltech",
        domains=DOMAINS,
        classes=(
            "backpack", "bike", "calculator", "headphones", "keyboard",
            "laptop", "monitor", "mouse", "mug", "projector",
        ),
        clients={"caltech": 3, "amazon": 2, "webcam": 1, "dslr": 4},
        samples=dict.fromkeys(DOMAINS, 0.2),
        test_splits=("mod10",),
        repair=True,
        about="Office-Caltech-10: objects of an office, from four kinds of cameras.",
    ),
    plan=plan,
    counts={"caltech": (899, 224), "amazon": (768, 190), "webcam": (237, 58), "dslr": (127, 30)},
    folders=("officecaltech", "officecaltech10"),
    aliases={
        "caltech": ("caltech10", "caltech256"),
        "bike": ("touringbike",),
        "headphones": ("headphone",),
        "keyboard": ("computerkeyboard",),
        "laptop": ("laptopcomputer", "laptop101"),
        "monitor": ("computermonitor",),
        "mouse": ("computermouse",),
        "mug": ("coffeemug",),
        "projector": ("videoprojector",),
    },
    distributions={"fedseproto": (2, 3, 4, 1)},
    manual=(
        ManualDownload(
            domains=DOMAINS,
            what="Office-Caltech-10 (Gong et al. 2012): the 10 classes that Office-31 (Saenko et "
            "al. 2010) and Caltech-256 (Griffin et al. 2007) share, 2533 images",
            pages=("https://github.com/jindongwang/transferlearning/tree/master/data#office-caltech10",),
            layout="<domain>/<class>/*.jpg with the domains caltech, amazon, webcam and dslr",
        ),
    ),
)  # fmt: skip
