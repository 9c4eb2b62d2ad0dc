"""``protofed study``: list, show, run, table, pack."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.commands import TINY, Done
from tests.studies.in_process import run_in_process, start_nothing
from tests.studies.made_runs import make_runs, make_study, raw, study

from protofed.runs.pool import PACKED
from protofed.studies import launch
from protofed.studies.definition import builtin, parse
from protofed.studies.execution import Job
from protofed.studies.folder import StudyFolder

Protofed = Callable[..., Done]


pytestmark = pytest.mark.usefixtures("no_drawing")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The runs that a study would do."""
    found: list[Job] = []
    monkeypatch.setattr("protofed.api.run_all", lambda jobs, *_: found.extend(jobs))
    monkeypatch.setattr("protofed.studies.execution.raise_failures", lambda _: None)
    return found


# ---- list, show ---------------------------------------------------------------------------------


def test_list_names_all_and_needs_no_images(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROTOFED_DATA", "nowhere")
    monkeypatch.setenv("PROTOFED_CACHE", "nowhere either")
    code, out, _ = protofed("study", "list")
    assert code == 0
    for name in ("fpl-table2", "i2pfl-fig11", "fedseproto-table3"):
        assert re.search(rf"^\s*{name}\b", out, re.M)
    assert not Path("nowhere either").exists()


def test_show_has_the_paper_s_numbers_and_the_notes(protofed: Protofed) -> None:
    code, out, _ = protofed("study", "show", "fpl-table2")
    assert code == 0
    plain = " ".join(out.split())
    for part in ("FPL 98.31 92.71 80.27 61.20 83.12 61.20 14.24 +2.98", "variant=reference",
                 "6/4/3/7", "48 runs in all"):  # fmt: skip
        assert part in plain
    assert "tau = 0.01, 0.02" in protofed("study", "show", "fpl-fig4").out
    code, _, err = protofed("study", "show", "fpl-table9")
    assert (code, err.count("\n")) == (2, 1)


# ---- run ----------------------------------------------------------------------------------------


def test_runs_that_are_there_are_not_done_again(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_runs(study(), Path("runs"))
    Path("mine.toml").write_text(study().toml())
    start_nothing(monkeypatch)
    code, out, err = protofed("study", "run", "mine.toml")
    assert (code, err) == (0, "")
    assert "4 of 4 runs are already complete" in out
    assert "table.md, table.csv, table.tex, curves.png are in runs/mine, the runs in runs" in (
        " ".join(out.split())
    )
    assert Path("runs/mine/table.tex").is_file()
    # nor for another study, wherever its tables are
    code, out, _ = protofed("study", "run", "mine.toml", "--out", "other", "--methods", "fpl")
    assert code == 0
    assert "2 of 2 runs are already complete" in out
    assert [p for p in Path("other").iterdir() if p.is_dir()] == []
    assert "40.5" in out


def test_more_seeds_and_other_tasks_leave_what_is_there(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = study(tasks={"glyphs": {}, "more": {"task": "glyphs", "lr": 0.02}})
    make_runs(made, Path("runs"))
    Path("mine.toml").write_text(made.toml())
    start_nothing(monkeypatch)
    assert protofed("study", "run", "mine.toml").code == 0
    code, out, err = protofed("study", "run", "mine.toml", "--tasks", "more", "--seeds", "1")
    assert (code, err) == (0, "")
    assert "2 of 2 runs are already complete" in out
    assert StudyFolder.open(Path("runs/mine")).study.seeds == (0, 1)
    assert Path("runs/mine/table.md").read_text().count("40.5 ± 0.7") == 12


def write_two_studies() -> None:
    """Both have FPL: its runs are the same."""
    Path("mine.toml").write_text(study().toml())
    other = study(rows={"Ours": "fpl", "FedProto": "fedproto"}, title="Two others")
    Path("other.toml").write_text(replace(other, name="other").toml())


def test_several_studies_are_run_as_one(protofed: Protofed, asked: list[Job]) -> None:
    write_two_studies()
    assert protofed("study", "run", "mine.toml", "other.toml", "mine.toml").code == 0
    assert [job.name for job in asked] == [
        "mine: FedAvg seed 0", "mine: FPL seed 0", "mine: FedAvg seed 1", "mine: FPL seed 1",
        "other: FedProto seed 0", "other: FedProto seed 1",
    ]  # fmt: skip
    assert {p.name for p in Path("runs").iterdir()} == {"mine", "other"}


def test_several_studies_have_tables_of_their_own(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_two_studies()
    start_nothing(monkeypatch)
    make_runs(study(), Path("runs"))
    make_runs(study(rows={"FedProto": "fedproto"}), Path("runs"))
    code, out, err = protofed("study", "run", "mine.toml", "other.toml", "--methods", "fpl")
    assert (code, err) == (0, "")
    assert "2 of 2 runs are already complete" in out
    assert out.index("Two methods") < out.index("runs/mine") < out.index("Two others")
    for name, row in (("mine", "FPL"), ("other", "Ours")):
        assert f"{row} " in Path("runs", name, "table.md").read_text()
        assert f"are in runs/{name}," in " ".join(out.split())


def test_one_failed_run_of_several_studies_is_named_once(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_two_studies()
    runs = make_runs(study(), Path("runs"))
    make_runs(study(rows={"FedProto": "fedproto"}), Path("runs"))
    (runs["FPL", 1] / "summary.json").unlink()
    (runs["FPL", 1] / "diverged.txt").write_text("the loss is nan\n")
    code, _, err = protofed("study", "run", "mine.toml", "other.toml")
    assert code == 2
    assert err.count("mine: FPL seed 1 failed: the loss is nan") == err.count("FPL") == 1
    assert Path("runs/mine/table.md").is_file() and Path("runs/other/table.md").is_file()


def test_what_is_wrong_with_one_of_several_studies_is_said_before_anything_runs(
    protofed: Protofed, asked: list[Job]
) -> None:
    write_two_studies()
    for wrong, words in {
        ("mine.toml", "fpl-table9"): "fpl-table9",
        ("mine.toml", "other.toml", "--methods", "fedavg"): "of this study 'fedavg'",
        ("mine.toml", "other.toml", "--out", "here"): "--out is the folder of one study",
    }.items():
        code, _, err = protofed("study", "run", *wrong)
        assert (code, err.count("\n")) == (2, 1) and words in err
    assert not asked and not Path("runs").exists() and not Path("here").exists()


def test_settings_and_hyper_parameters_reach_the_runs(protofed: Protofed, asked: list[Job]) -> None:
    args = ["study", "run", "fpl-table2", "--on", "glyphs", "--rounds", 3, "--seeds", 2]
    given = ["--device", "cpu", "--precision", "fp64", "--clients", "scan=2,photo=1"]
    code, _, err = protofed(*args, *given, "--set", "fpl.tau=0.5", "--jobs", "8")
    assert (code, err) == (0, "")
    assert len(asked) == 16
    for job in asked:
        config = job.config
        assert (config.device, config.precision, config.rounds) == ("cpu", "fp64", 3)
        assert config.domain_clients == {"scan": 2, "photo": 1}
        assert 'precision = "fp64"' in config.toml()  # which is what a run's process gets
        if config.method.name == "fpl":
            assert config.method.options()["tau"] == 0.5
    (folder,) = Path("runs").iterdir()
    assert re.fullmatch(r"fpl-table2-on-glyphs-[0-9a-f]{10}", folder.name)
    saved = StudyFolder.open(folder).study
    assert saved.override["on"] == "glyphs" and saved.seeds == (0, 1)
    assert saved.override["options"] == {"fpl": {"tau": 0.5}}


def test_the_folder_of_a_study_is_named_by_what_is_changed(
    protofed: Protofed, asked: list[Job]
) -> None:
    Path("mine.toml").write_text(study(seeds=1).toml())

    def folders(*given: object) -> list[str]:
        done = protofed("study", "run", "mine.toml", "--runs", "pool", *given)
        assert done.code == 0, done.err
        return sorted(p.name for p in Path("pool").iterdir())

    assert folders() == ["mine"]
    # what changes neither a number nor the runs that are taken is the same study
    assert folders("--workers", 1, "--engine", "loop", "--data", "elsewhere") == ["mine"]
    assert folders("--on", "glyphs") == ["mine", "mine-on-glyphs"]
    *_, changed = folders("--lr", 0.5)
    assert re.fullmatch(r"mine-[0-9a-f]{10}|mine-on-glyphs", changed)
    assert len(folders("--lr", 0.5)) == 3
    assert len(folders("--set", "fpl.tau=0.5")) == 4
    assert len(folders("--lr", 0.5, "--out", "elsewhere")) == 4


def test_what_is_under_way_has_a_table(protofed: Protofed, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("protofed.api.run_all", interrupted)
    Path("mine.toml").write_text(study().toml())
    done = protofed("study", "run", "mine.toml")
    assert done.code == 130 and "the same command resumes" in done.err
    make_runs(study(), Path("runs"), skip={("FPL", 1)})
    assert re.search(r"FPL.*1/2", protofed("study", "table", "mine").out)


def test_a_small_study_with_real_runs(protofed: Protofed, monkeypatch: pytest.MonkeyPatch) -> None:
    started = run_in_process(monkeypatch)
    args = ["study", "run", "fpl-table1", "--on", "glyphs", "--methods", "neither (FedAvg)",
            "--seeds", 1, *TINY]  # fmt: skip
    code, out, err = protofed(*args)
    assert (code, err) == (0, "")
    assert len(started) == 1
    assert "3 of 4 rows were not run: " in out and "both (FPL)." in " ".join(out.split())
    (folder,) = Path("runs").glob("fpl-table1-on-glyphs-*")
    assert StudyFolder.open(folder).study.override["settings"]["samples"] == 10


@pytest.mark.slow
def test_every_study_runs_on_glyphs(protofed: Protofed, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_process(monkeypatch)
    for name in builtin():
        some = ("--methods", "fedavg") if name == "robust" else ()  # it has 135 runs a seed
        args = ("study", "run", name, "--on", "glyphs", "--seeds", 1, *TINY, *some)
        code, _, err = protofed(*args, "--out", f"runs/{name}")
        assert (code, err) == (0, ""), name
        assert protofed("study", "pack", name, "--to", f"results/{name}", "--images", 0).code == 0
        assert protofed("study", "table", f"results/{name}").code == 0
    table = Path("results/switches/table.md").read_text("utf-8")
    assert "| average: samples → uniform | " in table and "FPL: 16 of 64 settings" in table


def test_show_says_that_settings_are_a_fraction(protofed: Protofed) -> None:
    out = " ".join(protofed("study", "show", "switches").out.split())
    assert "batch = 64, 32 (of FPL; 16 of the settings)" in out


@pytest.mark.parametrize(
    ("given", "most", "mps"),
    [
        ((), None, None),
        (("--jobs", "auto", "--mps"), None, True),
        (("--jobs", 3, "--no-mps"), 3, False),
    ],
)
def test_runs_on_a_gpu_share_it(
    protofed: Protofed,
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[object, ...],
    most: int | None,
    mps: bool | None,
) -> None:
    runners: list[tuple[object, ...]] = []

    def runner(todo: list[Job], console: object, *asked: object) -> None:
        runners.append((len(todo), *asked))

    found = launch.discover
    monkeypatch.setattr(launch, "discover", lambda *args: replace(found(*args), device="cuda"))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1 << 36, 1 << 36))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: 0)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: 0)
    monkeypatch.setattr("protofed.api.GpuRunner", runner)
    monkeypatch.setattr("protofed.api.run_all", lambda *_: [])
    args = ["study", "run", "fpl-table1", "--on", "glyphs", "--seeds", 1, *TINY]
    assert protofed(*args, *given).code == 0
    assert runners == [(4, most, mps)]


BAD: dict[str, tuple[list[str], list[str]]] = {
    "no such study": (["fpl-tabel2"], ["fpl-table2"]),
    "no such task": (["fpl-table2", "--tasks", "pacs"], ["'pacs'"]),
    "no such row": (["fpl-table2", "--methods", "fedprotto"], ["fedproto"]),
    "seeds 0": (["fpl-table2", "--on", "glyphs", "--seeds", "0"], ["--seeds"]),
    "jobs 0": (["fpl-table2", "--on", "glyphs", "--jobs", "0"], ["--jobs"]),
    "on nothing": (["fpl-table2", "--on", "glyph"], ["glyphs"]),
    "bad value": (["fpl-table2", "--on", "glyphs", "--lr", "-1"], ["lr", "above 0"]),
    "a setting by --set": (["fpl-table2", "--on", "glyphs", "--set", "lr=1"], ["which method"]),
    "no such hyper-parameter": (
        ["fpl-table2", "--on", "glyphs", "--set", "fpl.tao=1"],
        ["'tao'", "tau"],
    ),
    "no such method": (["new.toml"], ["row Base: 'fedavgg'", "did you mean fedavg", "--methods"]),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    start_nothing(monkeypatch)
    Path("new.toml").write_text(study(rows={"Base": "fedavgg", "FPL": "fpl"}).toml())
    given, words = BAD[case]
    code, out, err = protofed("study", "run", *given)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    for word in words:
        assert word in err, err
    assert [p.name for p in tmp_path.iterdir()] == ["new.toml"]


# ---- table, pack --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["terminal", "markdown", "csv", "latex"])
def test_table_prints_what_is_there(protofed: Protofed, form: str) -> None:
    make_study(study(), Path("there/s"), skip={("FPL", 0), ("FPL", 1)})
    code, out, err = protofed("study", "table", "there/s", "--format", form)
    assert (code, err) == (0, "")
    assert "40.5" in out
    assert form == "csv" or "1 of 2 rows were not run: FPL." in out
    assert not Path("there/s/table.md").exists()


def test_table_writes_where_it_is_asked_to(protofed: Protofed) -> None:
    make_study(study(), Path("runs/mine"))
    code, out, _ = protofed("study", "table", "mine", "--write")
    assert code == 0 and "are in runs/mine" in " ".join(out.split())
    assert Path("runs/mine/table.csv").is_file()
    code, out, _ = protofed("study", "table", "mine", "--target", "45.2")
    assert code == 0 and "rounds to 45.2 %" in out and "1 (1 of 2 seeds)" in out
    code, _, err = protofed("study", "table", "mine", "--target", "145")
    assert code == 2 and "target must be an accuracy in %, got 145" in err


def test_a_study_without_a_folder_is_shown_from_the_pool(protofed: Protofed) -> None:
    """As after parts of it were run on several machines."""
    Path("mine.toml").write_text(study().toml())
    make_runs(study(), Path("pool"))
    code, out, _ = protofed("study", "table", "mine.toml", "--runs", "pool")
    assert code == 0 and "45.5 ± 0.7" in out
    assert not Path("pool/mine").exists()
    assert protofed("study", "table", "mine.toml", "--runs", "pool", "--write").code == 0
    assert Path("pool/mine/table.md").is_file()
    done = protofed("study", "table", "fpl-table2", "--runs", "pool")
    assert done.code == 2 and "protofed study run NAME" in done.err


def test_a_folder_that_is_not_there(protofed: Protofed) -> None:
    make_study(study(), Path("runs/fpl-table2-on-glyphs"))
    code, _, err = protofed("study", "table", "fpl-table2")
    assert code == 2
    assert "'runs/fpl-table2' holds no study (there is runs/fpl-table2-on-glyphs)" in err
    assert protofed("study", "table", "fpl-table2-on-glyphs").code == 0
    assert "protofed study run NAME" in protofed("study", "table", "fpl-table1").err
    done = protofed("study", "table", "fpl-table2-on-glyphs", "--format", "word")
    assert done.code == 2 and "markdown" in done.err


def test_names_with_commas_and_slashes(protofed: Protofed, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"FPL": "fpl", "FPL, GroupNorm": {"method": "fpl", "settings": {"norm": "group"}},
            "[bold]Fed|Avg & co[/]": "fedavg"}  # fmt: skip
    tasks = {"a/b": {"task": "glyphs"}, "glyphs": {"lr": 0.02}}
    made = parse(raw(rows=rows, tasks=tasks, seeds=1), "mine")
    make_runs(made, Path("runs"))
    Path("mine.toml").write_text(made.toml())
    start_nothing(monkeypatch)
    code, out, err = protofed("study", "run", "mine.toml", "--methods", "FPL, GroupNorm,fedavg")
    assert (code, err) == (0, "")
    assert "4 of 4 runs are already complete" in out
    assert "[bold]Fed|Avg & co[/]" in out and "curves-a-b.png" in out
    assert r"[bold]Fed\|Avg & co[/]" in Path("runs/mine/table.md").read_text()


def test_pack_and_its_copy(protofed: Protofed) -> None:
    make_study(study(), Path("runs/mine"))
    before = protofed("study", "table", "mine", "--format", "csv").out
    code, out, err = protofed("study", "pack", "mine", "--to", "results/mine", "--images", 0)
    assert (code, err) == (0, "")
    assert "4 runs with their tables and figures are in results/mine" in " ".join(out.split())
    assert {p.name for p in Path("results/mine").iterdir()} == {"study.toml", PACKED, "table.md"}
    Path("runs").rename("gone")
    assert protofed("study", "table", "results/mine", "--format", "csv").out == before
    assert protofed("report", "results/mine", "-o", "r.html").code == 0
    assert "45.5" in Path("r.html").read_text("utf-8")
    done = protofed("study", "run", "results/mine", "--runs", "results/mine")
    assert done.code == 2 and "packed study" in done.err


def test_runs_of_a_pool_are_packed_without_running_the_study(protofed: Protofed) -> None:
    """As ``table`` shows them: a merged pool, or a study that was stopped elsewhere."""
    Path("mine.toml").write_text(study().toml())
    into = ("--to", "results/mine", "--images", 0)
    done = protofed("study", "pack", "mine.toml", *into)
    assert done.code == 2 and "holds no study" in done.err and not Path("runs/mine").exists()
    make_runs(study(), Path("runs"))
    before = protofed("study", "table", "mine.toml", "--format", "csv").out
    code, out, err = protofed("study", "pack", "mine.toml", *into)
    assert (code, err) == (0, "") and "4 runs" in out
    assert protofed("study", "table", "results/mine", "--format", "csv").out == before


def test_what_is_packed_is_the_study_as_it_is_now(protofed: Protofed) -> None:
    """Nothing of an earlier packing stands for it, and none that failed leaves anything."""
    make_runs(study(), Path("runs"))
    Path("full").mkdir()
    Path("full/of").touch()
    into = ("--to", "results/mine", "--images", 0)
    for title in ("before", "after"):
        Path("mine.toml").write_text(study(title=title).toml())
        assert protofed("study", "pack", "mine.toml", *into).code == 0
        assert StudyFolder.open(Path("results/mine")).study.title == title
    done = protofed("study", "pack", "mine.toml", "--to", "full")
    assert done.code == 2 and "is not empty" in done.err
    assert not Path("runs/mine").exists()


@pytest.mark.parametrize("options", [(), ("--device", "cpu")])
def test_a_study_is_continued_from_what_was_packed(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    made = study(tasks={"glyphs": {}, "more": {"task": "glyphs", "lr": 0.02, "seeds": 1}})
    Path("mine.toml").write_text(made.toml())
    make_runs(made, Path("there"))
    start_nothing(monkeypatch)
    given = ("--runs", "there", *options)
    assert protofed("study", "run", "mine.toml", *given).code == 0
    # the folder has a hash in its name where an option changes the study
    packed = ("--to", "results/mine", "--images", 0, "--runs", "there")
    assert protofed("study", "pack", "mine", *packed).code == 0
    code, out, err = protofed("study", "unpack", "results/mine", "--runs", "here")
    assert (code, err) == (0, "") and "6 runs are in here now" in out
    code, out, err = protofed("study", "run", "mine.toml", "--runs", "here", *options)
    assert (code, err) == (0, "") and "6 of 6 runs are already complete" in out
    done = protofed("study", "unpack", "results")
    assert done.code == 2 and "holds no packed study" in done.err


def test_seeds_count_for_the_tasks_that_are_chosen(protofed: Protofed, asked: list[Job]) -> None:
    made = study(tasks={"glyphs": {}, "more": {"task": "glyphs", "lr": 0.02}}, seeds=[100])
    Path("mine.toml").write_text(made.toml())
    done = protofed("study", "run", "mine.toml", "--tasks", "more", "--seeds", 3)
    assert done.code == 0, done.err
    assert sorted({job.config.seed for job in asked}) == [100, 101, 102]
    assert {job.config.lr for job in asked} == {0.02}
    saved = StudyFolder.open(Path("runs/mine")).study
    assert [saved.seeds_on(t) for t in saved.tasks.values()] == [(100,), (100, 101, 102)]
