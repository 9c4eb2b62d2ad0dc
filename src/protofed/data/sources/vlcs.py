"""VLCS (Fang et al. 2013): five classes from four collections of photographs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from protofed import keys
from protofed.data.sources.image_tree import TreeImage, mod10, read_list, read_tree
from protofed.data.sources.published import ManualDownload, PublishedTask, remote_list
from protofed.data.task import SPLITS, Parts, Plan, TaskInfo

COUNTS = {"caltech": (991, 424), "labelme": (1859, 797), "pascal": (2363, 1013), "sun": (2297, 985)}
DOMAINS = tuple(COUNTS)
CLASSES = ("bird", "car", "chair", "dog", "person")

# Pinned to a commit: the lists stay what they were when counted.
LISTS = (
    "https://raw.githubusercontent.com/fmcarlucci/JigenDG/"
    "0005a3d6cdac0481fa0877ea90e4f44340c2ca5e/data/txt_lists/"
)


def plan(paths: Sequence[Path], test_split: str) -> Plan:
    tree = read_tree(TASK, paths)
    if test_split == "mod10":
        return tree.plan(mod10)

    def seventy_thirty(domain: str, images: Sequence[TreeImage]) -> Parts:
        """From lists, else from the folders (or file names) of the splits, else drawn by a key."""
        listed = {
            (domain, split): read_list(tree.lists[domain, split], images)
            for split in SPLITS
            if (domain, split) in tree.lists
        }
        if len(listed) == 2 and all(listed.values()):
            tree.notes.append("The 70/30 split is from the lists.")
            return listed
        if {image.split for image in images} == set(SPLITS):
            tree.notes.append("The 70/30 split is from the folders.")
            return {(domain, s): [i.sample for i in images if i.split == s] for s in SPLITS}
        tree.notes.append("No lists or folders give the 70/30 split: it is drawn, class by class.")
        return drawn(domain, images)

    return tree.plan(seventy_thirty)


def drawn(domain: str, images: Sequence[TreeImage]) -> Parts:
    """A random 70 % of each class for training, the same for everyone."""
    parts: Parts = {(domain, split): [] for split in SPLITS}
    for label in range(len(CLASSES)):
        own = [image for image in images if image.label == label]
        order = keys.generator("vlcs", domain, label, "70_30").permutation(len(own))
        first = set(order[: round(0.7 * len(own))].tolist())
        for i, image in enumerate(own):
            parts[domain, "train" if i in first else "test"].append(image.sample)
    return parts


TASK = PublishedTask(
    info=TaskInfo(
        name="vlcs",
        domains=DOMAINS,
        classes=CLASSES,
        clients={"caltech": 2, "labelme": 3, "pascal": 4, "sun": 1},
        samples=dict.fromkeys(DOMAINS, 0.3),
        test_splits=("70_30", "mod10"),
        leftover=True,
        about="VLCS: five classes from four collections of photographs.",
    ),
    plan=plan,
    counts=COUNTS,
    folders=("vlcs",),
    aliases={
        "caltech": ("caltech101",),
        "pascal": ("voc2007", "voc", "pascalvoc", "vocpascal"),
        "sun": ("sun09",),
        # some copies number the classes
        **{name: (str(label),) for label, name in enumerate(CLASSES)},
    },
    distributions={"fedseproto": (2, 3, 4, 1)},
    files=tuple(
        remote_list(f"{domain.upper()}_{split}.txt", [LISTS], domain, count)
        for domain, counts in COUNTS.items()
        for split, count in zip(SPLITS, counts, strict=True)
    ),
    manual=(
        ManualDownload(
            domains=DOMAINS,
            what="VLCS (Fang et al. 2013), 10729 images; from the drive that DomainBed's "
            "scripts/download.py names",
            pages=("https://drive.google.com/uc?id=1skwblH1_okBwxWxmRsp9_qi15hyPpxg8",),
            layout="<domain>/<class>/*.jpg with the domains caltech, labelme, pascal and sun (in "
            "the archive: Caltech101, LabelMe, VOC2007 and SUN09), or the archive itself as "
            "vlcs.tar.gz next to that folder",
        ),
    ),
)
