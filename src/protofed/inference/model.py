"""Use a trained model: ``load_model`` reads a model's file, which holds all that is needed.

    >>> model = protofed.load_model("runs/glyphs-fpl-0-8d543c2646")
    >>> model.predict(["a.png", "b.png"])
    ['seven', 'two']

Images are paths, PIL images, arrays [H, W] or [H, W, 3], or tensors [3, H, W], one or several.
They are resized and normalized as in training. Pixels are 8-bit integers, floats from 0 to 1, or
what the training images had: with more than 8 bits, they are scaled by the range of values that the
model's file names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from protofed import keys, tree
from protofed.analysis import RoundPrototypes, prototypes
from protofed.config import AUTO, DEVICES
from protofed.data.augment import normalized
from protofed.data.decode import BadImage, Budget, decode, no_other_limit
from protofed.data.task import MAX_IMAGE_PIXELS, Augment
from protofed.errors import ProtofedError, unknown
from protofed.federation.batches import evaluation_batch
from protofed.federation.cpu import one_thread
from protofed.federation.facts import DTYPES, find_device
from protofed.files import expand_user
from protofed.method import Client, Sizes
from protofed.runs.folder import RunFolder
from protofed.runs.model_file import StoredModel, read_model
from protofed.runs.result import load_run

Picture = str | Path | Image.Image | NDArray[Any] | Tensor
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Nearest:
    """For each image, the client prototype nearest to its feature, by cosine distance.

    An image is ``far`` if every prototype is farther from it than ``threshold``: the median
    distance from a prototype to the nearest one of another class. Such an image resembles no class
    as much as the classes resemble each other.
    """

    classes: tuple[str, ...]
    domains: tuple[str, ...]
    distances: Floats
    threshold: float

    @property
    def far(self) -> NDArray[np.bool_]:
        return self.distances > self.threshold


class TrainedModel:
    """A trained network with its preprocessing and its method's rule; ``load_model`` makes one.

    ``card`` describes the model; ``kept`` has the prototypes of the run's last round, if any.
    ``max_image_pixels`` may be raised to read larger images.
    """

    max_image_pixels = MAX_IMAGE_PIXELS

    def __init__(
        self,
        stored: StoredModel,
        client: str | None = None,
        device: str = "cpu",
        kept: RoundPrototypes | None = None,
    ) -> None:
        card = self.card = stored.card
        self.classes, self.image_size = card.classes, card.image_size
        self.batch = evaluation_batch(card.image_size)  # as in the run, draws included
        self.method, self.device = stored.method, _device(device)
        if client is None and self.method.evaluates != "global" and len(stored.clients) == 1:
            (client,) = stored.clients  # a site's own file has one
        self.client, self.kept = client, kept
        self.temperature = card.temperature.get(client or "", 1.0)
        self.network = stored.network(client).to(self.device)
        if client is not None:
            card = self.card = stored.of_client(client).card
        sizes = Sizes.of(self.network, len(card.classes), card.image_size)
        own = {"model": stored.clients[client]} if client else {}
        received = {**stored.received, "model": stored.model}
        self._view = Client(
            self.method,
            self.network,
            sizes,
            received=tree.to(received, self.device),
            mine=tree.to(own, self.device),
            round=card.rounds - 1,
            rounds=card.rounds,
            name=client or "server",
            domain=card.domains.get(client or "", ""),
            mean=card.mean,
            std=card.std,
        )
        self.dtype = DTYPES[card.precision]
        self._augment = Augment(mean=card.mean, std=card.std)  # type: ignore[arg-type]
        key = keys.key(card.seed, card.rounds - 1, "evaluation")
        self._key = torch.tensor(key, device=self.device)

    def __repr__(self) -> str:
        card = self.card
        whose = f" at {self.client}" if self.client else ""
        return (
            f"<{self.method.name} on {card.task}{whose}: {len(card.classes)} classes, images of "
            f"{card.image_size}×{card.image_size}, {card.accuracy['average']:.1f} %>"
        )

    def predict(self, images: Picture | Sequence[Picture]) -> list[str]:
        """The class of each image."""
        return [self.classes[i] for i in self.logits(images).argmax(1)]

    def predict_proba(self, images: Picture | Sequence[Picture]) -> Floats:
        """The probability [n, K] of each class; calibrated if a temperature was fitted."""
        return softmax(self.logits(images) / self.temperature)

    def logits(self, images: Picture | Sequence[Picture]) -> Floats:
        """Scores [n, K] by the method's own rule, before the temperature and the softmax."""
        return self._compute(images, self.scores, len(self.classes))

    def embed(self, images: Picture | Sequence[Picture]) -> Floats:
        """The feature [n, d] of each image."""
        return self._compute(images, self._features, self.network.features)

    def scores(self, inputs: Tensor) -> Tensor:
        """Scores [n, K] of normalized images."""
        self._view.begin_step(self._key)  # draw what the run's own evaluation drew
        return self.method.predict(self._view, inputs)

    def _features(self, inputs: Tensor) -> Tensor:
        self._view.begin_step(self._key)
        return self._view.forward(inputs).feature

    def _compute(
        self,
        images: Picture | Sequence[Picture],
        function: Callable[[Tensor], Tensor],
        columns: int,
    ) -> Floats:
        remaining, outputs = _each_image(images), [np.zeros((0, columns))]
        with torch.no_grad(), one_thread():
            while batch := list(islice(remaining, self.batch)):
                x = torch.from_numpy(np.stack([self.pixels(image) for image in batch]))
                output = function(normalized(x.to(self.device), self._augment, self.dtype))
                outputs.append(output.double().cpu().numpy())
        return np.concatenate(outputs)

    def pixels(self, image: Picture) -> NDArray[np.uint8]:
        """An image as the model sees it before normalization: uint8 [3, size, size]."""
        try:
            if isinstance(image, str | Path):
                content: Any = expand_user(image).read_bytes()
            elif isinstance(image, Tensor):
                plain = image.detach().cpu()
                content = _array((plain.movedim(0, -1) if plain.ndim == 3 else plain).numpy())
            else:
                content = image if isinstance(image, Image.Image) else _array(np.asarray(image))
            with no_other_limit():
                budget = Budget(self.max_image_pixels)
                return decode(content, self.image_size, budget, self.card.pixel_range)
        except (BadImage, OSError) as error:
            name = f"'{image}'" if isinstance(image, str | Path) else "an image"
            why = error.strerror if isinstance(error, OSError) else error
            raise ProtofedError(f"cannot decode {name}: {why}") from None

    def nearest(self, features: Floats) -> Nearest | None:
        """The clients' prototypes nearest to features [n, d].

        None without prototypes: the method sends none, or only the model's file was read.
        """
        if self.kept is None or not self.kept.sent:
            return None
        rows, labels = (
            np.concatenate(column) for column in zip(*self.kept.sent.values(), strict=True)
        )
        clients = [c for c, (sent, _) in self.kept.sent.items() for _ in range(len(sent))]
        distances = cosine_distances(features, rows)
        best = distances.argmin(1)
        between = cosine_distances(rows, rows)
        between[labels[:, None] == labels] = np.inf
        to_other_class = between.min(1)
        return Nearest(
            tuple(self.classes[labels[i]] for i in best),
            tuple(self.kept.domains[clients[i]] for i in best),
            distances.min(1),
            float(np.median(to_other_class)) if np.isfinite(to_other_class).any() else np.inf,
        )


def load_model(path: str | Path, client: str | None = None, device: str = "cpu") -> TrainedModel:
    """The trained model of a run's folder, or of a model's file.

    ``client`` names whose model to load, for methods whose clients keep their own. The run's
    images are not needed.
    """
    path = Path(path)
    if path.is_file():
        return TrainedModel(read_model(path), client, device)
    result = load_run(path)
    rounds = RunFolder(path).artifact_rounds("prototypes")
    kept = prototypes(result) if rounds and rounds[-1] == len(result.rounds) else None
    return TrainedModel(result.need_model(), client, device, kept)


def _device(name: str) -> torch.device:
    try:
        found = torch.device(find_device(name))
    except RuntimeError:  # torch lists the devices of all its builds
        raise unknown("device", name, (AUTO, *DEVICES)) from None
    find_device(found.type)  # cuda:0 where there is none
    return found


def _array(image: NDArray[Any]) -> NDArray[Any]:
    """Pixels [H, W] or [H, W, 3] of 8 bits, made from floats in [0, 1]; or [H, W] of more bits."""
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[:, :, 0]
    if not (image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3)):
        raise ProtofedError(
            f"an image of shape {tuple(image.shape)} is neither [H, W] nor [H, W, 3]",
            "tensors are [3, H, W] or [1, H, W]",
        )
    if not image.size:
        raise ProtofedError("an image is empty")
    if np.issubdtype(image.dtype, np.floating):
        if not (image.min() >= 0 and image.max() <= 1):  # also true for NaN
            raise ProtofedError(
                f"float pixels must be from 0 to 1, got {image.min():g} to {image.max():g}",
                "pass images before normalization: the model normalizes them itself",
            )
        return np.asarray(np.rint(image * 255), np.uint8)
    if image.dtype in (np.uint16, np.int16, np.int32) and image.ndim == 2:
        return image.astype(np.int32)
    if image.dtype != np.uint8:
        raise ProtofedError(
            f"an image of shape {tuple(image.shape)} has pixels of type {image.dtype}",
            "use uint8, floats from 0 to 1, or 16 bits of gray",
        )
    return image


def _each_image(images: Picture | Sequence[Picture]) -> Iterator[Picture]:
    if isinstance(images, str | Path | Image.Image):
        return iter([images])
    if isinstance(images, np.ndarray | Tensor):
        channels = images.shape[0 if isinstance(images, Tensor) else -1]
        # [H, W, 4] is an image with transparency, not many that are four pixels wide
        colors = (1, 3) if isinstance(images, Tensor) else (1, 2, 3, 4)
        one = images.ndim == 2 or (images.ndim == 3 and channels in colors)
        return iter([images] if one else images)
    return iter(images)


def softmax(logits: Floats) -> Floats:
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(shifted / shifted.sum(1, keepdims=True))


def cosine_distances(a: Floats, b: Floats) -> Floats:
    """1 − cosine [n, m] between rows of a [n, d] and b [m, d]."""
    a, b = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (a, b))
    return np.asarray(1 - a @ b.T, dtype=np.float64)
