"""A trained model as a file for other programs, with a card that says what it is.

The graph takes 8-bit images [n, 3, size, size] and gives the probability of each class:
normalization is included, resizing is not.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor, nn

from protofed.errors import ProtofedError
from protofed.files import write_atomic
from protofed.inference.model import TrainedModel
from protofed.version import __version__

TOLERANCE = 1e-4
"""How far the probabilities of an export may be from the model's."""


class Graph(nn.Module):
    """From images to probabilities."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: TrainedModel) -> None:
        super().__init__()
        self.network, self.scores = model.network, model.scores
        self.temperature = model.temperature
        for name in ("mean", "std"):
            value = torch.tensor(getattr(model.card, name), dtype=model.dtype)
            self.register_buffer(name, value[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        inputs = (images.to(self.mean.dtype) / 255 - self.mean) / self.std
        return (self.scores(inputs) / self.temperature).softmax(1)


def export_pt2(model: TrainedModel, path: Path) -> None:
    """A program of ``torch.export``; ``torch.export.load(path).module()`` runs it."""
    program = _program(model)
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()
    _compare(model, "torch.export", lambda x: loaded(torch.from_numpy(x)).detach().numpy())


def export_onnx(model: TrainedModel, path: Path) -> None:
    """An ONNX file, compared with the model by onnxruntime."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 (torch.onnx needs it)
    except ImportError as error:
        raise ProtofedError(
            f"export to ONNX needs {error.name}", "pip install 'protofed[onnx]'"
        ) from None
    with _quiet():
        program = torch.onnx.export(
            _program(model), dynamo=True, input_names=["images"], output_names=["probabilities"],
            verbose=False,
        )  # fmt: skip
    assert program is not None
    program.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    _compare(model, "onnxruntime", lambda x: session.run(None, {"images": x})[0])


def _program(model: TrainedModel) -> torch.export.ExportedProgram:
    size = model.image_size
    example = torch.zeros(2, 3, size, size, dtype=torch.uint8)
    batch = torch.export.Dim("batch", min=1)
    try:
        with torch.no_grad(), _quiet():
            program = torch.export.export(Graph(model), (example,), dynamic_shapes=({0: batch},))
    except Exception as error:
        raise ProtofedError(
            f"the predictions of {model.method.name} cannot be exported as a graph: "
            f"{str(error).splitlines()[0]}",
            "its model.safetensors can be used with protofed.load_model",
        ) from error
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # it names the folders of this machine
    return program


def _compare(model: TrainedModel, name: str, run: Callable[[Any], Any]) -> None:
    """Run an export on random images, one and several; an error if it computes something else."""
    rng = np.random.default_rng(0)
    for count in (1, 5):
        shape = (count, 3, model.image_size, model.image_size)
        x = rng.integers(0, 256, shape, dtype=np.uint8)
        expected = model.predict_proba(torch.from_numpy(x))
        worst = float(np.abs(run(x) - expected).max())
        if not worst <= TOLERANCE:
            raise ProtofedError(f"the export differs: {name} is off by {worst:.2g}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of torch's exporters, which are about themselves."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)


# ---- the card ------------------------------------------------------------------------------------


def write_card(model: TrainedModel, path: Path, files: list[str]) -> None:
    """Write the model card: what it was trained on, how good it is where, how to call it."""
    environment = Environment(
        loader=PackageLoader("protofed.inference"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda text: text.replace("|", "\\|")  # of a table
    card = model.card
    domains: dict[str, list[str]] = {}
    for client, domain in card.domains.items():
        domains.setdefault(domain, []).append(client)
    text = environment.get_template("model_card.md.j2").render(
        card=card,
        client=model.client,
        temperature=model.temperature,
        method=model.method,
        domains=domains,
        files=files,
        parameters=sum(p.numel() for p in model.network.parameters()),
        version=__version__,
    )
    write_atomic(path, text)
