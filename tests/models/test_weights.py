"""Weights of torchvision's names put into our ResNets give the function they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.errors import ProtofedError
from protofed.models import Network, build
from protofed.models.resnet import IMAGENET
from protofed.models.weights import load_weights, public_name


def public_state(model: str, width: int = 4) -> dict[str, Tensor]:
    """Random weights under public names, BatchNorm's statistics included."""
    torch.manual_seed(1)
    blocks = IMAGENET[model].blocks
    state = build(model, 3, 96, width=width).encoder.state_dict()
    found = {}
    for name, tensor in state.items():
        value = torch.rand_like(tensor) + 0.5 if tensor.is_floating_point() else tensor
        found[public_name(name, blocks)] = value * (0.1 if tensor.ndim == 4 else 1.0)
    return found


def by_hand(w: dict[str, Tensor], blocks: tuple[int, ...], x: Tensor) -> Tensor:
    """A ResNet from its public names, in evaluation mode: He et al. 2016, stride in the 3×3."""

    def normed(x: Tensor, name: str) -> Tensor:
        names = [f"{name}.{n}" for n in ("running_mean", "running_var", "weight", "bias")]
        mean, var, weight, bias = (w[n][:, None, None] for n in names)
        return (x - mean) / torch.sqrt(var + 1e-5) * weight + bias

    x = F.relu(normed(F.conv2d(x, w["conv1.weight"], stride=2, padding=3), "bn1"))
    x = F.max_pool2d(x, 3, 2, 1)
    for stage, count in enumerate(blocks, start=1):
        for block in range(count):
            at, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            deep = f"{at}.conv3.weight" in w
            y, last = x, 3 if deep else 2
            for i in range(1, last + 1):
                weight = w[f"{at}.conv{i}.weight"]
                moved = stride if i == (2 if deep else 1) else 1
                y = F.conv2d(y, weight, stride=moved, padding=weight.shape[-1] // 2)
                y = normed(y, f"{at}.bn{i}")
                y = F.relu(y) if i < last else y
            if f"{at}.downsample.0.weight" in w:
                x = F.conv2d(x, w[f"{at}.downsample.0.weight"], stride=stride)
                x = normed(x, f"{at}.downsample.1")
            x = F.relu(x + y)
    return x.mean((2, 3))


@pytest.mark.parametrize("model", IMAGENET)
def test_loaded_weights_compute_the_public_network(model: str, tmp_path: Path) -> None:
    state = public_state(model)
    safetensors.torch.save_file(state, tmp_path / "w.safetensors")
    network = build(model, 3, 96, width=4)
    head = network.head.weight.clone()
    load_weights(network, model, tmp_path / "w.safetensors")
    x = torch.randn(2, 3, 64, 64)
    expected = by_hand(state, IMAGENET[model].blocks, x)
    with torch.no_grad():
        torch.testing.assert_close(network.eval()(x).feature, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(network.head.weight, head)


@pytest.mark.parametrize("model", IMAGENET)
def test_entries_and_outputs_are_torchvisions(model: str, tmp_path: Path) -> None:
    models: Any = pytest.importorskip("torchvision.models")
    theirs = getattr(models, model.removesuffix("_imagenet"))().eval()
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    ours = build(model, 1000, 224).eval()
    load_weights(ours, model, tmp_path / "w.pth")
    ours.head.load_state_dict(theirs.fc.state_dict())
    x = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(ours(x).logits, theirs(x), rtol=1e-4, atol=1e-4)


def test_files_of_training_scripts(tmp_path: Path) -> None:
    def encoder(network: Network) -> dict[str, Tensor]:
        return network.encoder.state_dict()

    model = "resnet18_imagenet"
    state = public_state(model)
    first, second = (build(model, 3, 96, width=4) for _ in range(2))
    torch.save({**state, "fc.weight": torch.ones(9, 32)}, tmp_path / "plain.pth")
    wrapped = {f"module.{n}": t for n, t in state.items() if not n.endswith("num_batches_tracked")}
    torch.save({"epoch": 3, "state_dict": wrapped}, tmp_path / "script.pth")
    load_weights(first, model, tmp_path / "plain.pth")
    load_weights(second, model, tmp_path / "script.pth")
    for name, tensor in encoder(first).items():
        assert torch.equal(tensor, encoder(second)[name])


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code ran",))


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = "resnet18_imagenet", tmp_path / "w.pth"
    network = build(model, 3, 96, width=4)
    with pytest.raises(ProtofedError, match=r"cannot read weights from .*No such file"):
        load_weights(network, model, path)
    with pytest.raises(ProtofedError, match=r"are for resnet18_imagenet.*not for cnn3"):
        load_weights(network, "cnn3", path)
    state = public_state(model)
    state["layer9.weight"] = state.pop("conv1.weight")
    state["bn1.bias"] = torch.zeros(7)
    torch.save(state, path)
    whole = r"1 missing: conv1.weight; 1 unknown: layer9.weight; 1 of another size: bn1.bias 7 inst"
    with pytest.raises(ProtofedError, match=whole):
        load_weights(network, model, path)
    torch.save(Trap(), path)
    with pytest.raises(ProtofedError, match="more than tensors"):
        load_weights(network, model, path)
    assert "code ran" not in capsys.readouterr().out
    torch.save([1, 2], path)
    with pytest.raises(ProtofedError, match="not a state dict"):
        load_weights(network, model, path)
    path.write_bytes(b"nothing")
    with pytest.raises(ProtofedError, match=r"cannot read weights|more than tensors"):
        load_weights(network, model, path)
