"""A site: its folder of images, and the runs it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict
from tests.deploy.flower_world import CLASSES, images, write_site

from protofed.config import make_config
from protofed.data import load_task
from protofed.data.task import Reading
from protofed.deploy import programs, server_app
from protofed.deploy.audit import AUDIT_FILE
from protofed.deploy.members import FEDERATION_FILE, read_members
from protofed.deploy.messages import Request, write
from protofed.deploy.operator import plan_run, run_folder
from protofed.deploy.setup import init
from protofed.deploy.site import (
    SITE_FILE,
    PrivateStates,
    answer,
    folder_images,
    own_images,
    read_site_config,
)
from protofed.deploy.spec import RunSpec, make_spec, pack, unpack
from protofed.deploy.wire import Refused, add_tree
from protofed.errors import ProtofedError
from protofed.federation.simulation import initial_network
from protofed.runs.records import read_records
from protofed.runs.result import load_run

BAD = "print-0"
SMALL: dict[str, Any] = {"model": "cnn2", "width": 4, "rounds": 1, "epochs": 1, "batch": 4}


OUTSIDE = "a/../../../../outside"


@pytest.fixture
def folder_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache for the images of folders (the built-in task's stay in the user's cache)."""
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def home(tmp_path: Path, folder_cache: None) -> Path:
    """The folder of a site with its own images."""
    init(tmp_path / "own", ["here"], classes=CLASSES, image_size=16, minimum=1)
    folder = tmp_path / "own" / "sites" / "here"
    write_site(folder, images(tmp_path / "images", CLASSES))
    return folder


def plan(home: Path, **more: Any) -> RunSpec:
    """A run as an operator plans it, or as somebody else does."""
    task = replace(read_members(home).skeleton(), **more)
    return make_spec(make_config(task, "fedavg", **SMALL, device="cpu", engine="loop"), task)


def last_request(spec: RunSpec) -> RecordDict:
    """The message that closes a run: the site saves the model under the run's name."""
    return write(Request("here", spec.hash, 1, train=False, evaluate=True, accepted=""))


def test_the_federations_own_run_leaves_its_model(home: Path) -> None:
    spec = plan(home)
    network = initial_network(spec.config, spec.task)
    content = add_tree(last_request(spec), {"model": network.state_dict()})
    answer(read_site_config(home), pack(spec), content)
    model = home / "models" / f"{spec.name}.safetensors"
    assert model.is_file()
    states = PrivateStates(home / "states" / "x")
    states.save(1, {"a": {"x": torch.ones(1)}})
    if os.name != "nt":  # only the site can read what is its own
        for path in (model, *states.folder.iterdir()):
            modes = (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777)
            assert modes == (0o700, 0o600)


@pytest.mark.parametrize("name", [OUTSIDE, f"{OUTSIDE}:x", "glyphs", "folder:/etc", "folder:other"])
def test_a_run_about_something_else_is_refused_by_a_site(
    home: Path, tmp_path: Path, name: str
) -> None:
    """Its name would be part of a path: a file could be written anywhere."""
    spec = plan(home, name=name)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(Refused, match=r"the run is for task .*this federation is for 'folder:own'"):
        answer(read_site_config(home), pack(spec), last_request(spec))
    assert set(tmp_path.rglob("*")) - before == {home / AUDIT_FILE}


def test_sites_of_a_task_read_no_other_folder(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(rounds=1)
    parts = json.loads(w.spec)
    parts["task"]["name"] = "folder:/etc"
    parts["hash"] = replace(w.run, config=replace(w.run.config, task="folder:/etc")).hash
    home = read_site_config(w.folder / "homes" / BAD)
    asked = Request(BAD, parts["hash"], 0, train=True, evaluate=False, accepted="")
    monkeypatch.setattr("protofed.deploy.site.load_task", lambda *a, **b: pytest.fail("it looked"))
    with pytest.raises(
        Refused, match="the run is for task 'folder:/etc', this federation is for 'gl"
    ):
        answer(home, json.dumps(parts), write(asked))


def test_the_server_writes_no_run_of_another_name(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = pack(plan(home, name=OUTSIDE))
    monkeypatch.setenv(programs.FOLDER_VARIABLE, str(home))
    context = Context(1, 1, {}, RecordDict(), {"spec": spec, "overwrite": True})
    before = set(tmp_path.rglob("*"))
    with pytest.raises(ProtofedError, match="the run is for task"):
        server_app.main(None, context)  # type: ignore[arg-type]
    assert set(tmp_path.rglob("*")) == before


def test_a_run_of_another_version_is_refused(home: Path) -> None:
    spec = plan(home)
    with pytest.raises(ProtofedError, match="need the same version"):
        unpack(pack(spec).replace(spec.hash, "0000000000"))
    with pytest.raises(ProtofedError, match="cannot be read"):
        unpack("{}")


def test_limits_are_the_sites_own(home: Path) -> None:
    """Not the server's: a message cannot lift them."""
    settings = home / SITE_FILE
    text = settings.read_text()
    settings.write_text(f"{text}max_image_pixels = 200\nmax_unpacked_gb = 1\n")
    site = read_site_config(home)
    assert site.reading == Reading(False, 200, 1.0)
    with pytest.raises(ProtofedError, match="the home folder is unknown"):
        folder_images(replace(site, data="~nobody-here/x"), CLASSES, 16)
    settings.write_text(text.replace('site = "', 'site = ["x"]  # "'))
    with pytest.raises(ProtofedError, match=r"unknown site in .*site\.toml"):
        read_site_config(home)
    with pytest.raises(ProtofedError, match=r"max_image_pixels = 256 in site\.toml allows"):
        folder_images(site, CLASSES, 16)
    settings.write_text(f"{text}max_image_pixels = 0\n")
    with pytest.raises(ProtofedError, match=r"max_image_pixels in '.*' must be a whole number"):
        read_site_config(home)


def test_sites_agree_on_what_is_black_and_white(home: Path, tmp_path: Path) -> None:
    data, agreed = tmp_path / "scans", home / FEDERATION_FILE
    for name in CLASSES:
        (data / name).mkdir(parents=True)
        for i in range(5):
            scan = np.arange(1000, 1256, dtype=np.uint16).reshape(16, 16)
            Image.fromarray(scan).save(data / name / f"{i}.png")
    with pytest.raises(ProtofedError, match=r"no pixel_range in federation\.toml says which"):
        folder_images(read_site_config(home, str(data)), CLASSES, 16)
    agreed.write_text(
        agreed.read_text().replace("\nminimum", '\npixel_range = "1000:1255"\nminimum')
    )
    site = read_site_config(home, str(data))
    train, _ = folder_images(site, CLASSES, 16)
    assert train.x[0, 0].flatten().tolist() == list(range(256))
    spec = plan_run(site.members, None, "fedavg", {}, SMALL)
    assert spec.config.pixel_range == spec.task.pixel_range == "1000:1255"
    told = unpack(pack(spec))
    site.members.require_own(told.task)
    assert told.hash == spec.hash != plan(home, pixel_range=None).hash
    with pytest.raises(ProtofedError, match="pixel_range is 0:1, but the sites agreed on 1000:1"):
        plan_run(site.members, None, "fedavg", {}, {**SMALL, "pixel_range": "0:1"})


def test_sites_of_a_task_keep_their_own_limits(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(rounds=1)
    folder = w.folder / "homes" / BAD
    (folder / SITE_FILE).write_text((folder / SITE_FILE).read_text() + "max_image_pixels = 7\n")
    spec = replace(w.run, config=replace(w.run.config, max_image_pixels=8, skip_bad=True))
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "protofed.deploy.site.load_task", lambda *a, **b: asked.append(b) or load_task("glyphs")
    )
    own_images(read_site_config(folder), spec)
    assert (asked[0]["max_image_pixels"], asked[0]["skip_bad"]) == (7, True)


def test_the_names_of_states_are_no_paths(tmp_path: Path) -> None:
    with pytest.raises(ProtofedError, match="is not the name of a private state"):
        PrivateStates(tmp_path / "states").load("../../secret")


@pytest.mark.usefixtures("folder_cache")
def test_a_sites_folder_is_labeled_as_the_federation_has_its_classes(tmp_path: Path) -> None:
    init(tmp_path / "f", ["a", "b"], classes=list(CLASSES), image_size=16)
    home = tmp_path / "f" / "sites" / "a"
    data = images(tmp_path / "a", ("dog", "eel"), split=True)
    train, test = folder_images(read_site_config(home, str(data)), CLASSES, 16)
    assert sorted(set(train.y.tolist())) == [1, 2] and len(train) == 18 and len(test) == 6
    images(tmp_path / "a", ("cat",), split=True)
    with pytest.raises(ProtofedError, match="unknown class of the federation"):
        folder_images(read_site_config(home, str(data)), ("dog", "eel"), 16)
    with pytest.raises(ProtofedError, match="has no images"):
        folder_images(read_site_config(home), CLASSES, 16)
    with pytest.raises(ProtofedError, match="no folder"):
        folder_images(read_site_config(home, str(tmp_path / "nowhere")), CLASSES, 16)


@pytest.mark.usefixtures("folder_cache")
def test_sites_with_own_folders_train_a_model(
    tmp_path: Path, grid: Callable[..., Any], single_thread: None
) -> None:
    init(tmp_path / "f", ["a", "b"], classes=list(CLASSES), image_size=16)
    for site, classes in (("a", CLASSES), ("b", CLASSES[:2])):
        data = images(tmp_path / "data" / site, classes)
        write_site(tmp_path / "f" / "sites" / site, data)
    members = read_members(tmp_path / "f" / "server")
    settings = {"rounds": 2, "epochs": 1, "batch": 4, "model": "cnn2", "width": 4}
    spec = plan_run(members, None, "fpl", {"tau": 0.05}, settings)
    assert spec.hash != plan_run(members, None, "fpl", {}, settings).hash
    out = run_folder(tmp_path / "f" / "server", spec)
    grid(members, tmp_path / "f" / "sites", pack(spec), out).run()
    records = read_records(out / "rounds.jsonl")
    assert [r["clients"] for r in records] == [2, 2]
    assert set(records[1]["accuracy"]) == {"a", "b"}
    result = load_run(out)
    about = {"client": "b", "domain": "b", "model": "cnn2", "samples": 20}
    assert result.summary["clients"][1] == about
    assert result.summary["classes"] == list(CLASSES)
