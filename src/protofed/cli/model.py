"""``protofed predict``, ``evaluate`` and ``export``: a trained model in use."""

from __future__ import annotations

import csv
import io
import math
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from protofed.cli.options import TrustOption, with_settings
from protofed.cli.output import say, wide_console
from protofed.errors import ProtofedError, printable, unknown
from protofed.files import write_atomic

if TYPE_CHECKING:
    from protofed.data import Images, Task
    from protofed.inference import TrainedModel
    from protofed.inference.metrics import Metrics

ModelArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder, or a model.safetensors file.")
]
ClientOption = Annotated[
    str | None,
    typer.Option(
        "--client", help="The client to load, for methods whose clients have models of their own."
    ),
]
errors = Console(stderr=True, emoji=False)
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda or auto.")]
T = TypeVar("T")
READING = ("skip_bad", "max_image_pixels")
"""The settings of commands that read images from elsewhere."""


@with_settings(only=READING)
def predict(
    *,
    model: ModelArgument,
    images: Annotated[
        list[Path], typer.Argument(help="Image files, or folders to search for images.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The CSV file; default: print it.")
    ] = None,
    client: ClientOption = None,
    device: DeviceOption = "auto",
    trust_code: TrustOption = False,
    settings: dict[str, Any],
) -> None:
    """Predict the classes of images: [bold]protofed predict runs/my-run photos/ -o out.csv[/bold].

    In a folder, hidden files and side files (.txt, .csv, ...) are ignored; all
    other files must be images.

    Columns: file, class, probability, runner_up and its probability. If the run
    has prototypes (a client's mean feature of a class), also the nearest one:
    its class, its domain and its cosine distance. far = yes if every prototype
    is farther from the image than prototypes of different classes typically are
    from each other: the image resembles no class that was trained on.
    """
    from protofed.inference import load_model

    trained = load_model(model, client, device)
    trained.max_image_pixels = settings.get("max_image_pixels", trained.max_image_pixels)
    skip_bad = settings.get("skip_bad", False)
    files = _image_files(images)
    rows: list[dict[str, Any]] = []
    bad: list[str] = []
    chunks = [files[i : i + trained.batch] for i in range(0, len(files), trained.batch)]
    for chunk in _tracked(chunks, "predicting"):
        rows += _predictions(trained, chunk, bad if skip_bad else None)
    for line in bad:
        said = printable(f"skipped: {line}")
        errors.print(said, markup=False, highlight=False, soft_wrap=True)
    if not rows:
        raise ProtofedError("none of the files could be decoded")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    if out is None:
        typer.echo(text.getvalue(), nl=False)
        return
    write_atomic(out, text.getvalue())
    far = sum(row.get("far") == "yes" for row in rows)
    note = ""
    if "far" in rows[0]:
        beyond = f"cosine distance above {float(rows[0]['far_beyond']):.3f}"
        note = f", {far} of them far from all prototypes ({beyond})"
    say(f"{len(rows)} image{'s' * (len(rows) > 1)}{note}: {out}")


def _tracked(items: Iterable[T], doing: str) -> Iterable[T]:
    """The items with a progress bar on a terminal; elsewhere it would leave an empty line."""
    return track(items, doing, console=errors, transient=True, disable=not errors.is_terminal)


def _predictions(
    trained: TrainedModel, files: list[Path], bad: list[str] | None
) -> list[dict[str, Any]]:
    import numpy as np
    import torch

    decoded = []
    for file in files:
        try:
            decoded.append((file, trained.pixels(file)))
        except ProtofedError as error:
            if bad is None:
                raise type(error)(error.message, "--skip-bad leaves such files out") from None
            bad.append(error.message)
    if not decoded:
        return []
    x = torch.from_numpy(np.stack([image for _, image in decoded]))
    probabilities = trained.predict_proba(x)
    near = trained.nearest(trained.embed(x)) if trained.kept else None
    rows = []
    for i, (file, _) in enumerate(decoded):
        first, *second = np.argsort(-probabilities[i], kind="stable")[:2]
        row: dict[str, Any] = {
            "file": str(file),
            "class": trained.classes[first],
            "probability": f"{probabilities[i, first]:.4f}",
            # none if there is one class
            "runner_up": "".join(trained.classes[k] for k in second),
            "runner_up_probability": "".join(f"{probabilities[i, k]:.4f}" for k in second),
        }
        if near is not None:
            row |= {
                "nearest_prototype": near.classes[i],
                "prototype_domain": near.domains[i],
                "prototype_distance": f"{near.distances[i]:.4f}",
                "far": "yes" if near.far[i] else "no",
                "far_beyond": f"{near.threshold:.4f}",
            }
        rows.append(row)
    return rows


def _image_files(paths: list[Path]) -> list[Path]:
    from protofed.data.listing import walk
    from protofed.data.sources.image_tree import is_side_file

    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = (e.path for e in walk(path) if not (e.is_folder or e.problem))
            found += [file for file in inside if not is_side_file(file.name)]
        elif path.is_file():
            found.append(path)
        else:
            raise ProtofedError(f"there is no file or folder '{path}'")
    if not found:
        where = ", ".join(f"'{path}'" for path in paths)
        raise ProtofedError(f"there are no images in {where}")
    return found


@with_settings(only=(*READING, "max_unpacked_gb"))
def evaluate(
    *,
    model: ModelArgument,
    task: Annotated[
        str | None,
        typer.Option("--task", help="A task, or folder:PATH; default: the task of the run."),
    ] = None,
    all_images: Annotated[
        bool,
        typer.Option(
            "--all-images",
            help="Also evaluate on the images of --task that are not for testing: nobody must "
            "have trained on any of them.",
        ),
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Folder of the downloaded images; default: the run's."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Folder for evaluation.json and figures."),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="First fit the temperature of the probabilities on images that no client trained "
            "on and that are not for testing, and write it into the run's model, for predict and "
            "export.",
        ),
    ] = False,
    client: ClientOption = None,
    device: DeviceOption = "auto",
    trust_code: TrustOption = False,
    settings: dict[str, Any],
) -> None:
    """Evaluate a trained model on the test images of a task, per domain and class.

    Prints accuracy, balanced accuracy, precision, recall, F1, AUC (means over
    classes) and the expected calibration error. With --out, also writes each
    class's numbers and the confusion matrices.
    """
    from protofed.data import load_task
    from protofed.data.info import FOLDER
    from protofed.federation.simulation import tested_images
    from protofed.inference import load_model
    from protofed.inference.calibration import calibrate as fit
    from protofed.inference.metrics import measure
    from protofed.runs import load_run

    if calibrate:
        fitted = fit(model, client, device, data)
        say(
            f"temperature {fitted.temperature:.3g}, fitted on {fitted.images} images that no "
            f"client trained on: cross-entropy on them {_change(fitted.cross_entropy, 3)}, "
            f"calibration error {_change(fitted.error, 1)} %"
        )
    trained = load_model(model, client, device)
    own = load_run(model, model=False).config.task if model.is_dir() else trained.card.task
    if task is None and own.startswith(FOLDER) and not model.is_dir():
        raise ProtofedError(
            f"'{model}' does not say where the images of {own} are",
            "name the run's folder, or the images: --task folder:PATH",
        )
    name = task or own
    given, unseen = _settings_of_run(model, name) if name == own else ({}, None)
    if all_images and name == own:
        raise ProtofedError(
            f"the model was trained on images of {name}", "--all-images is for another --task"
        )
    given |= settings
    given |= {"image_size": trained.image_size, "pixel_range": trained.card.pixel_range}
    if name == "glyphs":
        given["image_size"] = None  # it has one size
    if data is not None:
        given["data"] = data
    loaded = load_task(name, **given)
    order = _class_order(trained, loaded)
    if name != own:
        say(f"{name}: {loaded.note}{' Evaluated on all images.' * all_images}")
    if loaded.pixel_range and not trained.card.pixel_range:
        raise ProtofedError(
            f"images of {name} have more than 8 bits; the model was trained on images of 8 bits",
            "convert them as the images of the run were",
        )
    found: dict[str, Metrics] = {}
    for domain in _tracked(loaded.domains, "evaluating"):
        images = tested_images(loaded, domain, unseen)
        if all_images:
            images = _every_image(loaded, domain)
        found[domain] = measure(trained.predict_proba(images.x), order[images.y.numpy()])
    _print_metrics(found, unseen)
    if out is not None:
        _write_evaluation(trained, name, found, out)


def _every_image(task: Task, name: str) -> Images:
    import torch

    from protofed.data import Images

    domain = task.domains[name]
    parts = [part for part in (domain.train, domain.test, domain.validation) if part is not None]
    return Images(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))


def _change(values: tuple[float, float], digits: int) -> str:
    return " → ".join(f"{value:.{digits}f}" for value in values)


def _settings_of_run(model: Path, task: str) -> tuple[dict[str, Any], str | None]:
    """How a run read its task, and the domain that it left out.

    Another test split would test on its training images.
    """
    from protofed.config import task_settings
    from protofed.data import describe
    from protofed.runs import load_run

    if model.is_dir():
        config = load_run(model, model=False).config
        return task_settings(config), config.leave_out
    if len(splits := describe(task).test_splits) > 1:
        warnings.warn(
            f"'{model}' does not say which images of {task} are for testing; with those of "
            f"{splits[0]}, the model may have been trained on some. Name the run's folder to test "
            "on its own",
            stacklevel=2,
        )
    return {}, None


def _class_order(trained: TrainedModel, task: Task) -> Any:
    """The model's index of each class of the task."""
    import numpy as np

    for name in task.classes:
        if name not in trained.classes:
            raise unknown(f"class of the model (in task {task.name}):", name, trained.classes)
    return np.array([trained.classes.index(name) for name in task.classes])


def _print_metrics(found: dict[str, Metrics], unseen: str | None) -> None:
    """A domain that the run left out comes first, and is no part of the average."""
    from statistics import fmean

    rows = {domain: {"images": m.images, **m.macro()} for domain, m in found.items()}
    first = {f"{unseen} (unseen)": rows.pop(unseen)} if unseen in rows else {}
    if len(rows) > 1:
        names = list(next(iter(rows.values())))[1:]
        mean: dict[str, float] = {n: fmean(row[n] for row in rows.values()) for n in names}
        images = sum(int(row["images"]) for row in rows.values())
        label = "average of the others" if first else "average"
        rows[label] = {"images": images, **mean}
    rows = first | rows
    table = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    table.add_column("domain")  # a terminal that is too narrow breaks names, not numbers
    for name in next(iter(rows.values())):
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for domain, row in rows.items():
        cells = [f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()]
        table.add_row(escape(domain), *cells)
    wide_console().print(table)


def _write_evaluation(
    trained: TrainedModel, task: str, found: dict[str, Metrics], out: Path
) -> None:
    from protofed.files import write_json
    from protofed.report.figures import confusions
    from protofed.report.plot import save

    def plain(value: float) -> float | None:
        return None if math.isnan(value) else round(value, 4)

    domains = {
        domain: {
            "images": m.images,
            **{name: plain(value) for name, value in m.macro().items()},
            "classes": {
                name: {
                    "images": int(m.support[k]),
                    "precision": plain(m.precision[k]),
                    "recall": plain(m.recall[k]),
                    "F1": plain(m.f1[k]),
                    "AUC": plain(m.auc[k]),
                }
                for k, name in enumerate(trained.classes)
            },
            "confusion": m.confusion.tolist(),
        }
        for domain, m in found.items()
    }
    about = {"run": trained.card.hash, "client": trained.client, "task": task}
    numbers = {"temperature": trained.temperature, "domains": domains}
    write_json(out / "evaluation.json", {**about, **numbers})
    counts = {domain: m.confusion for domain, m in found.items()}
    paths = save(confusions(trained.method.name, counts, trained.classes), out)
    say(f"written: {', '.join(str(p) for p in (out / 'evaluation.json', *paths))}")


def export(
    model: ModelArgument,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="The folder for the files.")
    ] = Path("exported"),
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Write model.onnx; needs the onnx extra.")
    ] = False,
    pt2: Annotated[
        bool, typer.Option("--pt2", help="Write model.pt2, made by torch.export.")
    ] = False,
    safetensors: Annotated[
        bool,
        typer.Option("--safetensors", help="Write model.safetensors, for protofed.load_model."),
    ] = False,
    client: ClientOption = None,
    trust_code: TrustOption = False,
) -> None:
    """Export a trained model for other programs, with a card that says what it is.

    The graphs take 8-bit images \\[n, 3, size, size] and return probabilities:
    normalization is included, resizing is not. Each graph is run and compared
    with the model before the command succeeds.
    """
    from protofed.inference import load_model
    from protofed.inference.export import export_onnx, export_pt2, write_card
    from protofed.runs.folder import MODEL
    from protofed.runs.model_file import read_model

    if not (onnx or pt2 or safetensors):
        raise ProtofedError("say what to export", "--onnx, --pt2 or --safetensors, or several")
    trained = load_model(model, client)
    out.mkdir(parents=True, exist_ok=True)
    files = []
    if onnx:
        export_onnx(trained, out / "model.onnx")
        files.append("model.onnx")
    if pt2:
        export_pt2(trained, out / "model.pt2")
        files.append("model.pt2")
    if safetensors:
        stored = read_model(model if model.is_file() else model / MODEL)
        if trained.client is not None:  # no other client's
            stored = stored.of_client(trained.client)
        stored.save(out / MODEL)
        files.append(MODEL)
    write_card(trained, out / "MODEL_CARD.md", files)
    say(f"exported to {out}: {', '.join([*files, 'MODEL_CARD.md'])}")
