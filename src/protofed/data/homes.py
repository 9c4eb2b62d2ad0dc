"""The homes of the tasks' files: what is where, and how a copy of it is known to be right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from protofed.errors import ProtofedError, unknown


@dataclass(frozen=True)
class Source:
    """One file: where it goes below the task's folder, where it comes from, how it is checked.

    ``urls`` are tried in order, the home first. ``md5`` is what ``cited`` publishes, None where
    nobody publishes one. ``count`` is the number of images, labels or lines in the file.
    """

    path: str
    urls: tuple[str, ...]
    domain: str
    md5: str | None = None
    cited: str = ""
    size: int | None = None
    count: int | None = None


@dataclass(frozen=True)
class Manual:
    """Files whose home needs a person: a login, or a drive that asks before it serves."""

    domains: tuple[str, ...]
    what: str
    homes: tuple[str, ...]
    layout: str


@dataclass(frozen=True)
class Recipe:
    """All files of a task."""

    files: tuple[Source, ...] = ()
    manual: tuple[Manual, ...] = ()

    @property
    def domains(self) -> list[str]:
        """The domains that have files, in the order of the table."""
        named = [s.domain for s in self.files] + [d for m in self.manual for d in m.domains]
        return list(dict.fromkeys(named))


# ---- where the files are -----------------------------------------------------------------------

_MNIST = ("http://yann.lecun.com/exdb/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/")
_USPS = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"
_SVHN = "http://ufldl.stanford.edu/housenumbers/"
# Pinned to a commit, so that the lists stay what they were when they were counted.
_VLCS = (
    "https://raw.githubusercontent.com/fmcarlucci/JigenDG/"
    "0005a3d6cdac0481fa0877ea90e4f44340c2ca5e/data/txt_lists/"
)
_PACS = (
    "https://raw.githubusercontent.com/DeLightCMU/RSC/"
    "8295dc7cecab11320ba8018363187dee956c7e87/Domain_Generalization/data/correct_txt_lists/",
    "https://raw.githubusercontent.com/DeLightCMU/RSC/"
    "d627949c5e09a1cb2b936d45b803ef90e4e2f2fa/data/correct_txt_lists/",
)


def _mnist(name: str, md5: str, size: int, count: int) -> Source:
    # MD5: torchvision/datasets/mnist.py. Sizes: the home page's list of its four files.
    urls = tuple(home + name for home in _MNIST)
    return Source(f"mnist/{name}", urls, "mnist", md5, "torchvision.datasets.MNIST", size, count)


def _usps(name: str, md5: str, count: int) -> Source:
    # MD5: torchvision/datasets/usps.py.
    cited = "torchvision.datasets.USPS"
    return Source(f"usps/{name}", (_USPS + name,), "usps", md5, cited, count=count)


def _svhn(name: str, md5: str, count: int) -> Source:
    # MD5: torchvision/datasets/svhn.py.
    cited = "torchvision.datasets.SVHN"
    return Source(f"svhn/{name}", (_SVHN + name,), "svhn", md5, cited, count=count)


def _lists(
    homes: Sequence[str], domain: str, counts: Mapping[str, int]
) -> Iterator[Source]:  # nobody publishes a checksum of these
    for name, count in counts.items():
        yield Source(f"lists/{name}", tuple(h + name for h in homes), domain, count=count)


def _kfold(domain: str, train: int, crossval: int) -> Iterator[Source]:
    counts = {"train": train, "crossval": crossval, "test": train + crossval}
    names = {f"{domain}_{part}_kfold.txt": n for part, n in counts.items()}
    return _lists(_PACS, domain, names)


def _vlcs(domain: str, train: int, test: int) -> Iterator[Source]:
    names = {f"{domain.upper()}_train.txt": train, f"{domain.upper()}_test.txt": test}
    return _lists((_VLCS,), domain, names)


RECIPES: dict[str, Recipe] = {
    "digits": Recipe(
        files=(
            _mnist(
                "train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9912422, 60000
            ),
            _mnist("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432", 28881, 60000),
            _mnist("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3", 1648877, 10000),
            _mnist("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c", 4542, 10000),
            _usps("usps.bz2", "ec16c51db3855ca6c91edd34d0e9b197", 7291),
            _usps("usps.t.bz2", "8ea070ee2aca1ac39742fdd1ef5ed118", 2007),
            _svhn("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373", 73257),
            _svhn("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3", 26032),
        ),
        manual=(
            Manual(
                ("syn",),
                "Synthetic Digits (Roy et al. 2018, 12000 images); Kaggle asks for a login",
                ("https://www.kaggle.com/datasets/prasunroy/synthetic-digits",),
                "syn/imgs_train/<0-9>/*.png and syn/imgs_valid/<0-9>/*.png, as the archive has "
                "them, or the archive itself in syn/",
            ),
        ),
    ),
    "office_caltech": Recipe(
        manual=(
            Manual(
                ("caltech", "amazon", "webcam", "dslr"),
                "Office-Caltech-10 (Gong et al. 2012): the 10 classes that Office-31 (Saenko et "
                "al. 2010) and Caltech-256 (Griffin et al. 2007) share, 2533 images",
                (
                    "https://github.com/jindongwang/transferlearning/tree/master/data"
                    "#office-caltech10",
                ),
                "<domain>/<class>/*.jpg with the domains caltech, amazon, webcam and dslr",
            ),
        ),
    ),
    "pacs": Recipe(
        files=(
            *_kfold("photo", 1499, 171),
            *_kfold("art_painting", 1840, 208),
            *_kfold("cartoon", 2107, 237),
            *_kfold("sketch", 3531, 398),
        ),
        manual=(
            Manual(
                ("photo", "art_painting", "cartoon", "sketch"),
                "PACS (Li et al. 2017), 9991 images; the authors' page links to their drive",
                ("https://dali-dl.github.io/project_iccv2017.html",),
                "<domain>/<class>/*.jpg with the domains photo, art_painting, cartoon and sketch "
                "(the archive's folder kfold), or the archive itself as pacs.zip beside that "
                "folder",
            ),
        ),
    ),
    "vlcs": Recipe(
        files=(
            *_vlcs("caltech", 991, 424),
            *_vlcs("labelme", 1859, 797),
            *_vlcs("pascal", 2363, 1013),
            *_vlcs("sun", 2297, 985),
        ),
        manual=(
            Manual(
                ("caltech", "labelme", "pascal", "sun"),
                "VLCS (Fang et al. 2013), 10729 images; from the drive that DomainBed's "
                "scripts/download.py names",
                ("https://drive.google.com/uc?id=1skwblH1_okBwxWxmRsp9_qi15hyPpxg8",),
                "<domain>/<class>/*.jpg with the domains caltech, labelme, pascal and sun (in "
                "the archive: Caltech101, LabelMe, VOC2007 and SUN09), or the archive itself as "
                "vlcs.tar.gz beside that folder",
            ),
        ),
    ),
}


def recipe(task: str, domain: str | None = None) -> Recipe:
    """The files of a task, or of one domain of it."""
    if task == "glyphs":
        raise ProtofedError("glyphs needs no download", "protofed run --task glyphs makes it")
    if task not in RECIPES:
        raise unknown("task with files to fetch", task, RECIPES)
    whole = RECIPES[task]
    if domain is None:
        return whole
    if domain not in whole.domains:
        raise unknown(f"domain of {task}", domain, whole.domains)
    return Recipe(
        tuple(s for s in whole.files if s.domain == domain),
        tuple(m for m in whole.manual if domain in m.domains),
    )
