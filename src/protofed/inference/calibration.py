"""Temperature scaling of a run's model, on images that its clients did not train on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from protofed.data import Images
from protofed.data.split import UNUSED, VAL_FOLDERS, validation_source
from protofed.errors import ProtofedError
from protofed.federation.simulation import make_shares, rows_to_validate
from protofed.inference.metrics import cross_entropy, fit_temperature, measure
from protofed.inference.model import TrainedModel, softmax
from protofed.runs.folder import RunFolder
from protofed.runs.result import Result, load_run


@dataclass(frozen=True)
class Calibration:
    """The temperature, how many images it was fitted on, and what it changes there.

    The fit minimizes the cross-entropy. The calibration error, in %, mostly falls with it.
    """

    temperature: float
    images: int
    error: tuple[float, float]
    """Before and after."""
    cross_entropy: tuple[float, float]


def calibrate(
    folder: str | Path, client: str | None = None, device: str = "cpu", data: Path | None = None
) -> Calibration:
    """Fit the temperature of a run's model, and write it into the model's file.

    It is fitted on the run's validation images, or else on images in val/ or that no client holds;
    test images have no part in it. A client's own model takes those of its domain.
    """
    path = Path(folder)
    if path.is_file():
        raise ProtofedError(
            f"'{path}' does not say which images the clients hold", "name the run's folder"
        )
    result = load_run(path)
    if data is not None:
        result.config = replace(result.config, data=str(data))
    stored = result.need_model()
    model = TrainedModel(stored, client, device)
    held_out = held_out_images(result)
    if model.client is not None:
        domain = stored.card.domains[model.client]
        held_out = {name: images for name, images in held_out.items() if name == domain}
    x = torch.cat([images.x for images in held_out.values()])
    labels = torch.cat([images.y for images in held_out.values()]).numpy()
    logits = model.logits(x)
    if bool((logits.argmax(1) == labels).all()):
        raise ProtofedError(
            f"the model is right on all {len(labels)} images to calibrate on: the lower the "
            "temperature, the likelier they are, so none fits",
            "evaluate without --calibrate, or train with more images held out: --validate 0.2",
        )
    temperature = float(f"{fit_temperature(logits, labels):.6g}")
    scaled = [logits, logits / temperature]
    before, after = (measure(softmax(each), labels).calibration_error for each in scaled)
    losses = cross_entropy(scaled[0], labels), cross_entropy(scaled[1], labels)
    fitted = {**stored.card.temperature, model.client or "": temperature}
    card = replace(stored.card, temperature=fitted)
    RunFolder(path).save_model(replace(stored, card=card))
    return Calibration(temperature, len(labels), (before, after), losses)


def held_out_images(result: Result) -> dict[str, Images]:
    """By domain, images that were neither trained on nor are for testing."""
    task = result.task()
    config = result.found_config.for_task(task.info)
    for part in [config.validate] if config.validate is not None else [VAL_FOLDERS, UNUSED]:
        asked = replace(config, validate=part)
        try:
            rows = rows_to_validate(asked, task, make_shares(asked, task))
        except ProtofedError:
            if config.validate is not None:
                raise
            continue
        images = {name: validation_source(task, name, part) for name in rows}
        return {name: Images(images[name].x[r], images[name].y[r]) for name, r in rows.items()}
    raise ProtofedError(
        "the run has no images to calibrate on: it held none out, and its clients trained on all "
        "images or on nearly all of them",
        "train with --validate 0.1, which holds some out",
    )
