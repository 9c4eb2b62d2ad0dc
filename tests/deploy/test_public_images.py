"""A method with public images between sites: the task's own, or a folder that every site has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from tests.deploy.flower_world import CLASSES, images, in_file_order, pictures, write_site
from typer.testing import CliRunner

from protofed import tree
from protofed.cli.app import app
from protofed.deploy import operator as deploy
from protofed.deploy import programs
from protofed.deploy.members import read_members
from protofed.deploy.setup import init
from protofed.deploy.site import read_site_config
from protofed.deploy.spec import RunSpec, pack, unpack
from protofed.deploy.wire import read_tree
from protofed.errors import ProtofedError
from protofed.federation.public_images import describe_digest, public_digest
from protofed.method import PublicImages
from protofed.runs.model_file import read_model
from protofed.runs.records import read_records
from protofed.runs.run import run
from protofed.tree import Tree

pytestmark = pytest.mark.usefixtures("own_cache")
BAD = "print-0"
SMALL: dict[str, Any] = {"epochs": 1, "batch": 4, "model": "cnn3,cnn2", "width": 2, "seed": 3}


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """Thirty images of no class."""
    return pictures(tmp_path / "secret-name", 30)


def name_public(home: Path, folder: Path) -> None:
    with (home / "site.toml").open("a") as file:
        file.write(f"public = {json.dumps(str(folder))}\n")


def copies(folder: Path, sites: dict[str, Path]) -> None:
    """Each site's own copy, with other names in another tree, named in its settings."""
    for i, (site, home) in enumerate(sites.items()):
        to = folder.parent / f"copy-{site}"
        to.mkdir()
        for j, path in enumerate(sorted(folder.rglob("*.png"), reverse=bool(i % 2))):
            shutil.copy(path, to / f"{(j * 7) % 100}-{site}.png")
        name_public(home, to)


def own_model(home: Path, run: str) -> Tree:
    """What a site has of its model at the end of a run."""
    stored = read_model(home / "models" / f"{run}.safetensors")
    (own,) = stored.clients.values()
    return {"model": own}


def own_models(w: Any) -> dict[str, Any]:
    return {site: own_model(w.folder / "homes" / site, w.run.name) for site in w.members.sites}


def homes(w: Any) -> dict[str, Path]:
    return {site: w.folder / "homes" / site for site in w.members.sites}


@pytest.mark.parametrize("source", ["photo", "glyphs", "folder"])
def test_from_any_source_the_models_equal_the_simulators(
    world: Callable[..., Any], tmp_path: Path, public: Path, source: str
) -> None:
    named = f"folder:{public}" if source == "folder" else source
    w = world("fedmd", {"public": named, "images": 24}, rounds=2)
    if source == "folder":
        copies(public, homes(w))
    summary = w.coordinator().run()
    oracle = run(config=w.config, out=tmp_path / "oracle")
    for site, model in own_models(w).items():
        assert tree.equal(model, {"model": oracle.client_models[site]})
    records = read_records(w.out / "rounds.jsonl")
    for mine, other in zip(records, oracle.rounds, strict=True):
        assert "problems" not in mine
        assert mine["loss"] == other["loss"]
        assert mine["bytes_up"] == other["bytes_up"]
        assert mine["bytes_down"] == other["bytes_down"]
    assert records[1]["loss"]["digest"] > 0
    assert summary["public"] == oracle.summary["public"]
    assert sum(summary["public"].values()) == 24


def test_neither_images_nor_names_travel(
    world: Callable[..., Any], tmp_path: Path, public: Path
) -> None:
    w = world("fedmd", {"public": f"folder:{public}", "images": 24}, rounds=1)
    copies(public, homes(w))
    w.coordinator().run()
    outline = unpack(w.spec)
    assert outline.public == {"folder": 24}
    assert outline.config.method.options()["public"] == "folder:"
    assert outline.facts.public_digest == w.run.facts.public_digest
    assert str(w.run.facts.public_digest).startswith("30-")
    for text in (w.spec, *(p.read_text() for p in w.out.iterdir() if p.suffix != ".safetensors")):
        for word in ("secret-name", "patient", "copy-", str(tmp_path)):
            assert word not in text
    # 24 × 10 logits up; nothing down before the first consensus, then it and its round
    first, last = (w.grid.seen[i][1] for i in (0, -1))
    assert not read_tree(first) and read_tree(last)["consensus"]["logits"].shape == (24, 10)
    assert read_records(w.out / "rounds.jsonl")[0]["bytes_up"] == 3 * 24 * 10 * 4


def test_a_site_with_other_images_or_none_is_refused_and_the_rounds_continue(
    world: Callable[..., Any], public: Path
) -> None:
    w = world("fedmd", {"public": f"folder:{public}", "images": 24}, rounds=2)
    sites = homes(w)
    copies(public, {s: h for s, h in sites.items() if s != BAD})
    w.coordinator().run()
    records = read_records(w.out / "rounds.jsonl")
    for record in records:
        problem = record["problems"][BAD]
        assert f"site '{BAD}' has no public images, which fedmd needs" in problem
        assert "--public PATH" in problem and 'public = "PATH" in site.toml' in problem
        assert record["clients"] == 2 and list(record["problems"]) == [BAD]
        assert record["accuracy"][BAD[:-2]] != record["accuracy"][BAD[:-2]]  # not measured
    # an image is missing there
    shutil.copytree(public, public.parent / "old-copy")
    (public.parent / "old-copy" / "batch0" / "patient4.png").unlink()
    name_public(sites[BAD], public.parent / "old-copy")
    w.coordinator().run(overwrite=True)
    problem = read_records(w.out / "rounds.jsonl")[0]["problems"][BAD]
    old = PublicImages(f"folder:{public.parent / 'old-copy'}", images=24)
    theirs = public_digest(old, w.run.task)
    assert f"the public images of site '{BAD}' differ from the run's" in problem
    assert f"{describe_digest(theirs)}, not {describe_digest(w.run.facts.public_digest)}" in problem
    assert "29 images (" in problem and "not 30 images (" in problem
    assert problem.endswith("(copy the folder again)") and "/" not in problem
    # a missing folder: the site's log names it, the server learns nothing of it
    shutil.rmtree(public.parent / "old-copy")
    w.coordinator().run(overwrite=True)
    problem = read_records(w.out / "rounds.jsonl")[0]["problems"][BAD]
    assert problem == "error 100: DataMissing; see the site's log"


# ---- sites with folders of their own ------------------------------------------------------------


@pytest.fixture
def founded(tmp_path: Path) -> Any:
    """Three sites with folders, each the only one of its domain; none has public images yet."""
    sites = {"coast-0": CLASSES, "north-0": CLASSES, "south-0": CLASSES[:2]}
    domains = {site: site[:-2] for site in sites}
    init(
        tmp_path / "f", list(sites), classes=list(CLASSES), image_size=16, domains=domains,
        name="pets",
    )  # fmt: skip
    for site, classes in sites.items():
        data = images(tmp_path / "data" / site[:-2], classes, split=site == "coast-0")
        write_site(tmp_path / "f" / "sites" / site, data)
    return read_members(tmp_path / "f" / "server")


def test_sites_with_folders_train_as_the_simulator_does(
    tmp_path: Path, founded: Any, public: Path, grid: Callable[..., Any], single_thread: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    homes = {site: tmp_path / "f" / "sites" / site for site in founded.sites}
    copies(public, homes)
    spec = deploy.plan_run(founded, None, "fedmd", {"images": 20}, {"rounds": 2, **SMALL}, public)
    out = deploy.run_folder(tmp_path / "f" / "server", spec)
    summary = grid(founded, tmp_path / "f" / "sites", pack(spec), out).run()
    records = read_records(out / "rounds.jsonl")
    assert [r["clients"] for r in records] == [3, 3] and summary["public"] == {"folder": 20}
    assert (out / "config.toml").read_text().count('public = "folder:"') == 1
    in_file_order(monkeypatch, summary["clients"])
    options = {"images": 20, "public": f"folder:{public}"}
    oracle = run(
        f"folder:{tmp_path / 'data'}", "fedmd", options=options, image_size=16, rounds=2,
        device="cpu", engine="loop", out=tmp_path / "oracle", **SMALL,
    )  # fmt: skip
    assert oracle.facts["public_digest"] == spec.facts.public_digest
    for site, home in homes.items():
        assert tree.equal(own_model(home, spec.name), {"model": oracle.client_models[site]})
    for mine, other in zip(records, oracle.rounds, strict=True):
        assert mine["loss"] == other["loss"] and mine["bytes_up"] == other["bytes_up"]


def test_glyphs_can_be_the_public_images_of_folders(
    tmp_path: Path, grid: Callable[..., Any], single_thread: None
) -> None:
    """Another task needs no copies where all sites can make or have it."""
    init(tmp_path / "f", ["a", "b"], classes=list(CLASSES))
    for site in "ab":
        data = images(tmp_path / "data" / site, CLASSES)
        write_site(tmp_path / "f" / "sites" / site, data)
    members = read_members(tmp_path / "f" / "server")
    options = {"public": "glyphs", "images": 10}
    spec = deploy.plan_run(members, None, "fedmd", options, {"rounds": 2, **SMALL})
    out = tmp_path / "run"
    grid(members, tmp_path / "f" / "sites", pack(spec), out).run()
    assert [r["clients"] for r in read_records(out / "rounds.jsonl")] == [2, 2]


def test_operator_mistakes_are_errors(tmp_path: Path, founded: Any, public: Path) -> None:
    def plan(
        method: str | None = "fedmd", options: Any = None, folder: Any = None, file: Any = None,
        **more: Any,
    ) -> RunSpec:  # fmt: skip
        settings = {"rounds": 1, **more}
        return deploy.plan_run(founded, file, method, options or {}, settings, folder)

    for options in ({}, {"public": "unused"}, {"public": "north"}):
        with pytest.raises(ProtofedError, match="the sites' own are not public") as error:
            plan(options=options)
        assert "deploy site --public PATH" in error.value.hint
    for given, words in (
        ({"method": "fpl", "folder": public}, "'fpl' uses no public images"),
        ({"options": {"public": "glyphs"}, "folder": public}, "contradicts --set public"),
        ({"options": {"public": "folder:"}}, "needs a folder of public images"),
        ({"options": {"public": "nowhere"}}, "unknown source of public images"),
        ({"folder": tmp_path / "nowhere"}, "there is no folder"),
        ({"options": {"public": "glyphs"}}, "32 pixels, but those of folder:pets have 16"),
    ):
        with pytest.raises(ProtofedError, match=words):
            plan(**given)
    spec = plan(folder=public)
    assert spec.hash == plan(options={"public": f"folder:{public}"}).hash
    # the configuration that a run wrote does not name the folder: the operator does, again
    file = tmp_path / "again.toml"
    file.write_text(unpack(pack(spec)).config.toml())
    assert plan(None, file=file, folder=public).hash == spec.hash
    with pytest.raises(ProtofedError, match="needs a folder of public images"):
        plan(None, file=file)
    (public / "broken.jpg").write_bytes(b"no image")
    with pytest.raises(ProtofedError, match="cannot decode 1 of 31") as error:
        plan(folder=public)
    assert "--skip-bad" in error.value.hint
    assert plan(folder=public, skip_bad=True).hash == spec.hash
    (public / "batch0" / "patient0.png").unlink()  # other images make another run
    assert plan(None, file=file, folder=public, skip_bad=True).hash != spec.hash


def test_the_commands_say_what_they_found(
    tmp_path: Path, founded: Any, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[Any] = []
    monkeypatch.setattr(programs, "join", lambda home, *rest: joined.append(home))
    where = str(tmp_path / "f")
    words = ["deploy", "site", "--dir", where, "--site", "coast-0", "--public"]
    done = CliRunner().invoke(app, [*words, str(public)])
    assert done.exit_code == 0, done.output
    assert joined[0].public == str(public.resolve())
    started: list[Any] = []
    monkeypatch.setattr(deploy, "start", lambda *args, **more: started.append(args) or 7)
    start = ["deploy", "start", "--dir", where, "--method", "fedmd", "--public", str(public)]
    begun = CliRunner().invoke(app, start)
    assert begun.exit_code == 0, begun.output
    shown = describe_digest(started[0][1].facts.public_digest)
    assert f"site coast-0: public folder: {shown}" in done.output  # the same, to compare by eye
    assert f"public: {shown}" in begun.output
    for path, message in ((tmp_path / "nowhere", "there is no folder"), (tmp_path / "f", "decode")):
        wrong = CliRunner().invoke(app, [*words, str(path)])
        assert isinstance(wrong.exception, ProtofedError) and message in str(wrong.exception)
    assert "skip_bad = true in site.toml" in str(wrong.exception)
    assert len(joined) == 1


def test_a_sites_settings_name_the_folder_and_the_option_wins(
    tmp_path: Path, founded: Any, public: Path
) -> None:
    home = tmp_path / "f" / "sites" / "coast-0"
    assert read_site_config(home).public is None
    name_public(home, public)
    assert read_site_config(home).public == str(public)
    assert read_site_config(home, None, "other").public == "other"
    (home / "site.toml").write_text('site = "coast-0"\npublic = 5\n')
    with pytest.raises(ProtofedError, match=r"public in '.*' must be a folder, got 5"):
        read_site_config(home)
