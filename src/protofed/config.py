"""What a run is asked to do: every setting is declared here, with type, range, default and help.

``Config`` is data. It is made from what is given, the protocol, and the task's static description;
no image is read and no GPU is looked for, so it can be made, hashed, compared and written anywhere.
What a run then *finds* (images, device, precision, versions) is in ``protofed.federation.facts``.
The command line's options, the checks of TOML files and the table in docs/settings.md are all made
from the fields of ``Config``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any

from protofed.data import Task, TaskInfo, choose, describe, distribution, distributions
from protofed.data.augment import AUGMENTS
from protofed.data.decode import parse_range
from protofed.data.info import FOLDER
from protofed.data.split import UNUSED, VAL_FOLDERS
from protofed.data.task import MAX_IMAGE_PIXELS, Reading
from protofed.data.unpack import MAX_UNPACKED_GB
from protofed.errors import ProtofedError, unknown
from protofed.files import FILE, FORMAT, check_format, expand_user
from protofed.method import READING, Method
from protofed.methods import create, fingerprint, known_class, method_class, reference
from protofed.models import LARGE_IMAGE, LARGE_MODEL, NORMS
from protofed.models.mixed import Models, checked_models, model_names, without_folders
from protofed.models.own import known_factory, load_factory, short_name
from protofed.models.resnet import IMAGENET
from protofed.toml import parse_toml, toml_text
from protofed.user_code import is_file

AUTO = "auto"
"""The value of a setting that the run itself resolves when it starts."""

MOST_CLIENTS, MOST_SAMPLES, MOST_SEEDS = 10**5, 10**9, 10**4
"""The most clients of a domain, samples of a client, and seeds of a study."""

EACH = "each"
"""``leave_out = "each"`` of a comparison: one run for each domain, trained without it."""

PRECISIONS = ("fp32", "fp64", "tf32", "bf16")
DEVICES = ("cpu", "cuda")
ENGINES = ("loop", "workers", "lanes", "ray")
OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine", "step")
ADAM_LR = 0.001
"""The default learning rate of adam and adamw; a protocol's is for sgd."""

TRAINING, CLIENTS, ROBUSTNESS, PRIVACY = "Training", "Clients and data", "Robustness", "Privacy"
ENGINE, OUTPUT = "Engine", "Output"
PANELS = (TRAINING, CLIENTS, ROBUSTNESS, PRIVACY, ENGINE, OUTPUT)
"""The groups in which help and docs show the settings."""


# ---- a setting ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Everything that is declared about a setting.

    ``kind`` is int, float, bool, str, table (a value, or one for each domain or client), rounds or
    part (``unused``, ``folder`` or a fraction). ``default`` is None if the protocol or the task
    decides, or if None means "off". ``hashed``: whether the setting is part of ``Config.hash``. A
    setting that was added ``later`` is part of it only if it is not the default, so that older runs
    keep their hashes.
    """

    kind: str
    panel: str
    help: str
    default: Any = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    metavar: str = ""
    hashed: bool = True
    later: bool = False

    @property
    def range(self) -> str:
        if self.choices:
            return ", ".join(self.choices)
        if self.kind == "bool":
            return "true or false"
        if self.kind not in ("int", "float"):
            return self.metavar
        noun = "a whole number" if self.kind == "int" else "a number"
        low = self.least if self.least is not None else self.above
        high = self.most if self.most is not None else self.below
        if low is not None and high is not None and high >= 1000 * max(1, low):
            most = f"{high:,.15g}"  # a guard against absurd values, no interval
            if self.least is not None:
                return f"{noun} from {low:g} to {most}"
            return f"{noun} above {low:g} and at most {most}"
        if low is not None and high is not None:
            ends = f"{'[' if self.least is not None else '('}{low:g}, {high:g}"
            return f"{noun} in {ends}{']' if self.most is not None else ')'}"
        if self.least is not None:
            return f"{noun} of at least {low:g}"
        return f"{noun} above {low:g}"

    def check(self, name: str, value: Any) -> Any:
        """The value as the setting's own type, or an error that says what is allowed."""
        if value is None:
            return None
        if self.choices and (not isinstance(value, str) or value not in self.choices):
            raise unknown(f"value for {name}", value, self.choices)
        if self.kind == "str" and not isinstance(value, str):
            raise ProtofedError(f"{name} must be text, got {value!r:.100}")
        if self.kind == "table":
            parts = value.values() if isinstance(value, Mapping) else (value,)
            if not all(isinstance(part, (str, int, float)) for part in parts):
                raise ProtofedError(f"{name} must be {self.metavar}, got {value!r:.100}")
        if self.kind == "bool" and not isinstance(value, bool):
            raise ProtofedError(f"{name} must be true or false, got {value!r:.100}")
        named = value in (UNUSED, VAL_FOLDERS)
        if self.kind == "part" and not named and not (is_number(value) and 0 < value < 1):
            words = f"'{UNUSED}', '{VAL_FOLDERS}' or a fraction above 0 and below 1"
            raise ProtofedError(f"{name} must be {words}, got {value!r:.100}")
        has_type = {"int": is_whole, "float": is_number}.get(self.kind)
        if has_type is not None and not (has_type(value) and self._in_range(value)):
            raise ProtofedError(f"{name} must be {self.range}, got {value!r:.100}")
        return float(value) if self.kind == "float" else value  # 1 and 1.0 are the same run

    def _in_range(self, value: float) -> bool:
        ends = ((ge, self.least), (gt, self.above), (le, self.most), (lt, self.below))
        return all(end is None or within(value, end) for within, end in ends)


def setting(kind: str, panel: str, help: str, default: Any = None, **more: Any) -> Any:
    return field(metadata={"setting": Setting(kind, panel, help, default, **more)})


@dataclass(frozen=True)
class Config:
    """One run as it was asked for: a task, a method, a seed, and the settings."""

    task: str
    method: Method
    protocol: str = setting(
        "str",
        TRAINING,
        "Sets the default model, batch size, epochs, rounds and optimizer: glyphs, fpl, i2pfl, "
        "fedseproto, or folder (chosen to suit your images); default: the task's own (see "
        "`protofed tasks`).",
        metavar="NAME",
    )
    seed: int = setting(
        "int", TRAINING, "Seed of the split, initial weights and training.", 0, least=0, most=10**15
    )
    rounds: int = setting(
        "int", TRAINING, "Communication rounds; default: the protocol's.", least=1, most=10**6
    )
    epochs: int = setting(
        "int", TRAINING, "Local epochs in each round; default: the protocol's.", least=1, most=10**6
    )
    batch: int = setting(
        "int", TRAINING, "Batch size; default: the protocol's.", least=1, most=10**6
    )
    lr: float = setting(
        "float",
        TRAINING,
        "Learning rate; default: the protocol's, and 0.001 with adam or adamw.",
        above=0,
        most=10**6,
    )
    momentum: float = setting(
        "float",
        TRAINING,
        "Momentum of sgd, reset every round; default: the protocol's.",
        least=0,
        below=1,
    )
    weight_decay: float = setting(
        "float", TRAINING, "Weight decay; default: the protocol's.", least=0, most=10**6
    )
    optimizer: str = setting(
        "str",
        TRAINING,
        "Optimizer of local training. Its state starts fresh in every round of every client. adam "
        "adds the weight decay to the gradient, adamw does not; both use PyTorch's default betas.",
        "sgd",
        choices=OPTIMIZERS,
        later=True,
    )
    schedule: str = setting(
        "str",
        TRAINING,
        "How the learning rate falls from round to round, after the warmup: not at all, along half "
        "a cosine that would reach 0 after the last round, or in steps.",
        "constant",
        choices=SCHEDULES,
        later=True,
    )
    step_every: int | None = setting(
        "int",
        TRAINING,
        "Rounds between the steps of schedule = step; default: a third of all rounds.",
        least=1,
        most=10**6,
        later=True,
    )
    step_factor: float = setting(
        "float",
        TRAINING,
        "The factor by which the learning rate is multiplied at each step of schedule = step.",
        0.1,
        above=0,
        below=1,
        later=True,
    )
    warmup_rounds: int = setting(
        "int",
        TRAINING,
        "Rounds in which the learning rate first rises, in equal steps, to its full value.",
        0,
        least=0,
        most=10**6,
        later=True,
    )
    label_smoothing: float = setting(
        "float",
        TRAINING,
        "Label smoothing of the cross-entropy: this much of a label's weight is spread over all "
        "classes.",
        0.0,
        least=0,
        below=1,
        later=True,
    )
    clip_norm: float | None = setting(
        "float",
        TRAINING,
        "The largest norm that a step's gradient may have; a longer one is scaled down to it.",
        above=0,
        most=10**6,
        later=True,
    )
    sampling: str = setting(
        "str",
        TRAINING,
        "How a client's images are drawn in an epoch: each once (uniform), or each of its classes "
        "equally often (balanced), in the same number of steps.",
        "uniform",
        choices=("uniform", "balanced"),
        later=True,
    )
    model: Models = setting(
        "table",
        TRAINING,
        "resnet10, resnet18, cnn3 or cnn2, for small images; resnet18_imagenet, resnet34_imagenet "
        "or resnet50_imagenet, for images of 96 pixels or more; path/to/file.py:factory, a model "
        "of your own (docs/models.md). Default: resnet18_imagenet for images of 96 pixels or more, "
        "otherwise the protocol's. Clients may have different models with features of the same "
        "size: cnn3,cnn2 alternates over the clients, scan-0=cnn3,... names a model for each. Only "
        "methods that send no weights allow this (docs/heterogeneous.md).",
        metavar="NAME | NAME,NAME | CLIENT=NAME,...",
    )
    width: int | None = setting(
        "int", TRAINING, "Channels of the first layer; default: the model's.", least=1, most=10**5
    )
    norm: str | None = setting(
        "str", TRAINING, "Normalization layers; default: the model's.", choices=NORMS
    )
    weights: str | None = setting(
        "str",
        TRAINING,
        "A file of weights to start from, e.g. trained on ImageNet: safetensors, or a state dict, "
        "with the entry names of torchvision or timm. The head is not loaded.",
        metavar="FILE",
        later=True,
    )
    train: str = setting(
        "str",
        TRAINING,
        "What is trained: all of the model, or only what follows its backbone; the backbone then "
        "stays as it is and is not sent to the server.",
        "all",
        choices=("all", "head"),
        later=True,
    )
    freeze_bn: bool = setting(
        "bool",
        TRAINING,
        "Keep the backbone's BatchNorm statistics as they are at the start, and normalize with "
        "them in training too; its scale and shift are still trained.",
        False,
        later=True,
    )
    participation: float = setting(
        "float", TRAINING, "Fraction of the clients that train in a round.", 1.0, above=0, most=1
    )
    average: str = setting(
        "str",
        TRAINING,
        "How clients are weighted in the averaged model: by number of samples, or equally.",
        "samples",
        choices=("samples", "uniform"),
    )
    min_class_count: int = setting(
        "int",
        TRAINING,
        "How many images a class must have for its prototype to leave the client; a smaller class, "
        "or a smaller cluster of a class, is sent as absent. A site's own policy may demand more.",
        1,
        least=1,
        most=MOST_SAMPLES,
        later=True,
    )
    clients: Mapping[str, int] | int | str | None = setting(
        "table",
        CLIENTS,
        "Clients of each domain: one number for all, scan=4,inverse=1, or a named distribution: "
        "skewed (the papers' main split), equal, one, random (drawn from the seed, as in published "
        "code); the papers' tasks also have printed (Digits as in FPL's paper) and fedseproto.",
        metavar="NAME | N | DOMAIN=N,...",
    )
    samples: Mapping[str, float] | float | None = setting(
        "table",
        CLIENTS,
        "Training images per client: a count, or a fraction of the domain such as 0.2.",
        metavar="N | DOMAIN=N,...",
    )
    leave_out: str | None = setting(
        "str",
        CLIENTS,
        "A domain that no client has, used only for testing. Each other domain is then one client, "
        "unless --clients says otherwise. compare also accepts the word each: it leaves out every "
        "domain in turn and tabulates the accuracy on the unseen domains.",
        metavar="DOMAIN | each",
    )
    dirichlet: float | None = setting(
        "float",
        CLIENTS,
        "Label skew on top of the domains: each client prefers classes of its own, drawn from "
        "Dirichlet(ALPHA). 0.1 leaves each client few classes; 100 is close to no skew.",
        metavar="ALPHA",
        # beyond these bounds a draw is one-hot or uniform anyway, and the arithmetic overflows
        least=1e-6,
        most=1e6,
    )
    quantity: float | None = setting(
        "float",
        CLIENTS,
        "Quantity skew: the sizes of a domain's clients are drawn from Dirichlet(BETA). Their "
        "total does not change, and each client has at least one sample.",
        metavar="BETA",
        least=1e-6,
        most=1e6,
    )
    leftover: bool = setting(
        "bool",
        CLIENTS,
        "If a domain has too few samples, give its last client what is left instead of stopping "
        "with an error. On for pacs (the fourth Sketch client) and vlcs.",
    )
    repair: bool = setting(
        "bool",
        CLIENTS,
        "Give a client one sample of each class it lacks, in exchange for one of a class it has "
        "at least twice. On for office_caltech (off with --dirichlet).",
    )
    data: str | None = setting(
        "str",
        CLIENTS,
        "Folder of the downloaded images; default: $PROTOFED_DATA, else the cache folder.",
        metavar="DIR",
        hashed=False,
    )
    image_size: int = setting(
        "int",
        CLIENTS,
        "Height and width of the images in pixels; default: 32, and for your own folder about the "
        "size of its images, up to 224.",
        least=8,
        most=1024,
    )
    flip: bool = setting("bool", CLIENTS, "Mirror half of the training images.")
    augment: str = setting(
        "str",
        CLIENTS,
        "crop (padding 4); color: crop and color jitter; resized: a part of 25 to 100 %, enlarged; "
        "large: a part of 70 to 100 %, enlarged, stronger color jitter, grayscale. Default: crop; "
        "large for your own images of 96 pixels and more.",
        "crop",
        choices=tuple(AUGMENTS),
    )
    test_split: str | None = setting(
        "str",
        CLIENTS,
        "Which images are for testing. pacs: mod10 or kfold_leaky; vlcs: 70_30 or mod10.",
        metavar="NAME",
    )
    validate: float | str | None = setting(
        "part",
        CLIENTS,
        "Images for choosing hyper-parameters and methods, so that test images play no part in it: "
        "unused (training images that no client holds), folder (those in val/, next to train/ and "
        "test/), or a fraction such as 0.1 of each class of each client, held out of its training. "
        "The accuracy on them is recorded next to the test accuracy, and sweep and compare choose "
        "by it. Each domain needs at least 20, except one that is left out, which has none.",
        metavar="unused | folder | FRACTION",
        later=True,
    )
    patience: int | None = setting(
        "int",
        TRAINING,
        "Stop early: end the run once the validation accuracy (--validate) has not improved for "
        "this many rounds.",
        least=1,
        most=10**6,
        later=True,
    )
    pixel_range: str | None = setting(
        "str",
        CLIENTS,
        "The values that become black and white in images with more than 8 bits, such as 0:4095 "
        "for 12-bit scans. Default: the lowest and highest in the folder; if all of these images "
        "are DICOM files with a window, each is shown in its own.",
        metavar="LOW:HIGH",
        later=True,
    )
    skip_bad: bool = setting(
        "bool",
        CLIENTS,
        "Skip files that cannot be read as images instead of stopping.",
        False,
        hashed=False,
    )
    max_image_pixels: int = setting(
        "int",
        CLIENTS,
        "The most pixels in an image, and in all images being decoded at once. Each pixel takes up "
        "to 32 bytes of memory.",
        MAX_IMAGE_PIXELS,
        least=1,
        most=10**10,
        hashed=False,
    )
    max_unpacked_gb: float = setting(
        "float",
        CLIENTS,
        "The most gigabytes of memory that an archive or a compressed file may unpack to.",
        MAX_UNPACKED_GB,
        above=0,
        most=10**4,
        hashed=False,
    )
    bounds: str = setting(
        "str",
        ROBUSTNESS,
        "What happens to a client's message that is out of bounds (ten times the median of the "
        "last rounds): refuse it and name the client, clip it to the bound, or off: let it count.",
        "refuse",
        choices=("refuse", "clip", "off"),
        later=True,
    )
    robust: str = setting(
        "str",
        ROBUSTNESS,
        "How weights, prototypes and everything else that clients send are aggregated: none (as "
        "the method does), clip (shortened to the median norm), trimmed or median (of each "
        "coordinate), krum (only the messages nearest to one another).",
        "none",
        choices=("none", "clip", "trimmed", "median", "krum"),
        later=True,
    )
    robust_fraction: float = setting(
        "float",
        ROBUSTNESS,
        "The fraction of a round's clients that trimmed and krum leave out.",
        0.2,
        above=0,
        below=0.5,
        later=True,
    )
    attack: str | None = setting(
        "str",
        ROBUSTNESS,
        "For studies of robustness, some clients lie: flip (train with wrong labels), scale (send "
        "their change reversed and five times as long), noise (send noise instead of their "
        "change), prototypes (send those of other classes, five times as long).",
        choices=("flip", "scale", "noise", "prototypes"),
        later=True,
    )
    attackers: float = setting(
        "float", ROBUSTNESS, "The fraction of clients that attack.", 0.2, least=0, below=1,
        later=True,
    )  # fmt: skip
    proto_epsilon: float | None = setting(
        "float",
        PRIVACY,
        "Differential privacy of prototypes: the ε of the whole run for one image of a client. "
        "Features of the received model are clipped, and class sums and counts get Gaussian noise "
        "(docs/privacy.md).",
        above=0,
        most=10**6,
        metavar="EPSILON",
        later=True,
    )
    update_epsilon: float | None = setting(
        "float",
        PRIVACY,
        "Differential privacy of model updates: the ε of the whole run for all data of a client. "
        "Updates are clipped and get Gaussian noise; BatchNorm statistics must not travel "
        "(--norm group).",
        above=0,
        most=10**6,
        metavar="EPSILON",
        later=True,
    )
    delta: float = setting(
        "float",
        PRIVACY,
        "The δ of each privacy budget; it should be well below 1 / images of a client.",
        1e-5,
        above=0,
        below=1,
        later=True,
    )
    proto_clip: float = setting(
        "float",
        PRIVACY,
        "The longest feature that counts in full with --proto-epsilon; longer ones are scaled.",
        10.0,
        above=0,
        most=10**6,
        later=True,
    )
    update_clip: float = setting(
        "float",
        PRIVACY,
        "The longest change of the model that is sent in full with --update-epsilon.",
        1.0,
        above=0,
        most=10**6,
        later=True,
    )
    device: str = setting(
        "str", ENGINE, "Device to run on.", AUTO, choices=(AUTO, *DEVICES), hashed=False
    )
    precision: str = setting(
        "str",
        ENGINE,
        "What convolutions and matrix products compute in; auto: bf16 on a GPU that supports it, "
        "else fp32. Weights are float32, with fp64 float64.",
        AUTO,
        choices=(AUTO, *PRECISIONS),
        hashed=False,
    )
    engine: str = setting(
        "str",
        ENGINE,
        "loop (one client at a time), workers (all CPU cores), lanes (GPU), ray (the CPUs or GPUs "
        "of a cluster).",
        AUTO,
        choices=(AUTO, *ENGINES),
        hashed=False,
    )
    workers: int | None = setting(
        "int",
        ENGINE,
        "Processes of the workers engine, or actors of the ray engine; default: one for each core "
        "(or GPU).",
        least=1,
        most=10**3,
        hashed=False,
    )
    max_memory_gb: float | None = setting(
        "float",
        ENGINE,
        "Gigabytes of memory that the run may use, on the GPU or on the machine; a run that is "
        "estimated to need more does not start. Default: all that is free.",
        above=0,
        most=10**6,
        hashed=False,
    )
    checkpoint_every: int = setting(
        "int", OUTPUT, "Rounds between checkpoints.", 5, least=1, most=10**6, hashed=False
    )
    keep_rounds: tuple[int | str, ...] | None = setting(
        "rounds",
        OUTPUT,
        "Rounds whose prototypes and global model are kept for analyses and the report; default: "
        "the prototypes of the first round and of ten spread over the run, and no models.",
        metavar="1,10,last | all | none",
        hashed=False,
    )

    @property
    def hash(self) -> str:
        """Ten hexadecimal digits that stand for all settings that can change a result.

        Left out: device and precision, which are facts of a run (``Facts.run_hash``), and the
        paths of images, weights and code and how images are read, since digests of what was read
        are facts too.
        """
        parts = {
            name: without_paths(name, value)
            for name, s in SETTINGS.items()
            if s.hashed and not ((value := getattr(self, name)) == s.default and s.later)
        }
        options = {name: without_path(value) for name, value in self.method.options().items()}
        parts["task"] = short_task(self.task)
        parts["method"] = [self.method.name, fingerprint(self.method), options]
        return short_hash(parts)

    @property
    def reading(self) -> Reading:
        return Reading(self.skip_bad, self.max_image_pixels, self.max_unpacked_gb, self.pixel_range)

    @property
    def models(self) -> tuple[str, ...]:
        return model_names(self.model) if self.model else ()

    @property
    def model_in_words(self) -> str:
        """``resnet18_imagenet, weights from w.safetensors, backbone frozen``."""
        words = [" and ".join(map(short_name, self.models)), self.start_in_words]
        return ", ".join(filter(None, words))

    @property
    def start_in_words(self) -> str:
        """What training starts from, if not from random weights, and what stays as it is."""
        words = [f"weights from {Path(self.weights).name}"] if self.weights else []
        words += ["backbone frozen"] if self.train == "head" else []
        return ", ".join(words)

    @property
    def domain_clients(self) -> Mapping[str, int]:
        assert isinstance(self.clients, Mapping), "the task's domains are not known yet"
        return self.clients

    @property
    def domain_samples(self) -> Mapping[str, float]:
        """How many training images each client of a domain holds."""
        assert isinstance(self.samples, Mapping), "the task's domains are not known yet"
        return self.samples

    def for_task(self, info: TaskInfo) -> Config:
        """The complete config, now that the task's domains and images are known."""
        known = self.for_clients(info)
        return replace(known, **{name: c.value for name, c in known.choices(info).items()})

    def for_clients(self, info: TaskInfo) -> Config:
        """The config with the clients and samples of each domain."""
        given = self.samples if self.samples is not None else info.samples
        samples = _per_domain("samples", given, info)
        return replace(self, samples=samples, clients=_clients(self, info))

    def settled(self, info: TaskInfo) -> Config:
        """The config as it was asked for, with what is chosen to suit a folder's images."""
        complete = self.for_task(info)
        return replace(self, **{name: getattr(complete, name) for name in CHOSEN})

    def choices(self, info: TaskInfo) -> dict[str, choose.Choice]:
        """What was not given and is chosen to suit the images; clients and samples are known."""
        size, found = self.image_size or info.image_size, dict[str, choose.Choice]()
        assert size is not None, "the folder was not read yet"
        held = client_sizes(self, info)
        survey = info.survey
        if self.image_size is None:
            found["image_size"] = choose.Choice(size, "the size of the task's images")
            if survey is not None and choose.image_size(survey).value == size:
                found["image_size"] = choose.image_size(survey)
        if self.model is None:
            found["model"] = choose.model(size)
        if self.augment is None:
            found["augment"] = choose.augment(size)
        if self.batch is None:
            found["batch"] = choose.batch(size, held)
        if self.epochs is None:
            batch = found["batch"].value if "batch" in found else self.batch
            found["epochs"] = choose.epochs(batch, held)
        if self.pixel_range is None and survey is not None and survey.pixel_range is not None:
            found["pixel_range"] = choose.Choice(
                survey.pixel_range,
                "the lowest and highest value in images with more than 8 bits: black and white",
            )
        return found

    def toml(self) -> str:
        """The config as TOML, for ``read_config``."""
        self.method.require_plain_hypers()
        values = {name: v for name, v in vars(self).items() if v is not None}
        values["method"] = {"name": reference(self.method), **self.method.options()}
        tables = {
            name: values.pop(name)
            for name in ("method", "clients", "samples", "model")
            if isinstance(values.get(name), Mapping)
        }
        return toml_text({"format": FORMAT, **values, **tables})


SETTINGS: dict[str, Setting] = {
    f.name: f.metadata["setting"] for f in fields(Config) if "setting" in f.metadata
}
"""The settings by name, in field order: all of a config but its task and method."""


_OPTIONS = [
    name
    for name, s in SETTINGS.items()
    if s.later and s.panel == TRAINING and name not in ("weights", "train")
]


def training_options(values: Mapping[str, Any]) -> list[str]:
    """The options of training that are not at their defaults, as ``clip_norm 1``.

    Options that every protocol sets, or that ``model_in_words`` shows, are left out.
    """
    used = {
        n: values[n] for n in _OPTIONS if values.get(n, SETTINGS[n].default) != SETTINGS[n].default
    }
    return [f"{n} {v:g}" if isinstance(v, float) else f"{n} {v}" for n, v in used.items()]


CHOSEN = ("image_size", "model", "batch", "epochs", "augment", "pixel_range")
"""The settings that are chosen to suit a folder's images, and None until these are known."""


def without_path(option: Any) -> Any:
    """A hyper-parameter's value, with ``folder:`` or ``file:`` alone where it has a path."""
    kinds = [kind for kind in (FOLDER, FILE) if isinstance(option, str) and option.startswith(kind)]
    return kinds[0] if kinds else option


def short_option(option: Any) -> Any:
    """A hyper-parameter's value; of a path, the last part alone."""
    kind = without_path(option)
    return option if kind == option else f"{kind}{Path(option).name}"


def without_paths(name: str, value: Any) -> Any:
    """A setting's value, or the method's table, as in a run's hash: facts have files' digests."""
    if name == "weights" and value is not None:
        return "file"
    if name == "method" and isinstance(value, Mapping):
        return {option: without_path(v) for option, v in value.items()}
    return without_folders(value) if name == "model" and value is not None else value


def is_hashed(name: str) -> bool:
    """Whether the config's entry of this name is part of its hash."""
    return name not in SETTINGS or SETTINGS[name].hashed


# ---- protocols ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Protocol:
    """What all methods of a comparison share; it never belongs to a method.

    ``width`` and ``norm`` are None for the model's own. ``distribution`` names the clients of each
    domain (``protofed.data.distributions``); None: the task's. ``per_task`` is what the paper does
    differently on certain tasks. What is None is chosen to suit the images (``Config.choices``).
    """

    name: str
    source: str
    model: str | None
    rounds: int
    epochs: int | None
    batch: int | None
    width: int | None = None
    norm: str | None = None
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-5
    augment: str | None = "crop"
    distribution: str | None = None
    per_task: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    paper: bool = True
    """Whether it comes from a paper."""


PROTOCOLS = {
    p.name: p
    for p in (
        Protocol(
            "glyphs",
            "this package: small enough for two CPU cores",
            model="cnn3",
            width=16,
            norm="batch",
            rounds=20,
            epochs=5,
            batch=32,
            paper=False,
        ),
        Protocol(
            "fpl",
            "Huang et al., CVPR 2023, and its published code",
            model="resnet10",
            rounds=100,
            epochs=10,
            batch=64,
            distribution="skewed",
        ),
        Protocol(
            "i2pfl",
            "Le et al., arXiv 2025; momentum from the authors' other code",
            model="resnet10",
            rounds=100,
            epochs=10,
            batch=32,
            distribution="skewed",
            per_task={
                "pacs": {"model": "resnet18", "batch": 16},
                "vlcs": {"model": "resnet18", "batch": 16},
            },
        ),
        # The paper states the layers and the clients on PACS; widths, batch, epochs, rounds and
        # optimizer are in a supplement that could not be obtained, and are FPL's here.
        Protocol(
            "fedseproto",
            "Lai et al., ECAI 2024; what it does not state is FPL's",
            model="cnn3",
            rounds=100,
            epochs=10,
            batch=64,
            distribution="fedseproto",
        ),
        Protocol(
            "folder",
            "this package: chosen to suit your own images",
            model=None,
            rounds=100,
            epochs=None,
            batch=None,
            augment=None,
            paper=False,
        ),
    )
}

TASK_PROTOCOL = {
    "glyphs": "glyphs",
    "digits": "fpl",
    "office_caltech": "fpl",
    "pacs": "i2pfl",
    "vlcs": "fedseproto",
}
"""The default protocol of each task; for a user's own folders it is ``folder``."""


def protocol(name: str | None, task: str) -> Protocol:
    """The protocol of that name, adjusted to the task; None: the task's own."""
    if name is None:
        name = TASK_PROTOCOL.get(task, "folder" if task.startswith(FOLDER) else "fpl")
    if name not in PROTOCOLS:
        raise unknown("protocol", name, PROTOCOLS)
    found = PROTOCOLS[name]
    return replace(found, **found.per_task.get(task, {}))


def paper_differences(config: Config) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from those in the method's paper: (the paper's, the config's).

    Empty under a protocol that does not come from a paper.
    """
    theirs = config.method.protocol
    if not PROTOCOLS[config.protocol].paper or not theirs:
        return {}
    values = vars(protocol(theirs, config.task)) if isinstance(theirs, str) else theirs
    ours = {**vars(config), "model": " and ".join(config.models)}
    names = ["model", "batch", "epochs", "lr", "momentum", "weight_decay"]
    if isinstance(theirs, str):  # none of them uses an option that protocols do not have
        options = {name: SETTINGS[name].default for name in _OPTIONS}
        names, values = [*names, *options], {**options, **values}
    both = {name: (values[name], ours[name]) for name in names if name in values}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


# ---- making a config ----------------------------------------------------------------------------


def make_config(
    task: str | Task | TaskInfo = "glyphs",
    method: str | Method = "fedavg",
    options: Mapping[str, Any] | None = None,
    **given: Any,
) -> Config:
    """A complete config from what is given; ``None`` values count as not given."""
    if isinstance(task, Task):
        task = task.info
    info = describe(task) if isinstance(task, str) else task
    made = _method(method, options, info.name)
    # a run must find its files again from any working directory
    paths = {n: path and expand_user(path).absolute() for n, path in method_files(made).items()}
    made = with_files(made, paths)
    given = {k: v for k, v in given.items() if v is not None}
    require_known("setting", given, SETTINGS)
    given = check_settings(given)
    base = protocol(given.get("protocol"), info.name)
    if base.model is not None and given.get("image_size", info.image_size or 0) >= LARGE_IMAGE:
        base = replace(base, model=LARGE_MODEL)
    models = model_names(given.get("model", base.model) or "")
    if all(n in IMAGENET or is_file(n) for n in models):
        base = replace(base, width=None, norm=None)  # the protocol's are for its small models
    values: dict[str, Any] = {
        **{name: s.default for name, s in SETTINGS.items()},
        **{k: v for k, v in vars(base).items() if k in SETTINGS},
        **({"lr": ADAM_LR} if given.get("optimizer", "sgd") != "sgd" else {}),
        "protocol": base.name,
        "image_size": info.image_size,
        "flip": info.flip,
        "test_split": next(iter(info.test_splits), None),
        "leftover": info.leftover,
        "repair": info.repair and given.get("dirichlet") is None,  # skew leaves classes out
        **given,
    }
    values = check_settings(values)
    if values["test_split"] is not None and values["test_split"] not in info.test_splits:
        if not info.test_splits:
            raise ProtofedError(f"{info.name} has only one test split", "leave out --test-split")
        raise unknown(f"test split of {info.name}", values["test_split"], info.test_splits)
    values["keep_rounds"] = _keep_rounds(values["keep_rounds"])
    if values["patience"] is not None and values["validate"] is None:
        raise ProtofedError("patience needs a validation accuracy", "add --validate unused")
    values |= _steps(values, given)
    if values["warmup_rounds"] >= values["rounds"]:
        raise ProtofedError(
            f"warmup_rounds = {values['warmup_rounds']} leaves none of the {values['rounds']} "
            "rounds at the full learning rate",
            "use fewer --warmup-rounds or more --rounds",
        )
    if values["optimizer"] != "sgd" and made.sgd_only:
        raise ProtofedError(
            f"{made.name} does not work with optimizer = {values['optimizer']}: {made.sgd_only}",
            "use --optimizer sgd, or another method",
        )
    if len(models) > 1:
        made = made.for_mixed_models()
        if values["weights"] is not None:
            raise ProtofedError(
                f"the weights of one file cannot fit both {' and '.join(models)}",
                "give all clients one --model, or leave out --weights",
            )
    if values["leave_out"] == EACH and (info.domains is None or EACH not in info.domains):
        raise ProtofedError(
            "a run leaves out one domain, not each in turn",
            f"protofed compare --methods {made.name} --leave-out {EACH} runs them all",
        )
    asked = Config(task=info.name, method=made, **values)
    return asked if info.domains is None else asked.for_task(info)


def check_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among these, each as its own type, or an error that says what is allowed."""
    checked = {name: SETTINGS[name].check(name, v) for name, v in given.items() if name in SETTINGS}
    if checked.get("model") is not None:
        checked["model"] = checked_models(checked["model"])
    if checked.get("weights") is not None:
        checked["weights"] = str(expand_user(checked["weights"]).absolute())
    if checked.get("pixel_range") is not None:
        parse_range(checked["pixel_range"])
    return checked


def method_files(method: Method) -> dict[str, str]:
    """The paths of the files that a method's hyper-parameters name, by hyper-parameter."""
    return {n: v.removeprefix(FILE) for n, v in method.options().items() if without_path(v) == FILE}


def with_files(method: Method, files: Mapping[str, str | Path]) -> Method:
    """The method with other paths in the hyper-parameters that name files."""
    options = method.options()
    named = {name: f"{FILE}{path}" for name, path in files.items()}
    changed = {name: value for name, value in named.items() if value != options[name]}
    return method.with_options(**changed) if changed else method


def _method(method: str | Method, options: Mapping[str, Any] | None, task: str) -> Method:
    if isinstance(method, type):
        raise ProtofedError(
            f"method is the class {method.__name__}, not an instance of it",
            f"write {method.__name__}(), with hyper-parameters if you like",
        )
    if isinstance(method, str):
        return create(method, options, task)
    if options:
        raise ProtofedError("pass hyper-parameters to the method object, not as options")
    return method


def merged_config(
    file: str | Path | None,
    task: str | Task | None,
    method: str | Method | None,
    options: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
) -> Config:
    """A config from a TOML file, if any; whatever else is given overrides the file.

    A Python file is executed only if ``method`` or the setting ``model`` names it, or if code is
    trusted.
    """
    execute_models(settings)
    found = read_config(Path(file)) if file is not None else {}
    named = str(found.get("method"))
    if method is None and is_file(named) and known_class(named) is None:
        raise ProtofedError(
            f"'{file}' names code as its method: {named}",
            f"if you trust it: --trust-code, or --method {named}",
        )
    if settings.get("model") is None and "model" in found:
        for model in model_names(checked_models(found["model"])):
            if is_file(model) and known_factory(model) is None:
                raise ProtofedError(
                    f"'{file}' names code as its model: {model}",
                    f"if you trust it: --trust-code, or --model {model}",
                )
    if method is not None and method != found.get("method"):
        found.pop("options", None)  # the file's hyper-parameters belong to its own method
    given = {"task": task, "method": method, **settings}
    found |= {name: value for name, value in given.items() if value is not None}
    old, new = found.pop("options", {}), options or {}
    if old and READING in new:  # the file names every switch that a reading sets: drop them
        old = {k: v for k, v in old.items() if k not in method_class(found["method"]).switches()}
    config = make_config(**{"task": "glyphs", **found}, options={**old, **new})
    require_rounds_to_keep(config)
    return config


def require_rounds_to_keep(config: Config) -> None:
    """Raise an error if a round that is to be kept comes after the last one."""
    late = [r for r in config.keep_rounds or () if not isinstance(r, str) and r > config.rounds]
    if late:
        raise ProtofedError(
            f"keep_rounds names round {late[0]}, but the run has {config.rounds}",
            '"last" stands for the last round, whichever it is',
        )


def execute_models(settings: Mapping[str, Any]) -> None:
    """Execute the files of models that the user's settings name."""
    if (models := settings.get("model")) is not None:
        for model in filter(is_file, model_names(checked_models(models))):
            load_factory(model)


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, as arguments of ``make_config``."""
    try:
        raw = parse_toml(path.read_text("utf-8-sig"))  # some editors begin a file with a mark
    except OSError as error:
        raise ProtofedError(f"cannot read config '{path}': {error.strerror}") from None
    except ValueError as error:  # or the file is not UTF-8
        raise ProtofedError(f"config '{path}' is not valid TOML: {error}") from None
    check_format(path, raw.pop("format", None))
    require_known(f"key in '{path}':", raw, ("task", "method", *SETTINGS))
    method = raw.pop("method", "fedavg")
    if isinstance(method, Mapping):
        raw["options"] = dict(method)
        if "name" not in method:
            raise ProtofedError(f"[method] in '{path}' has no name", 'add name = "fpl"')
        method = raw["options"].pop("name")
    raw["method"] = method
    for name in ("task", "method", "protocol", "model"):
        table = name == "model" and isinstance(raw.get(name), Mapping)
        if name in raw and not (table or isinstance(raw[name], str)):
            raise ProtofedError(f"{name} in '{path}' must be a name, got {raw[name]!r:.100}")
    try:
        check_settings(raw)
    except ProtofedError as error:
        raise ProtofedError(f"'{path}': {error.message}", error.hint) from None
    return raw


READ_SETTINGS = ("skip_bad", "max_image_pixels", "max_unpacked_gb")
"""The settings that say how image files are read."""

TASK_SETTINGS = (
    "data", "image_size", "flip", "test_split", "augment", "pixel_range", *READ_SETTINGS
)  # fmt: skip
"""The settings that ``load_task`` takes."""


def task_settings(config: Config) -> dict[str, Any]:
    """What ``load_task`` needs to load the config's task."""
    return {name: getattr(config, name) for name in TASK_SETTINGS}


def short_task(name: str) -> str:
    """A task's name as part of a file's name: ``folder:pictures/pets`` is ``folder-pets``."""
    kind, colon, path = name.partition(":")
    return f"{kind}-{Path(path).resolve().name}" if colon else name


def shown_task(name: str) -> str:
    """A task's name for files that others get: ``folder:pictures/pets`` is ``folder:pets``."""
    kind, colon, path = name.partition(":")
    return f"{kind}:{Path(path).resolve().name}" if colon else name


def short_hash(parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def client_sizes(config: Config, info: TaskInfo) -> list[int]:
    """How many training images each client holds at most; empty if there are no images yet."""
    found = []
    for domain, available in info.training.items():
        asked = config.domain_samples.get(domain, 1.0)
        held = asked if isinstance(asked, int) else max(1, int(asked * available))
        found += [min(held, available)] * config.domain_clients.get(domain, 0)
    return found


def _clients(config: Config, info: TaskInfo) -> dict[str, int]:
    """Clients of each domain: given as numbers or by name, else the protocol's, else the task's.

    With a domain left out and nothing given, each other domain is one client.
    """
    assert info.domains is not None and info.clients is not None
    left_out, clients = config.leave_out, config.clients
    if left_out is not None and left_out not in info.domains:
        raise unknown(f"domain of {info.name}", left_out, info.domains)
    if clients is None:
        base = protocol(config.protocol, config.task)
        named = "one" if left_out is not None else base.distribution
        # a paper's protocol may name a distribution that only the paper's own tasks have
        clients = named if named in distributions(info) else info.clients
    counted = isinstance(clients, Mapping)
    if isinstance(clients, str):
        clients = distribution(info, clients, config.seed)
    each: dict[str, int] = _per_domain("clients", clients, info)
    if left_out is not None:
        if counted and each.get(left_out):
            raise ProtofedError(
                f"domain '{left_out}' is left out, but has clients: {each[left_out]}",
                f"give it none ({left_out}=0), or name a distribution: --clients one",
            )
        each[left_out] = 0
        if not any(each.values()):
            raise ProtofedError(
                f"without '{left_out}' no domain has a client", "leave out another domain, or none"
            )
    return {d: each[d] for d in info.domains if d in each}


def _steps(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The steps of the learning rate; with another schedule they mean nothing and are dropped."""
    if values["schedule"] == "step":
        return {"step_every": values["step_every"] or math.ceil(values["rounds"] / 3)}
    defaults = {name: SETTINGS[name].default for name in ("step_every", "step_factor")}
    for name, default in defaults.items():
        if given.get(name, default) != default and "schedule" not in given:
            raise ProtofedError(
                f"{name} = {given[name]} has no effect without a schedule", "add --schedule step"
            )
    return defaults


def _keep_rounds(value: Any) -> tuple[int | str, ...] | None:
    """Rounds to keep prototypes and models of: ``[1, 10, "last"]``, "all" or "none"."""
    if value is None or value == "none":
        return () if value else None
    named = [value] if isinstance(value, (int, str)) else value
    if not isinstance(named, (list, tuple)) or not all(
        r in ("last", "all") if isinstance(r, str) else is_whole(r) and r >= 1 for r in named
    ):
        raise ProtofedError(
            f'keep_rounds must be round numbers from 1, "last", "all" or "none", got {value!r:.100}'
        )
    return tuple(named)


def _per_domain(name: str, value: Any, info: TaskInfo) -> dict[str, Any]:
    """A number for each domain, in the task's order; a single number applies to all."""
    assert info.domains is not None
    each = dict(value) if isinstance(value, Mapping) else dict.fromkeys(info.domains, value)
    for domain, number in each.items():
        if domain not in info.domains:
            raise unknown(f"domain of {info.name}", domain, info.domains)
        least, most = (0, MOST_CLIENTS) if name == "clients" else (1, MOST_SAMPLES)
        whole = is_whole(number) and least <= number <= most
        fraction = name == "samples" and isinstance(number, float) and 0 < number <= 1
        if not (whole or fraction):
            words = f"a whole number up to {most}"
            if name == "samples":
                words = "a count or a fraction like 0.2"
            raise ProtofedError(f"{name} of {domain} must be {words}, got {number!r:.100}")
    return {d: each[d] for d in info.domains if d in each}


def require_known(what: str, names: Iterable[str], valid: Collection[str]) -> None:
    """Raise an error for the first name that is not valid."""
    for name in names:
        if name not in valid:
            raise unknown(what, name, valid)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))
