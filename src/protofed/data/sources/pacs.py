"""PACS (Li et al. 2017): seven classes as photographs, art paintings, cartoons and sketches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from protofed.data.sources.image_tree import TreeImage, mod10, read_list, read_tree
from protofed.data.sources.published import ManualDownload, PublishedTask, remote_list
from protofed.data.task import DataMissing, Parts, Plan, TaskInfo

DOMAINS = ("photo", "art_painting", "cartoon", "sketch")

# Copies of the authors' lists, pinned to commits: they stay what they were when counted.
LISTS = (
    "https://raw.githubusercontent.com/DeLightCMU/RSC/"
    "8295dc7cecab11320ba8018363187dee956c7e87/Domain_Generalization/data/correct_txt_lists/",
    "https://raw.githubusercontent.com/DeLightCMU/RSC/"
    "d627949c5e09a1cb2b936d45b803ef90e4e2f2fa/data/correct_txt_lists/",
)


def plan(paths: Sequence[Path], test_split: str) -> Plan:
    tree = read_tree(TASK, paths)
    if test_split == "mod10":
        return tree.plan(mod10)

    def kfold_leaky(domain: str, images: Sequence[TreeImage]) -> Parts:
        """The training images come from the list; the test images are all of the domain's."""
        train, test = (tree.lists.get((domain, f"{split}_kfold")) for split in ("train", "test"))
        chosen = read_list(train, images) if train else []
        if not chosen:
            why = f"matches none of the images: '{train.name}'" if train else "is not found"
            raise DataMissing(
                f"test split kfold_leaky needs the list {domain}_train_kfold.txt, which {why}",
                "protofed data fetch pacs gets the lists; --test-split mod10 needs none",
            )
        tested = read_list(test, images) if test else []
        every = [image.sample for image in images]
        return {(domain, "train"): chosen, (domain, "test"): tested or every}

    tree.notes.append("The test images include the training images (the papers' leaky split).")
    return tree.plan(kfold_leaky)


TASK = PublishedTask(
    info=TaskInfo(
        name="pacs",
        domains=DOMAINS,
        classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
        clients={"photo": 3, "art_painting": 2, "cartoon": 1, "sketch": 4},
        samples=dict.fromkeys(DOMAINS, 0.3),
        test_splits=("mod10", "kfold_leaky"),
        leftover=True,
        about="PACS: seven classes as photographs, art paintings, cartoons and sketches.",
    ),
    plan=plan,
    counts={
        "photo": (1336, 334),
        "art_painting": (1640, 408),
        "cartoon": (1876, 468),
        "sketch": (3144, 785),
    },
    folders=("pacs", "pacsdata"),
    aliases={"art_painting": ("art",)},
    distributions={"fedseproto": (2, 3, 4, 1)},
    files=tuple(
        remote_list(f"{domain}_{part}_kfold.txt", LISTS, domain, count)
        for domain, train, crossval in (
            ("photo", 1499, 171),
            ("art_painting", 1840, 208),
            ("cartoon", 2107, 237),
            ("sketch", 3531, 398),
        )
        for part, count in (("train", train), ("crossval", crossval), ("test", train + crossval))
    ),
    manual=(
        ManualDownload(
            domains=DOMAINS,
            what="PACS (Li et al. 2017), 9991 images; the authors' page links to their drive",
            pages=("https://dali-dl.github.io/project_iccv2017.html",),
            layout="<domain>/<class>/*.jpg with the domains photo, art_painting, cartoon and "
            "sketch (the archive's folder kfold), or the archive itself as pacs.zip next to that "
            "folder",
        ),
    ),
)
