"""The format of a study: what is read, what is refused, and that it is written back."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.studies.made_runs import TINY, raw, study

from protofed.errors import ProtofedError
from protofed.methods import METHODS, method_class
from protofed.studies.definition import FolderImages, builtin, load, parse, point_label
from protofed.studies.plan import Selection, check_domains, plan


def test_rows_sweeps_and_seeds() -> None:
    made = study(
        seeds=2,
        rows={"FedAvg": "fedavg", "FPL": {"method": "fpl", "options": {"upcr": 0}}},
        sweep=[{"rows": ["FPL"], "over": {"tau": [0.02, 0.5], "lr": [0.1]}}],
    )
    assert made.seeds == (0, 1)
    assert made.baseline == "FedAvg"
    assert [line.label for line in made.lines] == [
        "FedAvg", "FPL, tau=0.02, lr=0.1", "FPL, tau=0.5, lr=0.1",
    ]  # fmt: skip
    # tau is the method's, lr is a setting
    swept = made.lines[1].row
    assert swept.options == {"upcr": 0, "tau": 0.02}
    assert swept.settings == {"lr": 0.1}
    assert len(plan(made)) == 6


def factorial(**generators: Any) -> dict[str, Any]:
    over = {"tau": [0.1, 0.2], "lr": [0.1, 0.2], "upcr": [0, 1], "cpcl": [0, 1]}
    return {"sweep": [{"over": over, "rows": ["FPL"], "generators": generators}]}


def test_generators_take_a_fraction_of_the_grid() -> None:
    made = study(**factorial(cpcl=["tau", "lr", "upcr"]))
    points = [line.point for line in made.lines if line.sweep is not None]
    assert len(points) == 8
    assert points[0] == {"tau": 0.1, "lr": 0.1, "upcr": 0, "cpcl": 0}
    assert points[1] == {"tau": 0.1, "lr": 0.1, "upcr": 1, "cpcl": 1}


ROW = {"FedAvg": "fedavg"}
BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"titel": "x"}, ["'titel'", "title"]),
    ({"name": "../mine"}, ["name cannot be that of a folder"]),
    ({"name": "/tmp/mine"}, ["name cannot be that of a folder"]),
    ({"name": ""}, ["name cannot be that of a folder"]),
    ({"lick": "fpl-table2"}, ["'lick'", "did you mean like"]),
    ({"kind": "tabel"}, ["'tabel'", "table"]),
    ({"kind": "banana"}, ["'banana'", "valid: bars, curves, differences, sweep"]),
    ({"rows": {}}, ["[rows]"]),
    ({"rows": {"a\nb": "fedavg"}}, ["[rows] has an unprintable name", "a\\nb"]),
    ({"tasks": {"a\x08": {"task": "glyphs"}}}, ["[tasks] has an unprintable name"]),
    ({"tasks": {}}, ["[tasks]"]),
    ({"tasks": {"glyphs": {"task": 3}}}, ["task must be text"]),
    ({"tasks": {"glyphs": {"round": 1}}}, ["'round'", "rounds"]),
    ({"rows": {"A": {"options": {}}}}, ["row A", "method"]),
    ({"rows": {"A": {"method": "fpl", "option": {}}}}, ["'option'", "options"]),
    ({"rows": {"A": {"method": "fpl", "options": {"tao": 1}}}}, ["'tao'", "tau"]),
    ({"rows": {"A": {"method": "fpl", "options": {"tau": 0}}}}, ["tau", "above 0"]),
    ({"settings": {"seed": 1}}, ["'seed'"]),
    ({"seeds": 0}, ["seeds"]),
    ({"seeds": [0, -1]}, ["seeds"]),
    ({"seeds": 10**11}, ["seeds must be"]),
    ({"baseline": "FedAvgg"}, ["'FedAvgg'", "FedAvg"]),
    ({"baseline": []}, ["baseline"]),
    ({"sweep": [{"over": {"tau": [0.1]}, "rows": ["FLP"]}]}, ["'FLP'", "FPL"]),
    ({"sweep": [{"over": {"tao": [0.1]}, "rows": ["FPL"]}]}, ["'tao'", "tau"]),
    ({"sweep": [{"over": {"seed": [0, 1]}, "rows": ["FPL"]}]}, ["seed is not swept", "--seeds"]),
    ({"sweep": [{"over": {"tau": 0.1}, "rows": ["FPL"]}]}, ["tau", "list"]),
    ({"sweep": [{"over": {"tau": [-1]}, "rows": ["FPL"]}]}, ["tau", "above 0"]),
    (
        {"rows": ROW, "sweep": [{"over": {"lr": [0.01, 0.02]}}, {"over": {"lr": [0.02, 0.03]}}]},
        ["2 lines are called 'FedAvg, lr="],
    ),
    ({"rows": ROW, "sweep": [{"over": {"lr": [0.0100000001, 0.01]}}]}, ["2 lines are called"]),
    (factorial(tau=["upcr", "cpcl"], lr=["upcr", "cpcl"]), ["same parameters"]),
    (factorial(tau=["lr"]), ["generator of tau", "two other"]),
    (factorial(tau=["lr", "lr"]), ["generator of tau", "each once"]),
    (factorial(tau=["tau", "lr"]), ["'tau'", "generator of tau"]),
    (factorial(tao=["lr", "upcr"]), ["'tao'", "tau"]),
    (factorial(tau="lr"), ["tau must be a list"]),
    (
        {"sweep": [{"over": {"tau": [0.1, 0.2]}, "rows": ["FPL"], "generators": {"tau": ["lr"]}}]},
        ["three parameters"],
    ),
    ({"printed": {"digits": {"FPL": 1.0}}}, ["'digits'", "glyphs"]),
    ({"printed": {"glyphs": {"FLP": 1.0}}}, ["'FLP'", "FPL"]),
    ({"printed": {"glyphs": {"FedAvg": [1.0, 2.0]}}}, ["[printed.glyphs] has no columns", "write"]),
    ({"printed": {"glyphs": {"columns": ["a", "average"], "FPL": [1.0]}}}, ["2 numbers"]),
    ({"printed": {"glyphs": {"columns": [], "FPL": {"values": 1.0, "std": "x"}}}}, ["std"]),
    ({"override": {"round": 3}}, ["'round'"]),
    ({"override": {"on": 3}}, ["on must be text"]),
    ({"notes": "one"}, ["notes", "list"]),
    ({"notes": [1]}, ["list of texts"]),
    ({"tsne": {"domains": "scan"}}, ["list of texts"]),
    ({"tsne": {"rounds": [0]}}, ["rounds in [tsne] must be"]),
    ({"tsne": {"rounds": ["last"]}}, ["rounds in [tsne] must be"]),
    ({"images": {"folder:pets": {"digest": "x"}}}, ["'digest'", "digests"]),
]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_what_is_wrong_is_refused_by_name(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ProtofedError) as caught:
        study(**change)
    for word in ["study 'mine'", *words]:
        assert word in str(caught.value)


def test_a_value_that_is_given_twice_counts_once() -> None:
    made = study(rows=ROW, sweep=[{"over": {"lr": [0.01, 0.01]}}])
    assert [line.label for line in made.lines] == ["FedAvg, lr=0.01"]


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ProtofedError, match="fpl-table2"):
        load("fpl-tabel2")
    with pytest.raises(ProtofedError, match="cannot read"):
        load(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("title = ")
    with pytest.raises(ProtofedError, match="not valid TOML"):
        load(str(tmp_path / "bad.toml"))
    (tmp_path / "new.toml").write_text("format = 3\n")
    with pytest.raises(ProtofedError, match="newer version"):
        load(str(tmp_path / "new.toml"))
    # some editors begin a file with a mark
    (tmp_path / "good.toml").write_text(study().toml(), "utf-8-sig")
    assert load(str(tmp_path / "good.toml")).name == "mine"
    (tmp_path / "good.toml").write_text('[tasks.glyphs]\n[rows]\nFPL = "fpl"\n')
    assert load(str(tmp_path / "good.toml")).name == "good"


@pytest.mark.parametrize("name", builtin())
def test_every_built_in_study_is_read_and_written_back(name: str) -> None:
    made = load(name)
    content = tomllib.loads(made.toml())
    assert content.pop("format") == 2
    again = parse(content, "other")
    assert again.name == name
    assert repr(again.lines) == repr(made.lines)
    assert repr(again.printed) == repr(made.printed)  # repr: nan is not equal to itself
    assert again.hash == made.hash
    assert made.title
    assert made.paper
    check_domains(made, Selection())  # its columns are domains of its tasks


def test_what_this_version_lacks_is_said() -> None:
    rows = {"FedAvg": "fedavg", "New": {"method": "fednew", "options": {"x": 1}}}
    made = study(rows=rows)
    assert made.missing == ()
    assert made.missing_rows == {"New": "needs method fednew, which this version does not have"}
    assert "fednew" in study(rows={"New": "fednew"}).missing[0]
    for name in builtin():
        for row in load(name).rows.values():
            assert bool(row.missing) == (row.method not in METHODS)


def test_the_hash_stands_for_what_is_asked_for() -> None:
    base = study().hash
    for same in ({"seeds": 7}, {"title": "another"}, {"notes": ["n"]}, {"paper": "p"}):
        assert study(**same).hash == base, same
    # where things are, and how fast, is not asked for
    for name, value in (("data", "/elsewhere"), ("workers", 3), ("engine", "loop")):
        assert study(settings={**TINY, name: value}).hash == base
        assert study().overridden(settings={name: value}).hash == base
    changed = [
        study(rows={"FedAvg": "fedprox"}),
        study(settings={**TINY, "lr": 0.5}),
        study().overridden(settings={"lr": 0.5}),
        study().overridden(settings={"device": "cuda"}),  # the table is then of other runs
        study().overridden(options={"fpl": {"tau": 0.5}}),
        study().overridden("digits"),
    ]
    assert len({base, *(made.hash for made in changed)}) == 7
    assert [made.is_changed for made in changed] == [False, False, True, True, True, False]
    assert not study().overridden(settings={"workers": 3}).is_changed


def test_what_the_command_line_changes_adds_up() -> None:
    made = study().overridden(settings={"lr": 0.5}, options={"fpl": {"tau": 0.5}})
    made = made.overridden(settings={"rounds": 2}, options={"fpl": {"upcr": 0}})
    assert made.override["settings"] == {"lr": 0.5, "rounds": 2}
    assert made.rows["FPL"].options == {"tau": 0.5, "upcr": 0}
    assert made.rows["FedAvg"].options == {}
    again = parse({k: v for k, v in tomllib.loads(made.toml()).items() if k != "format"}, "x")
    assert (again.rows, again.override) == (made.rows, made.override)
    with pytest.raises(ProtofedError, match="'moon'"):
        study().overridden(options={"moon": {"mu": 1}})


def test_a_row_a_sweep_and_the_command_line_may_give_a_reading() -> None:
    made = study(
        rows={
            "printed": {"method": "fpl", "options": {"reading": "printed"}},
            "its own": {"method": "fpl", "options": {"proto_pass": "last_epoch"}},
            "swept": "fpl",
        },
        sweep=[{"rows": ["swept"], "over": {"reading": ["published", "printed"]}}],
    )
    first = Selection(seeds=(0,))
    levels = {run.line.label: run.config.method for run in plan(made, first)}
    printed = METHODS["fpl"].create({"reading": "printed"})
    assert levels == {
        "printed": printed,
        "its own": METHODS["fpl"](),
        "swept, reading=published": METHODS["fpl"](),
        "swept, reading=printed": printed,
    }
    changed = made.overridden(options={"fpl": {"reading": "printed"}})
    own = {run.line.label: run.config.method for run in plan(changed, first)}["its own"]
    assert own == printed.with_options(proto_pass="last_epoch")  # what a row is about stays


def test_what_a_folder_of_images_held_is_written_down() -> None:
    found = {"folder:my pets": FolderImages(("cat show", "street"), ("abc", "def"))}
    made = study(tasks={"pets": {"task": "folder:my pets"}}).with_images(found)
    again = parse({k: v for k, v in tomllib.loads(made.toml()).items() if k != "format"}, "x")
    assert again.images == found
    assert again.digests("folder:my pets") == ("abc", "def")
    assert again.digests("glyphs") == ()
    assert made.hash == study(tasks={"pets": {"task": "folder:my pets"}}).hash


def test_labels_of_points() -> None:
    assert point_label("FPL", {"tau": 0.02, "norm": "group"}) == "FPL, tau=0.02, norm=group"


def test_the_example_in_the_documentation_is_a_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "studies.md").read_text()
    example = re.search(r"mine.toml -->\n```toml\n(.*?)```", text, re.DOTALL)
    assert example is not None
    shutil.copytree(Path(__file__).parents[2] / "examples", tmp_path / "examples")
    (tmp_path / "mine.toml").write_text(example.group(1))
    monkeypatch.chdir(tmp_path)
    method_class(
        "examples/cosine_proto.py:CosineProto"
    )  # a study's own code is executed only if it is trusted
    made = load("mine.toml")
    # FPL at three values, and three rows more; one task as it is, one with four domains left out
    assert len(plan(made)) == 5 * 6 * (1 + 4)
    assert made.printed["glyphs"]["Cosine"].std == 0.4


def test_a_study_like_another_takes_what_it_does_not_give(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('like = "fpl-table2"\ntitle = "ours"\nseeds = 1\n')
    mine, theirs = load(str(file)), load("fpl-table2")
    assert (mine.title, mine.seeds) == ("ours", (0,))
    assert (mine.rows, mine.printed, mine.tasks) == (theirs.rows, theirs.printed, theirs.tasks)
    file.with_name("again.toml").write_text(mine.toml())  # as a study's folder has it
    assert load(str(file.with_name("again.toml"))).rows == theirs.rows
    file.write_text('like = "fpl-tabel2"\n')
    with pytest.raises(ProtofedError, match=r"like of study 'mine': 'fpl-tabel2'.*fpl-table2"):
        load(str(file))


@pytest.mark.parametrize(("like", "text"), [
    ("fpl-table2", "[tasks.glyphs]\n"),
    ("fpl-table2", '[rows]\nFedAvg = "fedavg"\nMine = "fpl"\n'),
    ("fpl-fig4", '[[sweep]]\nrows = ["FPL"]\nover = {tau = [0.3]}\n'),
    ("fpl-fig4", '[rows]\nFedAvg = "fedavg"\n'),
    ("i2pfl-fig4", "[tasks.glyphs]\n"),
    ("i2pfl-table4", '[rows]\nPlain = "fedavg"\n'),
])  # fmt: skip
def test_a_study_like_another_may_have_other_rows_and_tasks(
    like: str, text: str, tmp_path: Path
) -> None:
    """What the other says of rows and tasks that are not there is left out."""
    path = tmp_path / "mine.toml"
    path.write_text(f'like = "{like}"\n{text}')
    made, other = load(str(path)), load(like)
    labels = {line.label for line in made.lines} | set(made.rows)
    for task, printed in made.printed.items():
        assert task in made.tasks and printed.keys() <= labels
        assert all(printed[label] == other.printed[task][label] for label in printed)
    check_domains(made, Selection())
    path.write_text(made.toml())
    again = load(str(path))
    assert (again.lines, again.printed, again.tsne) == (made.lines, made.printed, made.tsne)


def test_a_study_is_plain_data() -> None:
    assert parse(raw(), "mine") == study()


def test_a_task_may_have_rows_and_seeds_of_its_own() -> None:
    own = {"task": "glyphs", "lr": 0.02, "rows": ["FPL"], "seeds": [5]}
    made = study(tasks={"glyphs": {}, "more": own})
    runs = [(run.task, run.line.label, run.seed) for run in plan(made)]
    assert runs == [
        ("glyphs", "FedAvg", 0), ("glyphs", "FPL", 0), ("glyphs", "FedAvg", 1),
        ("glyphs", "FPL", 1), ("more", "FPL", 5),
    ]  # fmt: skip
    # which seeds are run is no part of what is asked for, which rows are is
    assert made.hash == made.with_seeds({"more": [5, 6]}).hash == made.with_seeds([7]).hash
    other = study(tasks={"glyphs": {}, "more": {**own, "rows": ["FedAvg", "FPL"]}})
    assert made.hash != other.hash
    with pytest.raises(ProtofedError, match="row of task more"):
        study(tasks={"more": {**own, "rows": ["FPLL"]}})


def test_seeds_are_given_to_all_tasks_or_to_some() -> None:
    made = study(tasks={"glyphs": {}, "more": {"task": "glyphs", "lr": 0.02, "seeds": 3}})
    glyphs, more = made.tasks.values()
    assert (made.seeds_on(glyphs), made.seeds_on(more)) == ((0, 1), (0, 1, 2))
    ten = made.with_seeds({"more": range(10)})
    assert [len(ten.seeds_on(t)) for t in ten.tasks.values()] == [2, 10]
    same = ten.with_seeds([4])
    assert [same.seeds_on(t) for t in same.tasks.values()] == [(4,), (4,)]
    assert "seeds" not in same.raw["tasks"]["more"]
    # a study whose seeds start elsewhere never gets seed 0
    assert made.with_seeds([100, 101]).first_seeds(1, glyphs) == (100,)
    assert made.with_seeds([100, 101]).first_seeds(4, glyphs) == (100, 101, 102, 103)


def test_the_last_rounds_are_a_number() -> None:
    assert study().last_rounds == 5
    assert study(last_rounds=1).hash == study().hash  # the same runs
    for wrong in (0, -1, 1.5, True, "1"):
        with pytest.raises(ProtofedError, match="last_rounds"):
            study(last_rounds=wrong)
