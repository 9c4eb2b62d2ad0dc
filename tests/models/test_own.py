"""Models of one's own: from a file that was named by a person, or is trusted."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from protofed import load_model, load_run, run, tree, user_code
from protofed.config import make_config, merged_config
from protofed.errors import ProtofedError
from protofed.federation.facts import discover
from protofed.federation.simulation import Federation, initial_network
from protofed.method import Network, Sizes
from protofed.methods import METHODS, FedAvg
from protofed.models import build, own
from protofed.models.dropout import KeyedDropout
from protofed.models.weights import load_weights
from protofed.testing.checks import SHORT, tiny_task

CODE = """
from pathlib import Path
import torch
from torch import nn
Path("EXECUTED").touch()

def small(image_size):
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

def staged(image_size):
    encoder = small(image_size)
    encoder.stages = {"first": "2"}
    return encoder

def flat(image_size):
    encoder = small(image_size)
    encoder.stages = {"first": "4"}
    return encoder

def absent(image_size):
    encoder = small(image_size)
    encoder.stages = {"first": "conv"}
    return encoder

def called(image_size):
    encoder = small(image_size)
    encoder.stages = {NAMED: "2"}
    return encoder

def scaled(image_size):
    encoder = small(image_size)
    encoder.scale = nn.Parameter(torch.ones(()))
    return encoder

def wider(image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, 6), nn.ReLU())

def image(image_size):
    return nn.Identity()

class Random(nn.Dropout):
    ...

def random(image_size):
    return nn.Sequential(small(image_size), Random())

def dropout(image_size):
    return nn.Sequential(*small(image_size)[:3], nn.Dropout2d(0.3), *small(image_size)[3:],
                         nn.Dropout(0.3))

def number(image_size):
    return 3

def fails(image_size):
    raise KeyError("no such thing")
"""
MARKER = Path("EXECUTED")
NAME = "net.py:small"
MINE: dict[str, Any] = {**SHORT, "model": NAME, "width": None, "norm": None}


@pytest.fixture(autouse=True)
def new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with a file of models; none has been executed yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(user_code, "_trusted", False)
    Path("net.py").write_text(CODE)
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another process."""
    monkeypatch.setattr(own, "_LOADED", {})
    for name in [name for name in sys.modules if name.startswith("protofed_user_")]:
        monkeypatch.delitem(sys.modules, name)
    MARKER.unlink(missing_ok=True)


def test_a_model_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = run(tiny_task(), "fpl", out="run", **MINE)
    assert result.network().encoder(torch.zeros(1, 3, 8, 8)).shape == (1, 4)
    assert result.model["head.weight"].shape == (4, 4)
    assert result.config.model == f"{tmp_path / 'net.py'}:small"
    assert result.summary["batchnorm"].startswith("averaged")
    digest = result.facts["model_digest"]
    forget(monkeypatch)
    read = load_run("run")
    assert read.facts["model_digest"] == digest and not MARKER.exists()
    with pytest.raises(ProtofedError, match=r"the code of model net.py:small.*--trust-code"):
        load_model("run")
    assert not MARKER.exists()
    user_code.trust_code()
    assert load_model("run").embed(torch.zeros(2, 3, 8, 8)).shape == (2, 4)


def test_only_what_a_person_names_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("c.toml").write_text(f'model = "{NAME}"\n')
    with pytest.raises(ProtofedError, match=r"'c.toml' names code as its model.*--trust-code"):
        merged_config("c.toml", None, None, None, {})
    read = make_config(model=NAME, image_size=32)
    assert not MARKER.exists()
    with pytest.raises(ProtofedError, match="this needs the code of model"):
        Federation(read)
    assert not MARKER.exists()
    assert merged_config("c.toml", None, None, None, {"model": "cnn2"}).model == "cnn2"
    assert not MARKER.exists()
    made = merged_config("c.toml", None, None, None, {"model": NAME})
    assert MARKER.exists() and made.width is None and made.norm is None
    forget(monkeypatch)
    user_code.trust_code()
    merged_config("c.toml", None, None, None, {})
    assert MARKER.exists()


def test_hash_and_initial_weights_follow_the_content(tmp_path: Path) -> None:
    task = tiny_task()
    (tmp_path / "b").mkdir()
    Path("b/net.py").write_text(CODE)
    user_code.trust_code()
    here, there, other = (
        make_config(task, **{**MINE, "model": name, "precision": "fp32"})
        for name in (NAME, "b/net.py:small", "net.py:wider")
    )
    assert here.hash == there.hash != other.hash
    assert discover(here, task).run_hash(here) == discover(there, task).run_hash(there)
    a, b = (initial_network(c, task).state_dict() for c in (here, there))
    assert all(torch.equal(a[n], b[n]) for n in a)
    Path("b/net.py").write_text(CODE + "# changed")
    assert discover(here, task).run_hash(here) != discover(there, task).run_hash(there)


def test_weights_by_its_own_names(tmp_path: Path) -> None:
    own.load_factory(NAME)
    first, second = (build(NAME, 3, 8) for _ in range(2))
    state = first.encoder.state_dict() | {"fc.weight": torch.zeros(9, 4)}
    torch.save(state, "w.pth")
    load_weights(second, NAME, "w.pth")
    assert torch.equal(second.encoder[0].weight, first.encoder[0].weight)  # type: ignore[index]
    torch.save({"0.weight": torch.zeros(4, 3, 3, 3)}, "w.pth")
    with pytest.raises(ProtofedError, match=r"do not fit net.py:small: 5 missing"):
        load_weights(second, NAME, "w.pth")


def test_it_may_name_its_stages() -> None:
    for name, stages in ((NAME, {"pixels": 3}), ("net.py:staged", {"pixels": 3, "first": 4})):
        own.load_factory(name)
        assert {n: s.channels for n, s in build(name, 3, 8).stages.items()} == stages


@pytest.mark.parametrize("stage", ["pixels", "layer1.0", "a,b"])
def test_a_name_that_no_stage_can_have(stage: str) -> None:
    """The images are a stage already, buffers have no dots, and commas separate stages."""
    Path("net.py").write_text(CODE.replace("NAMED", repr(stage)))
    with pytest.raises(ProtofedError, match=f"net.py:called: it calls a stage '{stage}'"):
        run(tiny_task(), "fedfa", **{**MINE, "model": "net.py:called"})


def test_its_first_parameter_may_be_a_number() -> None:
    result = run(tiny_task(), **{**MINE, "model": "net.py:scaled", "rounds": 1})
    assert result.model["encoder.scale"].shape == ()


TIED = """
import torch
from torch import nn

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.second = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).relu()).relu().mean((2, 3))

def encoder(image_size):
    return Encoder()
"""
ONCE = TIED.replace("self.second.weight = self.first.weight", "del self.second").replace(
    "self.second(self.first(x).relu())",
    "torch.conv2d(self.first(x).relu(), self.first.weight, padding=1)",
)


@pytest.mark.parametrize("method", ["fedavg", "fedadam", "feddyn", "scaffold"])
def test_a_weight_under_two_names_is_one_weight(method: str) -> None:
    """The server's own step is on the first name, and held for the other one as well."""
    task, found = tiny_task(), []
    for folder, code in (("a", TIED), ("b", ONCE)):
        Path(folder).mkdir()
        Path(folder, "net.py").write_text(code)
        model = f"{folder}/net.py:encoder"
        settings = {**MINE, "model": model, "rounds": 3, "bounds": "off"}
        result = run(task, method, out=f"{folder}/run", **settings)
        resumed = run(task, method, out=f"{folder}/run", resume=True, **{**settings, "rounds": 4})
        assert result.model.keys() == resumed.model.keys()
        found.append(resumed.model)
        network = load_run(f"{folder}/run").network()
        assert torch.equal(network.state_dict()["head.weight"], resumed.model["head.weight"])
    tied, once = found
    assert torch.equal(tied["encoder.second.weight"], once["encoder.first.weight"])
    assert all(torch.equal(tied[name], once[name]) for name in once)


WRONG = {
    "net.py": "names no function",
    "net.py:smal": "there is no function smal in .*net.py",
    "absent.py:small": "there is no file .*absent.py' to load model small",
    "net.py:image": r"makes \[2, 3, 8, 8\] of 2 images of 8×8",
    "net.py:number": "returns 3",
    "net.py:fails": r"fails with images of 8×8: KeyError.*net.py:56",
    "net.py:flat": r"its stage first, the module 4, gives \[\[2, 4\]\].*maps \[B, C, H, W\]",
    "net.py:absent": "fails with images of 8×8: .*no attribute `conv`",
}


@pytest.mark.parametrize(("name", "words"), WRONG.items())
def test_errors(name: str, words: str) -> None:
    with pytest.raises(ProtofedError, match=words):
        run(tiny_task(), **{**MINE, "model": name})


def test_width_and_norm_are_for_built_in_models() -> None:
    with pytest.raises(ProtofedError, match="width is for the models of this package"):
        run(tiny_task(), **{**MINE, "width": 4})


def test_random_numbers_that_no_run_seeds_are_refused() -> None:
    """Two runs with the same seed would differ, and so would a resumed one."""
    words = r"net.py:random draws random numbers in training.*nn.Dropout"
    with pytest.raises(ProtofedError, match=words):
        run(tiny_task(), **{**MINE, "model": "net.py:random"})
    run(tiny_task(), **{**MINE, "model": "net.py:random", "train": "head"})  # in evaluation mode


def test_a_method_may_copy_a_model_with_dropout() -> None:
    @dataclass(frozen=True)
    class Copies(FedAvg):
        name: ClassVar[str] = "copies"

        def network(self, backbone: Network, sizes: Sizes) -> Network:
            return copy.deepcopy(backbone)

    run(tiny_task(), Copies(), **{**MINE, "model": "net.py:dropout", "rounds": 1})


def test_dropout_is_the_same_in_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**MINE, "model": "net.py:dropout", "rounds": 2, "epochs": 2}
    first = run(tiny_task(), **settings)
    torch.manual_seed(7)
    again = run(tiny_task(), **{**settings, "engine": "workers", "workers": 2})
    assert tree.equal({"model": first.model}, {"model": again.model})
    monkeypatch.setattr(KeyedDropout, "forward", lambda self, x: x)
    without = run(tiny_task(), **settings)
    assert not tree.equal({"model": first.model}, {"model": without.model})


def test_dropout_in_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engines.lanes.cpu_stand_in import both, difference, pretend

    own.load_factory("net.py:dropout")
    pretend(monkeypatch)
    loop, lanes = both(METHODS["moon"](), model="net.py:dropout", width=None, norm=None)
    assert difference(loop, lanes) < 1e-6
