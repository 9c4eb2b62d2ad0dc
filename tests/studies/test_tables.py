"""Tables of runs: means, deviations and paired differences, by hand."""

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from protofed.config import make_config
from protofed.methods import METHODS
from protofed.runs.records import Records
from protofed.runs.result import Result
from protofed.runs.run import run
from protofed.studies.render import to_markdown, to_terminal
from protofed.studies.tables import (
    Measure,
    Spread,
    TableCell,
    TableLine,
    TableRow,
    caption,
    client_sizes,
    cost_grid,
    grid,
    row,
    rows,
    seed_warning,
)
from protofed.testing.checks import TINY, tiny_task


def split_of(config):
    return {"clients": dict(config.domain_clients), "samples": dict(config.domain_samples)}


def result(method, seed, scan, photo, up=1_000_000, down=2_000_000, seconds=3.0, **settings):
    """A made-up run whose last rounds have these accuracies (lists: a value per round)."""
    scan = scan if isinstance(scan, list) else [scan]
    photo = photo if isinstance(photo, list) else [photo]
    lines = [
        {"round": t, "accuracy": {"scan": s, "photo": p}, "average": (s + p) / 2}
        for t, (s, p) in enumerate(zip(scan, photo, strict=True))
    ]
    kind = method if method in METHODS else "fedavg"
    config = make_config(
        method=kind, clients={"scan": 2, "photo": 1}, samples=10, device="cpu", seed=seed,
        **{"rounds": 2, **settings},
    )  # fmt: skip
    summary = {
        "method": method, "bytes_up": up, "bytes_down": down, "seconds": seconds,
        "data": "made up", "batchnorm": "averaged", "device": "cpu", "precision": "fp32",
        "split": split_of(config),
    }  # fmt: skip
    return Result(config, Records(lines), summary)


def cells(table):
    """Header and texts."""
    header, lines = grid(table)
    return header, [[cell.text for cell in line.cells] for line in lines]


def costs(table):
    """Header and texts of the costs."""
    header, lines = cost_grid(table)
    return [header, *([cell.text for cell in line.cells] for line in lines)]


def markdown(results):
    return to_markdown(*grid(rows(results)), caption(results))


def test_a_single_seed_has_no_deviation():
    (row,) = rows([result("fedavg", 0, 50.0, 70.0)])
    assert {d: s.mean for d, s in row.accuracy.items()} == {
        "scan": 50.0, "photo": 70.0, "average": 60.0,
    }  # fmt: skip
    assert all(s.std is None and s.error is None and s.seeds == 1 for s in row.accuracy.values())
    assert row.differences == {}
    assert row.megabytes == 3.0
    assert row.seconds == 3.0
    header, body = cells([row])
    assert header == ["method", "scan", "photo", "average", "worst", "spread"]
    assert body == [["fedavg", "50.0", "70.0", "60.0", "50.0", "10.0"]]
    assert costs([row]) == [["method", "MB", "s"], ["fedavg", "3", "3"]]
    assert "±" not in markdown([result("fedavg", 0, 50.0, 70.0)])


def test_mean_and_standard_deviation_over_seeds():
    runs = [result("fedavg", s, a, 70.0) for s, a in enumerate((50.0, 53.0, 59.0))]
    (row,) = rows(runs)
    assert row.accuracy["scan"].mean == pytest.approx(54.0)
    # deviations −4, −1, 5: (16 + 1 + 25) / 2 = 21
    assert row.accuracy["scan"].std == pytest.approx(math.sqrt(21))
    assert row.accuracy["photo"].std == 0
    assert cells([row])[1][0][1:4] == ["54.0 ± 4.6", "70.0 ± 0.0", "62.0 ± 2.3"]


def test_the_difference_is_paired_by_seed_with_its_interval():
    runs = [result("fedavg", s, a, a) for s, a in enumerate((50.0, 60.0, 70.0))]
    runs += [result("fpl", s, a, a) for s, a in enumerate((51.0, 63.0, 72.0))]
    base, fpl = rows(runs)
    assert base.differences == {}
    # differences 1, 3, 2: mean 2, standard deviation 1, standard error 1/√3
    difference = fpl.differences["average"]
    assert difference.mean == pytest.approx(2.0)
    assert difference.std == pytest.approx(1.0)
    assert difference.error == pytest.approx(1 / math.sqrt(3))
    # Student's t with two degrees of freedom: 4.303
    assert difference.half == pytest.approx(4.303 / math.sqrt(3), abs=1e-3)
    assert difference.noise
    assert cells([base, fpl])[1][1][6] == "+2.0 ± 0.6 (±2.5, noise)"
    # unpaired, the deviation of the seeds would drown it
    assert fpl.accuracy["average"].std > 10


def test_the_order_of_runs_does_not_matter_and_unpaired_seeds_are_left_out():
    runs = [
        result("fpl", 2, 50.0, 50.0),
        result("fpl", 1, 62.0, 62.0),
        result("fedavg", 1, 60.0, 60.0),
        result("fedavg", 5, 10.0, 10.0),
    ]
    fpl, base = rows(runs)
    assert (fpl.method, base.method) == ("fpl", "fedavg")  # as they come
    assert fpl.differences["average"] == Spread(2.0, None, 1)
    assert cells([fpl])[1][0][6] == "+2.0"
    assert fpl.accuracy["average"].mean == 56.0


def test_a_loss_has_a_minus():
    runs = [result("fedavg", 0, 60.0, 60.0), result("fpl", 0, 55.5, 55.5)]
    assert cells(rows(runs))[1][1][6] == "-4.5"


def test_without_fedavg_there_is_no_difference():
    table = rows([result("fpl", 0, 50.0, 60.0), result("fedproto", 0, 51.0, 61.0)])
    assert [r.differences for r in table] == [{}, {}]
    header, body = cells(table)
    assert header == ["method", "scan", "photo", "average", "worst", "spread"], "nor a column of it"
    assert {len(line) for line in body} == {6}


def test_costs_are_means_over_seeds():
    runs = [
        result("fedavg", 0, 1.0, 1.0, up=10_000_000, down=0, seconds=10),
        result("fedavg", 1, 1.0, 1.0, up=20_000_000, down=6_000_000, seconds=21),
    ]
    (row,) = rows(runs)
    assert row.megabytes == pytest.approx(18.0)
    assert row.seconds == pytest.approx(15.5)


def test_accuracy_is_the_mean_of_the_last_five_rounds():
    values = [0.0, 0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    (row,) = rows([result("fedavg", 0, values, values, rounds=7)])
    assert row.accuracy["scan"].mean == 30.0


def test_spread():
    assert Spread.of([4.0]) == Spread(4.0, None, 1)
    two = Spread.of([1.0, 3.0])
    assert (two.mean, two.std, two.seeds) == (2.0, pytest.approx(math.sqrt(2)), 2)
    assert two.error == pytest.approx(1.0)


def test_markdown_is_a_table_with_its_caption():
    runs = [result(m, s, 50.0 + s, 60.0) for s in (0, 3) for m in ("fedavg", "fpl")]
    text = markdown(runs)
    lines = text.split("\n")
    assert lines[0] == "| method | scan | photo | average | worst | spread | Δ FedAvg |"
    assert lines[1] == "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    assert lines[2].startswith("| fedavg | **51.5 ± 2.1** | **60.0 ± 0.0** | ")  # scan: 50 and 53
    assert [line.count("|") for line in lines[:4]] == [8] * 4
    assert lines[4] == ""
    assert lines[5] == caption(runs)
    assert text.endswith("\n")


def test_the_caption_says_what_the_numbers_are():
    runs = [result(m, s, 1.0, 1.0) for m in ("fedavg", "fpl") for s in (4, 2)]
    text = caption(runs)
    for part in (
        "mean of the last 5 rounds", "task glyphs (made up)", "protocol glyphs", "2 rounds",
        "scan 2 × 10", "photo 1 × 10", "seeds 2, 4", "fp32 on cpu", "BatchNorm: averaged",
        "weights of the average: samples unless", "mean ± standard deviation over 2 seeds",
        "95% interval", "fewer than 5", "hyper-parameters: each method's defaults;",
        "Worst: the lowest domain", "accuracy of FedAvg on the same seed: until the mean",
    ):  # fmt: skip
        assert part in text, part
    assert "over 2 seeds" not in caption(runs[:1]) and "on the same seed" not in caption(runs[:1])
    clipped = [result("fedavg", s, 1.0, 1.0, clip_norm=1.0, sampling="balanced") for s in (4, 2)]
    assert ", 2 rounds, clip_norm 1, sampling balanced, clients" in caption(clipped)
    assert "clip_norm" not in caption([*clipped, *runs]), "only what all have in common"
    assert "\n" not in text


# ---- beside the paper ---------------------------------------------------------------------------


def measure(seed, value):
    return Measure(seed, {"scan": value, "average": value}, 1.0, 2.0, {}, {"method": "fpl"})


def test_many_equal_differences_are_no_noise():
    base = {s: measure(s, 50.0 + s) for s in range(5)}
    better = {s: measure(s, 53.0 + s + 0.1 * (s % 2)) for s in range(5)}
    line = row("FPL", better, base)
    # differences 3, 3.1, 3, 3.1, 3: deviation 0.0548, t(4) = 2.776
    assert line.differences["average"].half == pytest.approx(
        2.776 * 0.0548 / math.sqrt(5), abs=1e-3
    )
    assert not line.differences["average"].noise
    assert line.differences["scan"] == line.differences["average"]
    assert grid([line])[1][0].cells[3].text == "+3.0 ± 0.0 (±0.1)"


def test_the_best_is_marked_and_the_second():
    table = [row(m, {0: measure(0, v)}, {}) for m, v in (("a", 50.0), ("b", 60.0), ("c", 55.0))]
    _, body = grid(table)
    assert [line.cells[1].mark for line in body] == ["", "best", "second"]
    # what is printed alike is marked alike
    table = [row(m, {0: measure(0, v)}, {}) for m, v in (("a", 60.01), ("b", 60.0), ("c", 9.0))]
    assert [line.cells[1].mark for line in grid(table)[1]] == ["best", "best", "second"]
    assert grid(table[:1])[1][0].cells[1].mark == ""


def test_rows_that_lack_seeds_are_not_ranked():
    """Their seeds may be the easy ones."""
    table = [
        row("a", {s: measure(s, 50.0) for s in range(3)}, {}),
        row("b", {0: measure(0, 90.0)}, {}, wanted=3),
        row("c", {s: measure(s, 60.0) for s in (2, 0, 1)}, {}),
    ]
    marks = [line.cells[1].mark for line in grid(table)[1]]
    assert marks == ["second", "", "best"]


def test_unseen_domains_are_not_ranked_against_seen_ones():
    accuracy = {"scan": 50.0, "print": 60.0, "average": 55.0}
    one, other = (
        row(d, {0: Measure(0, accuracy, 1.0, 2.0, {}, {"method": "fpl", "leave_out": d})}, {})
        for d in ("scan", "print")
    )
    assert {cell.mark for line in grid([one, other])[1] for cell in line.cells} == {""}
    same = replace(one, label="same")
    assert grid([one, other, same])[1][2].cells[1].mark == "best"


def test_a_row_that_was_never_measured_is_not_ranked():
    values = {"a": math.nan, "b": 50.0, "c": 60.0}
    table = [row(label, {0: measure(0, value)}, {}) for label, value in values.items()]
    assert [line.cells[1].mark for line in grid(table)[1]] == ["", "second", "best"]
    table = [row(label, {0: measure(0, value)}, {}) for label, value in [*values.items()][:2]]
    assert [line.cells[1].mark for line in grid(table)[1]] == ["", ""]


def test_missing_runs_are_shown():
    table = [
        row("a", {0: measure(0, 50.0)}, {}, wanted=3),
        row("b", {}, {}, wanted=3, state="needs method b"),
    ]
    header, body = grid(table, ("scan", "average"))
    assert header == ["method", "scan", "average", "seeds"]
    assert [c.text for c in body[0].cells] == ["a", "50.0", "50.0", "1/3"]
    assert [c.text for c in body[1].cells] == ["b (needs method b)", "", "", ""]
    assert costs(table) == [["method", "MB", "s"], ["a", "1", "2"]]


def test_a_row_that_was_not_run_takes_no_line_and_nobody_wins():
    there = [row(m, {0: measure(0, v)}, {}) for m, v in (("a", 50.0), ("b", 60.0))]
    _, body = grid([*there, row("c", {}, {})])
    assert [line.cells[0].text for line in body] == ["a", "b"]
    assert {c.mark for line in body for c in line.cells} == {""}
    diverged = grid([*there, row("c", {}, {}, state="diverged")])[1]
    assert [line.cells[1].mark for line in diverged] == ["second", "best", ""]


def test_the_paper_stands_below_with_the_difference():
    paper = {"scan": 51.25, "average": 49.0}
    table = [
        row("FedAvg", {0: measure(0, 50.0)}, {}, paper={"average": 47.5}, paper_std=0.25),
        row("FPL", {}, {}, paper=paper),
        row("X", {0: measure(0, 1.0)}, {}, paper={"average": math.nan}),
    ]
    _, body = grid(table, ("scan", "average"), "FedAvg")
    texts = [[c.text for c in line.cells[:4]] for line in body]
    assert [(line.paper, line.label) for line in body] == [
        (False, ""), (True, ""), (True, "FPL"), (False, ""), (True, ""),
    ]  # fmt: skip
    assert texts[1] == ["paper (ours − paper)", "", "47.50 ± 0.25 (+2.5)", ""]
    assert texts[2] == ["FPL: paper (not run)", "51.25", "49.00", "+1.50"]
    assert texts[4][2:] == ["NaN", ""]


def test_the_worst_domain_and_the_spread_are_those_of_each_seed():
    # the worst is another domain in each seed: its mean is below that of every domain
    runs = [result("fedavg", 0, 40.0, 60.0), result("fedavg", 1, 70.0, 50.0)]
    (own,) = rows(runs)
    assert own.derived["worst"].mean == 45.0
    assert own.derived["spread"].mean == 10.0
    assert cells([own])[1][0][4:6] == ["45.0 ± 7.1", "10.0 ± 0.0"]
    assert own.accuracy["average"].values == (50.0, 60.0)
    # a small spread is no merit by itself: it is never marked
    table = rows([result("fedavg", 0, 40.0, 60.0), result("fpl", 0, 50.0, 90.0)])
    marks = [[c.mark for c in line.cells[4:6]] for line in grid(table)[1]]
    assert marks == [["second", ""], ["best", ""]]
    # of the paper's numbers, too
    printed = row("FPL", {}, {}, paper={"scan": 40.0, "photo": 60.0, "average": 50.0})
    _, (line,) = grid([printed], ("scan", "photo", "average"))
    assert [c.text for c in line.cells[1:]] == ["40.00", "60.00", "50.00", "40.00", "10.00"]


# ---- what an accuracy takes ---------------------------------------------------------------------


def over(method, seed, values, megabytes=1):
    """A run of as many rounds as values, each of which sends so much."""
    made = result(method, seed, values, values, rounds=len(values))
    for record in made.rounds:
        record |= {"bytes_up": megabytes * 400_000, "bytes_down": megabytes * 600_000}
    return made


def test_rounds_and_bytes_to_the_accuracy_of_the_baseline():
    slow, quick = [10.0] * 5 + [50.0] * 5, [50.0] * 10
    table = rows([over("fedavg", 0, slow), over("fpl", 0, quick, 3)])
    # FedAvg's last five rounds are its accuracy: it is there at the end
    assert [r.target for r in table] == [50.0, 50.0]
    assert costs(table) == [
        ["method", "MB", "s", "rounds to 50.0 %", "MB to 50.0 %"],
        ["fedavg", "3", "3", "10", "10"],
        ["fpl", "3", "3", "1", "3"],
    ]
    assert table[0].reached[0].mean == 10
    # one lucky round does not reach it: the mean of the last five counts
    lucky = over("fpl", 0, [10.0, 60.0, *[10.0] * 8])
    assert costs(rows([over("fedavg", 0, slow), lucky]))[2][3:] == ["not reached", ""]


def test_the_target_is_that_of_the_same_seed_and_seeds_that_miss_it_are_counted():
    runs = [over("fedavg", 0, [50.0] * 3), over("fedavg", 1, [70.0] * 3)]
    runs += [over("fpl", 0, [40.0, 60.0, 90.0]), over("fpl", 1, [60.0] * 3)]
    header, _, fpl = costs(rows(runs))
    assert header[3] == "rounds to 60.0 %"
    assert fpl[3:] == ["2 (1 of 2 seeds)", "2"]
    alone = rows(runs[2:])
    assert (alone[0].target, costs(alone)[0]) == (None, ["method", "MB", "s"])


def test_the_caption_names_the_hyper_parameters_that_are_not_defaults():
    runs = [result("fedavg", 0, 1.0, 1.0), result("fpl", 0, 1.0, 1.0)]
    changed = METHODS["fpl"].create({"tau": 0.5})
    runs[1] = replace(runs[1], config=replace(runs[1].config, method=changed))
    assert "hyper-parameters: each method's defaults (fpl: tau=0.5);" in caption(runs)
    named = METHODS["ccst"].create({"encoder": "file:/home/me/vgg.pth"})
    named = replace(runs[1], config=replace(runs[1].config, method=named))
    assert "defaults (fpl: encoder=file:vgg.pth);" in caption([runs[0], named])
    runs[1] = replace(runs[1], summary={**runs[1].summary, "method": "fpl, tau=0.5"})
    assert "each method's defaults but for what a row's name says;" in caption(runs)
    for label, said in (("FPL, tau=0.5", False), ("FPL, mine", True)):
        labeled = replace(runs[1], summary={**runs[1].summary, "method": label})
        assert ("(FPL, mine: tau=0.5)" in caption([runs[0], labeled])) == said


def test_few_seeds_are_said():
    assert "one seed" in seed_warning(1)
    assert "fewer than 5" in seed_warning(4)
    assert seed_warning(5) == seed_warning(5, 5) == ""
    assert "some rows have fewer than 5" in seed_warning(5, 4)
    runs = [result("fedavg", s, 1.0, 1.0) for s in range(5)]
    assert "fewer than" not in caption(runs)
    assert "some rows have fewer than 5" in caption([*runs, result("fpl", 0, 1.0, 1.0)])


def test_clients_times_samples():
    samples = {"mnist": 600, "webcam": 0.2, "all": 1.0, "none": 0.3}
    text = client_sizes({"mnist": 6, "webcam": 1, "all": 2, "none": 0}, samples)
    assert text == "mnist 6 × 600, webcam 1 × 20 %, all 2 × 100 %"


def test_a_row_without_runs_has_no_seeds():
    assert TableRow("a", {}).seeds == 0


@pytest.mark.parametrize("width", [60, 80, 100, 132, 400])
def test_a_narrow_terminal_gets_the_table_in_parts(width):
    """Whole columns, every cell complete; a paper's line only where it has numbers."""
    header = ["method", "scan", "print", "average", "Δ FedAvg", "MB", "s"]
    numbers = ["59.6 ± 3.0", "72.7 ± 3.1", "53.2 ± 3.0", "+5.5 ± 1.5 (±4.2, noise)", "39272", "64"]
    paper = ["60.15 (-0.6)", "75 (1.0)", "54", "", "", ""]
    body = [
        TableLine((TableCell("FedAvg"), *map(TableCell, numbers))),
        TableLine((TableCell("paper (ours − paper)"), *map(TableCell, paper)), paper=True),
    ]
    file = io.StringIO()
    console = Console(width=width, file=file)
    for part in to_terminal(header, body, console):
        console.print(part)
    said = file.getvalue()
    assert "…" not in said
    for text in (*header, *numbers, "60.15 (-0.6)"):
        assert text in said
    assert max(map(len, said.splitlines())) <= width
    heads = said.count("method")
    assert (heads == 1) == (width >= 100)
    assert said.count("ours − paper") < heads or heads == 1


# ---- one domain left out ------------------------------------------------------------------------


def left_out(method, seed, scan, photo, inverse, unseen="inverse"):
    """A made-up run of one round that left a domain out."""
    values = {"scan": scan, "photo": photo, "inverse": inverse}
    made = result(method, seed, scan, photo)
    config = make_config(method=method, leave_out=unseen, seed=seed, samples=10, device="cpu")
    line = {"round": 0, "accuracy": values, "average": sum(values.values()) / 3}
    summary = {**made.summary, "tested": {"inverse": 450}, "weights": "samples"}
    summary["split"] = split_of(config)
    return Result(config, Records([line]), summary)


def test_the_unseen_domain_comes_first_and_the_average_is_of_the_others():
    runs = [left_out("fedavg", s, 90.0, 70.0 + 2 * s, 30.0 + s) for s in (0, 1)]
    runs += [left_out("fpl", s, 80.0, 60.0, 34.0 + s) for s in (0, 1)]
    table = rows(runs)
    header, body = cells(table)
    assert header == ["method", "inverse (unseen)", "scan", "photo", "seen average",
                      "Δ FedAvg, unseen"]  # fmt: skip
    # seeds 30 and 31; seen averages 80 and 81
    assert body[0][1:6] == ["30.5 ± 0.7", "90.0 ± 0.0", "71.0 ± 1.4", "80.5 ± 0.7", ""]
    # paired by seed on the unseen domain: +4 twice, where the seen ones lose 10.5
    assert body[1][1:6] == ["34.5 ± 0.7", "80.0 ± 0.0", "60.0 ± 0.0", "70.0 ± 0.0",
                            "+4.0 ± 0.0 (±0.0)"]  # fmt: skip
    # best of the unseen is not best of the seen
    assert "| fpl | **34.5" in markdown(runs)
    assert "Δ: on inverse, which no client trained on; seen average: on the others" in caption(runs)
    # who reads rows as numbers finds the average of all domains where it was
    assert table[0].accuracy["average"].mean == pytest.approx((190 / 3 + 193 / 3) / 2)
    assert table[0].main == "inverse"


def test_without_one_a_table_is_as_ever():
    header, (line,) = cells(rows([left_out("fedavg", 0, 90.0, 70.0, 30.0, unseen=None)]))
    assert header[1:5] == ["scan", "photo", "inverse", "average"]
    assert line[4] == "63.3"


# ---- what models are weighed by -----------------------------------------------------------------


def test_the_caption_says_which_methods_weigh_otherwise():
    config = {**TINY, "rounds": 1, "epochs": 1, "samples": 10}
    names = ("fedavg", "fedproto", "fedopt", "fednova", "fedavg_ga", "fedbn", "local")
    text = caption([run(tiny_task(), name, **config) for name in names])
    assert (
        "weights of the average: sample counts (fedopt: uniform; fednova: samples over steps; "
        "fedavg_ga: generalization gaps; local: no model is averaged)." in text
    )
    assert "averaged like weights, running statistics included (fedbn, local: kept" in text
    uniform = caption([run(tiny_task(), "fedavg", average="uniform", **config)])
    assert "weights of the average: uniform." in uniform


def test_a_run_of_an_earlier_version_claims_nothing():
    assert "weights of the average: samples unless" in caption([result("fedavg", 0, 1.0, 1.0)])
