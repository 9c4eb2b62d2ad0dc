"""CCST: its styles, who is drawn, what is redrawn, and the files that a run must have."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.methods.helpers import recorded
from tests.some_methods import options_of
from torch import Tensor
from typer.testing import CliRunner

import protofed
from protofed import keys, tree
from protofed.adain import style_transfer
from protofed.cli.app import app
from protofed.config import make_config, method_files
from protofed.data import Images
from protofed.errors import ProtofedError
from protofed.federation.simulation import Federation
from protofed.method import Batch, Client, Sizes
from protofed.methods import CCST, create
from protofed.models import build
from protofed.runs import load_run
from protofed.runs.folder import RunFolder
from protofed.runs.model_file import read_model
from protofed.runs.pool import Pool
from protofed.runs.run import run
from protofed.testing.checks import SHORT, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")

FILES = options_of("ccst")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
NAMES = ("a", "b", "c")
IDS = torch.tensor([keys.key(name) for name in NAMES])
BANK = torch.from_numpy(keys.generator("bank").uniform(0.1, 1.5, (3, 4, 2, 5)))


def method(**options: Any) -> Any:
    return create("ccst", FILES | options)


def transfer() -> Any:
    return style_transfer(*FILES.values(), torch.zeros((), dtype=torch.float64))


def look(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None, None]


def images(*shape: int) -> Tensor:
    """Normalized: pixels are in [0, 1]."""
    x = torch.from_numpy(keys.generator("ccst").uniform(0, 1, shape))
    return (x - look(MEAN)) / look(STD)


def pixels(x: Tensor) -> Tensor:
    return x * look(STD) + look(MEAN)


def a_client(mask: list[float], x: Tensor | None = None, N: int = 1, **options: Any) -> Client:
    one = method(single=N, styles="single" if N > 1 else "overall", **options)
    network = build("cnn2", 4, 8, 4, "batch").double()
    bank = {"style": BANK[:, :N], "mask": torch.tensor(mask), "id": IDS}
    y = torch.zeros(0 if x is None else len(x)).long()
    parts = [] if x is None else [*zip(x.split(3), y.split(3), strict=True)]
    client = Client(
        one, network, Sizes.of(network, 4, 8), received={"bank": bank}, mine={}, name="b",
        mean=MEAN, std=STD, samples=len(y), clean=lambda part: iter(parts),
    )  # fmt: skip
    client.begin_step(5)
    return client


# ---- (1) --------------------------------------------------------------------------------------


def by_hand(values: Tensor, unbiased: bool) -> Tensor:
    """The mean and the deviation of each channel [C, n], from plain numbers."""
    rows = []
    for channel in values.tolist():
        mean = sum(channel) / len(channel)
        total = sum((v - mean) ** 2 for v in channel)
        rows.append([mean, (total / (len(channel) - unbiased) + 1e-5) ** 0.5])
    return torch.tensor(rows, dtype=torch.float64).T


def test_the_overall_style_is_that_of_all_positions_of_all_images() -> None:
    x = images(7, 3, 8, 8)
    sent, kept = CCST.upload(method(), a_client([1, 1, 1], x))
    maps = torch.cat([*transfer().maps(pixels(x), 2)])
    expected = by_hand(maps.transpose(0, 1).flatten(1), unbiased=False)
    assert kept == {} and sent["style"]["style"].shape == (1, 2, 5)
    assert torch.allclose(sent["style"]["style"][0], expected, rtol=1e-9)


def test_single_styles_are_those_of_different_images_drawn_anew() -> None:
    x = images(11, 3, 8, 8)
    client = a_client([1, 1, 1], x, N=4)
    each = [by_hand(map_.flatten(1), unbiased=True) for map_ in next(transfer().maps(pixels(x), 2))]
    seen = []
    for step in range(3):
        client.begin_step(step)
        styles = client.method.upload(client)[0]["style"]["style"]
        assert styles.shape == (4, 2, 5)
        found = [[i for i, e in enumerate(each) if torch.allclose(s, e)] for s in styles]
        assert all(len(fits) == 1 for fits in found)
        seen.append({i for (i,) in found})
        assert len(seen[-1]) == 4
    assert seen[0] != seen[1] or seen[1] != seen[2]


def test_a_client_with_few_images_sends_some_styles_twice() -> None:
    client = a_client([1, 1, 1], images(3, 3, 8, 8), N=4)
    styles = client.method.upload(client)[0]["style"]["style"]
    assert styles.shape == (4, 2, 5) and len(styles.unique(dim=0)) == 3


def test_few_images_hold_a_style_back() -> None:
    client = a_client([1, 1, 1], images(7, 3, 8, 8))
    client.min_class_count = 8
    assert not client.method.upload(client)[0]["style"]["style"].any()
    client = a_client([1, 1, 1], images(7, 3, 8, 8), N=4)
    client.min_class_count = 2
    with pytest.raises(ProtofedError, match="styles of single images"):
        client.method.upload(client)


def test_who_holds_a_style_back_is_not_drawn() -> None:
    found = Federation(
        make_config(tiny_task(), "ccst", FILES, **SHORT, min_class_count=20), tiny_task()
    )
    small = found.clients["left-0"]
    rows = torch.arange(10)
    small = small.with_images(Images(small.images.x[rows], small.images.y[rows]))
    train, found.engine.train = (
        found.engine.train,
        lambda clients, *args: train(
            [small if c.name == small.name else c for c in clients], *args
        ),
    )
    for _ in range(2):
        found.run_round()
        bank = found.server.state["bank"]
        assert bank["mask"].tolist() == [0, 1, 1, 1]
        assert not bank["style"][0].any() and bank["style"][1:].flatten(1).any(1).all()


# ---- (2) --------------------------------------------------------------------------------------


def fits(client: Client, x: Tensor, redrawn: Tensor, N: int, enlarge: int) -> list[Any]:
    """For each image, which client's which style it has; (1, 0) if it stayed."""
    options = {(1, 0): x}
    for j in (0, 2):
        for i in range(N):
            new = transfer().restyled(pixels(x), BANK[j, i].expand(len(x), 2, 5), enlarge)
            options[j, i] = (new - client.pixel_mean) / client.pixel_std
    found = []
    for row, image in enumerate(redrawn):
        names = [at for at, o in options.items() if torch.allclose(image, o[row], atol=1e-12)]
        assert len(names) == 1
        found += names
    return found


@pytest.mark.parametrize(("N", "enlarge"), [(1, 2), (4, 3)])
def test_an_image_gets_a_style_of_any_client_or_stays(N: int, enlarge: int) -> None:
    x = images(240, 3, 8, 8)
    client = a_client([1, 1, 1], N=N, enlarge=enlarge)
    found = fits(client, x, client.method._redrawn(client, x), N, enlarge)  # type: ignore[attr-defined]
    for j in range(3):
        assert 55 < sum(whose == j for whose, _ in found) < 105
    for i in range(N):
        assert 160 / N / 2 < sum(whose != 1 and which == i for whose, which in found) < 320 / N


def test_clients_without_a_style_are_not_drawn_and_ones_own_always_is() -> None:
    x = images(60, 3, 8, 8)
    client = a_client([1, 0, 0])  # its own style is not there either: it needs none
    found = fits(client, x, client.method._redrawn(client, x), 1, 2)  # type: ignore[attr-defined]
    assert {whose for whose, _ in found} == {0, 1}
    alone = a_client([0, 0, 0])
    assert torch.equal(alone.method._redrawn(alone, x), x)  # type: ignore[attr-defined]


def test_pixels_stay_in_range() -> None:
    client = a_client([1, 0, 1])
    client.received["bank"]["style"] = 50 * BANK[:, :1]
    seen = pixels(client.method._redrawn(client, images(20, 3, 8, 8)))  # type: ignore[attr-defined]
    assert seen.min() > -1e-12 and seen.max() < 1 + 1e-12
    assert ((seen < 1e-12) | (seen > 1 - 1e-12)).sum() > 100


# ---- (3), the server ----------------------------------------------------------------------------


def test_an_epoch_has_each_image_in_k_styles_after_a_round_without_styles() -> None:
    one = method(variants=4)
    (first,), (later,) = one.phases(0, 5), one.phases(3, 5)
    assert (first.epochs, later.epochs) == (None, 20)
    client = a_client([1, 0, 1])
    x, y = images(6, 3, 8, 8), torch.zeros(6).long()
    plain, redrawn = (
        float(phase.loss(client, Batch(x, y, y))["ce"].detach()) for phase in (first, later)
    )
    client.begin_step(5)
    expected = client.cross_entropy(client.forward(x).logits, y)
    assert plain == pytest.approx(float(expected.detach())) and redrawn != pytest.approx(plain)


def test_clients_count_the_same_and_keep_their_places() -> None:
    task = tiny_task()
    settings = {**SHORT, "participation": 0.5, "rounds": 3, "seed": 1}
    found = Federation(make_config(task, "ccst", FILES, **settings), task)
    replies, styles = recorded(found), {}
    for _ in range(3):
        found.run_round()
        models = [r.message["model"]["head.bias"] for r in replies.values()]
        assert torch.allclose(found.server.state["model"]["head.bias"], sum(models) / len(models))
        styles |= {name: r.message["style"]["style"] for name, r in replies.items()}
        bank = found.server.broadcast()["bank"]
        for place, name in enumerate(found.server.clients):
            assert bool(bank["mask"][place]) == (name in styles)
            expected = styles.get(name, torch.zeros(1, 2, 5))
            assert torch.equal(bank["style"][place], expected)
            assert bank["id"][place] == keys.key(name)
    assert found.weights == "uniform"


def test_a_round_without_replies_before_any_style() -> None:
    """The bank of the next round is empty, and images stay as they are."""
    task = tiny_task()
    found = Federation(make_config(task, "ccst", FILES, **SHORT), task)
    found.server.finish()
    bank = found.server.broadcast()["bank"]
    assert not bank["mask"].any() and bank["id"].tolist() == [
        keys.key(name) for name in found.clients
    ]
    found.run_round()
    assert found.server.state["bank"]["mask"].all()


# ---- the files of a run -------------------------------------------------------------------------


def copied(folder: Path, shift: float = 0.0) -> dict[str, str]:
    """Files of the same content, or of another, under other names."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    named = {}
    for part, value in FILES.items():
        weights = load_file(value.removeprefix("file:"))
        weights = {n: t + shift if n.endswith("bias") else t for n, t in weights.items()}
        save_file(weights, folder / f"my-{part}.safetensors")
        named[part] = f"file:{folder}/my-{part}.safetensors"
    return named


def test_the_content_of_files_identifies_a_run_and_their_paths_do_not(tmp_path: Path) -> None:
    task, same, other = tiny_task(), copied(tmp_path / "a"), copied(tmp_path / "b", 0.5)
    found = [
        Federation(make_config(task, "ccst", files, **SHORT), task)
        for files in (FILES, same, other)
    ]
    assert len({f.config.hash for f in found}) == 1
    assert found[0].hash == found[1].hash != found[2].hash
    assert found[0].facts.files_digest == found[1].facts.files_digest
    assert found[0].facts.files_digest != found[2].facts.files_digest
    assert str(found[0].facts.files_digest).count(",") == 1
    plain = Federation(make_config(task, **SHORT), task)
    assert plain.facts.files_digest is None


def test_a_run_resumes_only_with_the_same_files(tmp_path: Path) -> None:
    task, files = tiny_task(), copied(tmp_path / "a")
    out = tmp_path / "run"
    first = run(task, "ccst", options=files, out=out, **SHORT)
    assert load_run(out).facts["files_digest"] == first.facts["files_digest"]
    longer = {**SHORT, "rounds": 3}
    for part, value in copied(tmp_path / "b", 0.5).items():
        shutil.copy(value.removeprefix("file:"), files[part].removeprefix("file:"))
    with pytest.raises(ProtofedError, match=r"another configuration: .*files_digest"):
        run(task, "ccst", options=files, out=out, resume=True, **longer)
    resumed = run(task, "ccst", options=FILES, out=out, resume=True, **longer)
    whole = run(task, "ccst", options=FILES, **longer)
    assert tree.equal({"": resumed.model}, {"": whole.model})


def test_files_may_move_and_packed_runs_have_their_names_alone(tmp_path: Path) -> None:
    task, files, moved = tiny_task(), copied(tmp_path / "a"), copied(tmp_path / "b")
    result = run(task, "ccst", options=files, out=tmp_path / "runs" / "run", **SHORT)
    folder = RunFolder(tmp_path / "runs" / "run")
    now = make_config(task, "ccst", moved, **SHORT)
    assert folder.differences(replace(now, device="cpu"), result.facts) == []
    assert folder.differences(replace(now, device="cpu", rounds=3), result.facts)
    (stored,) = Pool(tmp_path / "runs").runs
    packed = json.loads(stored.line())["config"]["options"]
    assert packed["encoder"] == "file:my-encoder.safetensors" and packed["enlarge"] == 2
    assert str(tmp_path) not in stored.line()
    card = read_model(folder.path / "model.safetensors").card
    assert card.options["decoder"] == "file:my-decoder.safetensors" and card.options["single"] == 16


def test_a_model_is_used_without_the_files(tmp_path: Path) -> None:
    files = copied(tmp_path / "a")
    run(tiny_task(), "ccst", options=files, out=tmp_path / "run", **SHORT)
    shutil.rmtree(tmp_path / "a")
    model = protofed.load_model(tmp_path / "run")
    assert len(model.predict(torch.rand(2, 3, 8, 8))) == 2
    assert not [n for n in model.network.state_dict() if n.split(".")[0] not in ("encoder", "head")]
    assert load_run(tmp_path / "run").config.hash


def test_paths_are_found_from_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied(tmp_path / "a")
    monkeypatch.chdir(tmp_path / "a")
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {"encoder": "file:my-encoder.safetensors", "decoder": "file:~/a/my-decoder.safetensors"}
    config = make_config(tiny_task(), "ccst", given)
    assert method_files(config.method) == {
        part: str(tmp_path / "a" / f"my-{part}.safetensors") for part in given
    }
    assert make_config(tiny_task(), config.method) == make_config(tiny_task(), "ccst", given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "a file with the weights of its encoder"),
        ({**FILES, "decoder": "decoder.pth"}, "a file with the weights of its decoder"),
        ({**FILES, "decoder": "file:none.pth"}, "cannot read '.*none.pth'"),
        ({**FILES, "decoder": FILES["encoder"]}, "does not hold the decoder of AdaIN"),
        ({**FILES, "enlarge": 1}, "8×8 pixels are too small"),
    ],
)
def test_an_error_about_files_comes_before_anything_runs(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ProtofedError, match=words):
        run(tiny_task(), "ccst", options=options, out=tmp_path / "run", **SHORT)
    assert not (tmp_path / "run").exists()


def test_it_is_shown_and_checked_at_the_command_line() -> None:
    shown = CliRunner().invoke(app, ["methods", "ccst"]).stdout
    assert "file:vgg_normalised.pth" in shown and "no accuracy was measured" in shown
    without = CliRunner().invoke(app, ["methods", "check", "ccst"])
    assert without.exit_code and "file with the weights of its encoder" in without.stdout
    sets = [word for name, value in FILES.items() for word in ("--set", f"{name}={value}")]
    checked = CliRunner().invoke(app, ["methods", "check", "ccst", *sets])
    assert checked.exit_code == 0, checked.stdout
    assert "checks passed" in checked.stdout


def test_what_describes_the_method_says_that_files_must_be_given():
    shown = CliRunner().invoke(app, ["methods", "ccst"]).output
    page = (Path(protofed.__file__).parents[2] / "docs/methods/ccst.md").read_text()
    for name in ("encoder", "decoder"):
        (line,) = (x for x in shown.splitlines() if x.split()[:1] == [name])
        assert "must be given" in line
        assert f"| `{name}` |" in page
        assert "``" not in page.partition(f"| `{name}` |")[2].partition("\n")[0]
