"""The format of a study: what is read, what is refused, and that it is written back."""

import re
import tomllib
from pathlib import Path

import pytest

from protofed.errors import ProtofedError
from protofed.methods import METHODS
from protofed.studies import plan
from protofed.studies.definition import builtin, dumps, load, parse, point_label


def test_rows_sweeps_and_seeds(raw):
    study = parse(
        raw(
            seeds=2,
            rows={"FedAvg": "fedavg", "FPL": {"method": "fpl", "options": {"upcr": 0}}},
            sweep=[{"rows": ["FPL"], "over": {"tau": [0.02, 0.5], "lr": [0.1]}}],
        ),
        "mine",
    )
    assert study.seeds == (0, 1)
    assert study.baseline == "FedAvg"
    assert [line.label for line in study.lines] == [
        "FedAvg", "FPL, tau=0.02, lr=0.1", "FPL, tau=0.5, lr=0.1",
    ]  # fmt: skip
    # tau is the method's, lr is a setting
    swept = study.lines[1].row
    assert swept.options == {"upcr": 0, "tau": 0.02}
    assert swept.settings == {"lr": 0.1}
    assert len(plan.cells(study)) == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"titel": "x"}, ["'titel'", "title"]),
        ({"kind": "tabel"}, ["'tabel'", "table"]),
        ({"rows": {}}, ["[rows]"]),
        ({"tasks": {}}, ["[tasks]"]),
        ({"rows": {"A": {"options": {}}}}, ["row A", "method"]),
        ({"rows": {"A": {"method": "fpl", "option": {}}}}, ["'option'", "options"]),
        ({"rows": {"A": {"method": "fpl", "options": {"tao": 1}}}}, ["'tao'", "tau"]),
        ({"rows": {"A": {"method": "fpl", "options": {"tau": 0}}}}, ["tau", "above 0"]),
        ({"tasks": {"glyphs": {"round": 1}}}, ["'round'", "rounds"]),
        ({"settings": {"seed": 1}}, ["'seed'"]),
        ({"seeds": 0}, ["seeds"]),
        ({"seeds": [0, -1]}, ["seeds"]),
        ({"baseline": "FedAvgg"}, ["'FedAvgg'", "FedAvg"]),
        ({"sweep": [{"over": {"tau": [0.1]}, "rows": ["FLP"]}]}, ["'FLP'", "FPL"]),
        ({"sweep": [{"over": {"tao": [0.1]}, "rows": ["FPL"]}]}, ["'tao'", "tau"]),
        ({"sweep": [{"over": {"tau": 0.1}, "rows": ["FPL"]}]}, ["tau", "list"]),
        ({"sweep": [{"over": {"tau": [-1]}, "rows": ["FPL"]}]}, ["tau", "above 0"]),
        ({"printed": {"digits": {"FPL": 1.0}}}, ["'digits'", "glyphs"]),
        ({"printed": {"glyphs": {"FLP": 1.0}}}, ["'FLP'", "FPL"]),
        ({"printed": {"glyphs": {"columns": ["a", "average"], "FPL": [1.0]}}}, ["2 numbers"]),
        ({"override": {"round": 3}}, ["'round'"]),
        ({"notes": "one"}, ["notes", "list"]),
    ],
)
def test_what_is_wrong_is_refused_by_name(raw, change, words):
    with pytest.raises(ProtofedError) as caught:
        parse(raw(**change), "mine")
    for word in ["study 'mine'", *words]:
        assert word in str(caught.value)


def test_files(tmp_path, raw):
    with pytest.raises(ProtofedError, match="fpl-table2"):
        load("fpl-tabel2")
    with pytest.raises(ProtofedError, match="cannot read"):
        load(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("title = ")
    with pytest.raises(ProtofedError, match="not valid TOML"):
        load(str(tmp_path / "bad.toml"))
    (tmp_path / "good.toml").write_text(dumps(raw()))
    assert load(str(tmp_path / "good.toml")).name == "good"


@pytest.mark.parametrize("name", builtin())
def test_every_built_in_study_is_read_and_written_back(name):
    study = load(name)
    again = parse(tomllib.loads(study.toml()), "other")
    assert again.name == name
    assert repr(again.lines) == repr(study.lines)
    assert repr(again.printed) == repr(study.printed)  # repr: nan is not equal to itself
    assert [c.key for c in plan.cells(again)] == [c.key for c in plan.cells(study)]
    assert study.title
    assert study.paper


def test_what_this_version_lacks_is_said(raw):
    rows = {"FedAvg": "fedavg", "New": {"method": "fednew", "options": {"x": 1}}}
    study = parse(raw(rows=rows), "mine")
    assert study.missing == ()
    assert study.missing_rows == {"New": "needs method fednew, which this version does not have"}
    assert "fednew" in parse(raw(rows={"New": "fednew"}), "mine").missing[0]
    for name in builtin():
        for row in load(name).rows.values():
            assert bool(row.missing) == (row.method not in METHODS)


def test_different_models_stay_on_another_task():
    """They are what the study is about; one model for all belongs to the task."""
    study = load("fedseproto-table3").overridden("glyphs", {"rounds": 2, "device": "cpu"})
    for cell in plan.cells(study):
        config = cell.config()
        assert config.models == ("cnn3", "cnn2")
        assert config.method.evaluates == "everyone"
        assert config.width == 16  # of the task's own protocol
    one = parse({**load("fedseproto-table3").raw, "settings": {"model": "cnn3"}}, "one")
    assert all("model" not in c.settings for c in plan.cells(one.overridden("glyphs")))


def test_another_task_in_place_of_the_study_s(raw):
    study = load("i2pfl-table7").overridden("glyphs", {"rounds": 2})
    (task,) = plan.study_tasks(study)
    assert (task.name, dict(task.settings)) == ("glyphs", {"clients": "equal"})
    cell = plan.cells(study)[0]
    config = cell.config()
    assert (config.task, config.protocol, config.rounds) == ("glyphs", "glyphs", 2)
    assert set(config.clients.values()) == {3}  # ten clients, as many for each domain
    # a distribution that only the papers' tasks have is the task's own there
    other = load("fedseproto-table1").overridden("glyphs")
    assert plan.cells(other)[0].config().clients["scan"] == 4
    # domains stand for domains in their order
    alone = load("fpl-fig1").overridden("glyphs")
    clients = [c.config().clients for c in plan.cells(alone) if c.seed == 0]
    assert clients[0] == {"scan": 1}
    assert clients[3] == {"inverse": 1}
    assert len(clients[4]) == 4


def test_a_domain_left_out_is_a_run_for_each_domain(raw):
    study = parse(raw(tasks={"glyphs": {"leave_out": "each"}}, seeds=1), "mine")
    unseen = [c.unseen for c in plan.cells(study) if c.line.label == "FPL"]
    assert unseen == ["scan", "print", "photo", "inverse"]


def test_tasks_rows_and_seeds_can_be_chosen():
    study = load("i2pfl-table2")
    chosen = plan.Selection(tasks=("pacs",), rows=("fedavg", "I2PFL"), seeds=(4,))
    cells = plan.cells(study, chosen)
    assert {(c.task, c.line.label, c.seed) for c in cells} == {
        ("pacs", "FedAvg", 4), ("pacs", "I2PFL", 4),
    }  # fmt: skip
    with pytest.raises(ProtofedError, match="pacs"):
        plan.cells(study, plan.Selection(tasks=("pcas",)))
    with pytest.raises(ProtofedError, match="FedProto"):
        plan.cells(study, plan.Selection(rows=("FedPrto",)))


def test_the_key_of_a_cell_stands_for_what_can_change_a_number(raw):
    def key(**change):
        return plan.cells(parse(raw(**change), "mine"))[0].key

    base = key()
    assert key(title="another") == base
    settings = raw()["settings"]
    assert key(settings={**settings, "data": "/elsewhere", "workers": 3}) == base
    assert key(settings={**settings, "lr": 0.5}) != base
    assert key(rows={"FedAvg": "fedprox"}) != base


def test_labels_of_points():
    assert point_label("FPL", {"tau": 0.02, "norm": "group"}) == "FPL, tau=0.02, norm=group"


def test_the_example_in_the_documentation_is_a_study(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "studies.md").read_text()
    example = re.search(r"```toml\n(.*?)```", text, re.DOTALL).group(1)
    method = '"""Mine."""\nfrom dataclasses import dataclass\nfrom protofed.methods import Method\n'
    method += "\n@dataclass(frozen=True)\nclass Mine(Method):\n    pass\n"
    (tmp_path / "mymethod.py").write_text(method)
    (tmp_path / "mine.toml").write_text(example)
    monkeypatch.chdir(tmp_path)
    study = load("mine.toml")
    # FPL at three values, and three rows more; one task as it is, one with four domains left out
    assert len(plan.cells(study)) == 5 * 6 * (1 + 4)
    assert study.printed["glyphs"]["Mine"].std == 0.4


def test_a_study_like_another_takes_what_it_does_not_give(tmp_path):
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
def test_a_study_like_another_may_have_other_rows_and_tasks(like, text, tmp_path):
    """What the other says of rows and tasks that are not there is left out."""
    path = tmp_path / "mine.toml"
    path.write_text(f'like = "{like}"\n{text}')
    study, other = load(str(path)), load(like)
    labels = {line.label for line in study.lines} | set(study.rows)
    for task, printed in study.printed.items():
        assert task in study.tasks and printed.keys() <= labels
        assert all(printed[label] == other.printed[task][label] for label in printed)
    plan.check_domains(study, plan.cells(study))
    again = parse(tomllib.loads(study.toml()), "mine")
    assert (again.lines, again.printed, again.tsne) == (study.lines, study.printed, study.tsne)
