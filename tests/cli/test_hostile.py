"""Whatever is typed, and whatever a file holds: a line that says what is wrong, no traceback."""

import gzip
import json
import tomllib
from itertools import cycle

import pytest
from tests.cli.commands import TINY, call, succeed
from tests.runs.resealed import reseal
from tests.studies.made_runs import image_folder

from protofed.errors import ProtofedError
from protofed.report import run_details
from protofed.report.collect import collect
from protofed.runs import load_run, run
from protofed.runs.folder import RunFolder
from protofed.runs.pool import PACKED, StoredRun, write_packed
from protofed.studies.folder import StudyFolder
from protofed.studies.show import lines
from protofed.studies.tables import caption, grid
from protofed.toml import toml_text

LONG = "9" * 5000
DEEP = "[" * 2000 + "]" * 2000

TYPED = {
    "digits in --set": (["--method", "fpl", "--set", f"tau={LONG}"], "must be a number"),
    "hexadecimal": (["--method", "fpl", "--set", f"tau=0x{'f' * 5000}"], "must be a number"),
    "beyond float": (["--method", "fpl", "--set", f"tau=1{'0' * 400}"], "must be a number"),
    "nan": (["--method", "fpl", "--set", "tau=nan"], "nan"),
    "inf": (["--method", "fpl", "--set", "tau=inf"], "finite"),
    "nested": (["--method", "fpl", "--set", f"tau={DEEP}"], "must be a number"),
    "a date": (["--method", "fpl", "--set", "tau=1979-05-27"], "must be a number"),
    "the name of an emoji": (["--task", "a:b:"], "'a:b:'"),
    "batch": (["--batch", "1e26"], "not a valid int"),
    "a large batch": (["--batch", str(10**26)], "to 1,000,000"),
    "width": (["--width", "1000000"], "to 100,000"),
    "a width that does not fit": (["--width", "99999"], "--max-memory-gb"),
    "clients": (["--clients", "scan=99999999999"], "up to 100000"),
    "samples": (["--samples", str(10**15)], "a count or a fraction"),
    "seed": (["--seed", str(10**18)], "to 1e+15"),
    "rounds": (["--rounds", str(10**18)], "to 1,000,000"),
    "epochs": (["--epochs", str(10**18)], "to 1,000,000"),
    "lr": (["--lr", "1e300"], "at most 1,000,000"),
    "workers": (["--workers", "100000"], "to 1,000"),
    "rounds to keep": (["--keep-rounds", LONG], "keep_rounds"),
    "a long name": (["--method", "x" * 5000], "unknown method"),
    "a long path": (["--out", "x" * 5000], "name too long"),
    "nobody's weights": (["--weights", "~nobody-here/w.pt"], "the home folder is unknown"),
    "nobody's model": (["--model", "~nobody-here/m.py:make"], "the home folder is unknown"),
    "nobody's method": (["--method", "~nobody-here/m.py:X"], "nobody-here/m.py"),
    "a long path of code": (["--method", f"{'x' * 5000}.py:X"], "name too long"),
}


@pytest.mark.parametrize(("typed", "words"), TYPED.values(), ids=list(TYPED))
def test_what_is_typed(typed, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call("run", *TINY, *typed)
    flat = " ".join(err.replace("│", " ").split())
    assert code == 2 and words in flat.replace("File name", "name")
    assert len(err) < 3000
    assert not list(tmp_path.iterdir())


OTHER_COMMANDS = {
    "a long study": (["study", "show", "x" * 5000], "name too long"),
    "a long study's table": (["study", "table", "x" * 5000], "name too long"),
    "a long run": (["show", "x" * 5000], "name too long"),
    "a long pool": (["compare", "--methods", "fedavg", "--runs", "x" * 5000], "name too long"),
    "a long task": (["run", "--task", f"folder:{'x' * 5000}"], "name too long"),
    "a long report": (["report", "x" * 5000], "name too long"),
    "no protocol": (["compare", "--protocol", ""], "unknown protocol"),
    "seeds": (["compare", "--seeds", str(10**12)], "from 1 to 10000"),
    "shard": (["compare", "--shard", f"1/{LONG}"], "--shard"),
    "points": (
        ["sweep", "--method", "fpl"]
        + [a for n in ("tau", "lr", "batch") for a in ("--over", f"{n}={'1,' * 99}2")],
        "more than 10000",
    ),
}


@pytest.mark.parametrize(("typed", "words"), OTHER_COMMANDS.values(), ids=list(OTHER_COMMANDS))
def test_what_is_typed_elsewhere(typed, words):
    code, _, err = call(*typed)
    assert code == 2 and words in err.replace("File name", "name") and len(err) < 1000


def test_names_are_printed_as_they_are(tmp_path, monkeypatch):
    """Neither as rich's markup, which may not even be valid, nor as emoji."""
    monkeypatch.chdir(tmp_path)
    image_folder(tmp_path / "cat", ["[red]day", "night"])
    assert "folder:cat: " in succeed("data", "show", "folder:cat")
    (tmp_path / "a[").mkdir()
    (tmp_path / "cat").rename(tmp_path / "a[" / "b]")
    for _ in range(2):  # the second time, the run is complete
        out = succeed(
            "run", *TINY, "--task", "folder:a[/b]", "--out", "out[/x]", "--image-size", 16
        )
        assert "out[/x]" in out and "[red]day" in out
    assert "[red]day" in call("evaluate", "out[/x]").out  # progress goes to stderr


CONFIGS = {
    "lists in lists": f"x = {DEEP}",
    "tables in tables": f"x = {'{a = ' * 1500}1{'}' * 1500}",
    "a long key": f"{'.'.join(['a'] * 2000)} = 1",
    "a long section": f"[{'.'.join(['a'] * 2000)}]\nx = 1",
    "digits": f"rounds = {LONG}",
    "hexadecimal": f"rounds = 0x{'f' * 5000}",
    "nan": "lr = nan",
    "a date": "rounds = 1979-05-27",
    "a list of clients": "clients = {scan = [1]}",
    "a number as protocol": "protocol = 3",
    "a list as model": "model = [1]",
    "a number as a client's model": "model = {a = 3}",
    "a table as hyper-parameter": '[method]\nname = "fpl"\ntau = {a = 1}',
}


@pytest.mark.parametrize("text", CONFIGS.values(), ids=list(CONFIGS))
def test_a_config(text, tmp_path):
    file = tmp_path / "x.toml"
    file.write_text(text)
    code, _, err = call("run", "--config", file, "--out", tmp_path / "run")
    assert code == 2 and "error: " in err and len(err) < 1000
    assert not (tmp_path / "run").exists()
    code, _, err = call("study", "show", file)
    assert code == 2 and "error: " in err


STUDIES = {
    "pool": "pool = 3",
    "seeds": "seeds = [[1]]",
    "many seeds": f"seeds = [{'1, ' * 20000}]",
    "protocol": "tasks.x = {task = 'glyphs', protocol = [1]}",
    "model": "settings = {model = [1]}",
    "leave_out": "tasks.x = {task = 'glyphs', leave_out = [1]}",
    "clients": "override = {settings = {clients = {scan = [1]}}}",
    "swept date": "[[sweep]]\nover = {tau = [1979-05-27]}",
}


@pytest.mark.parametrize("text", STUDIES.values(), ids=list(STUDIES))
def test_a_study(text, tmp_path):
    (tmp_path / "study.toml").write_text(f"rows.a = 'fpl'\ntasks.glyphs = {{}}\n{text}\n")
    for command in (["study", "show"], ["study", "table"], ["report"]):
        code, _, err = call(*command, tmp_path)
        assert code == 2 and "error: " in err


# ---- a run's folder -----------------------------------------------------------------------------

JUNK = (None, {}, [], "x", 10**30, float("nan"), True, -1, 1.5, {"a": {"b": []}}, [[1]], "GONE")
TINY_RUN = {"rounds": 2, "epochs": 1, "clients": 1, "samples": 10, "device": "cpu",
            "model": "cnn2", "width": 4}  # fmt: skip


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """A pool with a run, ``x``, and a study, ``s``, that it belongs to."""
    path = tmp_path_factory.mktemp("pool")
    run("glyphs", "fedproto", out=path / "x", **TINY_RUN)
    raw = {"seeds": 1, "tasks": {"glyphs": TINY_RUN}, "rows": {"a": "fedproto"}}
    (path / "s").mkdir()
    (path / "s" / "study.toml").write_text(toml_text(raw))
    return path


def read(pool):
    """All that is made of a run's folder but pictures."""
    if RunFolder(pool / "x").exists:
        lines(pool / "x")
        repr(load_run(pool / "x"))
    for group in collect([pool]).groups:
        grid(group.rows)
        caption(group.results)
        run_details.facts(group)
        assert group.looks and group.histories
    folder = StudyFolder.open(pool / "s")
    assert [table.grid() for table in folder.tables()]
    folder.histories("glyphs")


def spoiled(content, junk):
    """The content with junk in each place in turn; of equal parts of a list the last."""

    def places(value, path=()):
        yield path
        if isinstance(value, dict):
            for key in value:
                yield from places(value[key], (*path, key))
        elif isinstance(value, list) and value:
            yield from places(value[-1], (*path, len(value) - 1))

    for path in list(places(content)):
        copy = json.loads(json.dumps(content))
        if not path:
            yield next(junk)
            continue
        at = copy
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = next(junk)
        if at[path[-1]] == "GONE":
            del at[path[-1]]
        yield copy


def outcomes(pool, file, content, write):
    """Some of the spoiled files are refused, though sealed; any other error fails the test."""
    before, refused, tried = file.read_bytes(), 0, 0
    junk = cycle(JUNK)
    for _ in range(3):  # each place meets several
        next(junk)
        for other in spoiled(content, junk):
            tried += 1
            try:
                file.write_bytes(write(other))
                reseal(file)
                read(pool)
            except ProtofedError:
                refused += 1
    file.write_bytes(before)
    read(pool)
    assert 0 < refused < tried


def as_json(content):
    return json.dumps(content).encode()


@pytest.mark.parametrize("name", ["summary.json", "facts.json"])
def test_spoiled_json(pool, name):
    file = pool / "x" / name
    outcomes(pool, file, json.loads(file.read_text()), as_json)


def test_spoiled_records(pool):
    file = pool / "x" / "rounds.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]

    def write(content):
        return b"".join(as_json(record) + b"\n" for record in content or [content])

    outcomes(pool, file, records, lambda c: write(c) if isinstance(c, list) else as_json(c))


def test_a_record_with_a_table_as_average(pool):
    file = pool / "x" / "rounds.jsonl"
    before = file.read_text()
    file.write_text(before.replace('"average": ', '"average": {}, "was": '))
    reseal(file)
    code, _, err = call("show", pool / "x")
    file.write_text(before)
    assert code == 2 and "line 1" in err and "average is not a number" in err


def test_a_spoiled_config(pool):
    file = pool / "x" / "config.toml"
    content = tomllib.loads(file.read_text())

    def write(other):
        try:
            return toml_text(other).encode()
        except (TypeError, AttributeError, ValueError):  # TOML cannot say it
            return b"\0"

    outcomes(pool, file, content, write)


@pytest.mark.parametrize("clients", [2, "skewed", {"scan": 2}])
def test_a_run_of_an_unknown_task_whose_domains_nothing_names(pool, clients):
    file = pool / "x" / "config.toml"
    before = file.read_text()
    settings = {**tomllib.loads(before), "task": "mine", "clients": clients, "samples": 10}
    file.write_text(toml_text(settings))
    reseal(file)
    with pytest.raises(ProtofedError, match="unknown task 'mine'"):
        load_run(pool / "x")
    file.write_text(before)


def test_a_digest_that_is_not_text(pool):
    file = pool / "x" / "facts.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), "digest": 3}))
    reseal(file)
    with pytest.raises(ProtofedError, match="digest is not text"):
        collect([pool / "x"])
    file.write_text(before)


def test_a_spoiled_packed_study(pool, tmp_path):
    found = RunFolder(pool / "x")
    line = json.loads(StoredRun("x", found.facts(), found).line())
    packed = tmp_path / "packed"
    (packed / "s").mkdir(parents=True)
    (packed / "s" / "study.toml").write_bytes((pool / "s" / "study.toml").read_bytes())
    file = packed / "s" / PACKED
    write_packed(file, [json.dumps(line) + "\n"])
    read(packed)
    file.write_bytes(gzip.compress(as_json({**line, "name": "y"}) + b"\n"))
    with pytest.raises(ProtofedError, match="does not match its checksum"):
        read(packed)
    reseal(file)
    outcomes(packed, file, line, lambda c: gzip.compress(as_json(c) + b"\n"))


CHANGES = {
    "config.toml": "lr = ",
    "facts.json": '"numerics": ',
    "rounds.jsonl": '"train": ',  # the summary vouches for the other numbers
    "summary.json": '"seconds": ',
}


@pytest.mark.parametrize(("name", "number"), CHANGES.items(), ids=list(CHANGES))
def test_a_changed_number_needs_another_checksum(pool, name, number):
    file = pool / "x" / name
    before = file.read_text()
    file.write_text(before.replace(number, f"{number}1"))
    with pytest.raises(ProtofedError, match=rf"{name}' .* does not match its checksum"):
        load_run(pool / "x")
    reseal(file)
    load_run(pool / "x")
    file.write_text(before)


def test_json_nested_too_deep(pool):
    for name in ("summary.json", "facts.json", "rounds.jsonl"):
        file = pool / "x" / name
        before = file.read_bytes()
        file.write_text("[" * 100_000 + "]" * 100_000 + "\n")
        with pytest.raises(ProtofedError, match=name):
            load_run(pool / "x")
        file.write_bytes(before)
