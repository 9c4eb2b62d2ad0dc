"""What is read executes no code: only a file that a person names, or trusts, is executed."""

import shutil
import sys
from pathlib import Path

import pytest
from tests.cli.commands import MINE, TINY, call, succeed
from tests.runs.resealed import reseal
from tests.studies.in_process import run_in_process

from protofed import analysis, load_run, methods, user_code
from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.methods import RecordedMethod, method_class, trust_code
from protofed.report import pack, study_figures
from protofed.report.collect import collect
from protofed.report.group_analysis import analyze
from protofed.runs import run
from protofed.studies.folder import StudyFolder

MARKED = "from pathlib import Path\nPath('EXECUTED').touch()\n" + MINE
MARKER = Path("EXECUTED")
MINE_2 = ("--method", "mine.py:Mine", "--set", "scale=2")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run and a comparison of a method of one's own: ``x`` and ``runs/c``."""
    path = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setattr(user_code, "_trusted", False)
        run_in_process(patch)
        patch.setattr(study_figures, "write_figures", lambda *_, **__: [])  # slow to draw
        Path("mine.py").write_text(MARKED)
        given = (*TINY, "--clients", "scan=1", "--samples", "10")
        succeed("run", "--quiet", *given, *MINE_2, "--out", "x")
        names = ("--methods", "fedavg,mine.py:Mine", "--set", "mine.scale=2")
        succeed("compare", *given, *names, "--out", "runs/c")
        assert MARKER.exists()
    return path


@pytest.fixture(autouse=True)
def new_process(place, monkeypatch):
    """No file has been executed yet."""
    monkeypatch.chdir(place)
    for module in (study_figures, pack):
        monkeypatch.setattr(module, "write_figures", lambda *_, **__: [])
    monkeypatch.setattr(user_code, "_trusted", False)
    monkeypatch.setattr(methods, "_LOADED", {})
    for name in [name for name in sys.modules if name.startswith("protofed_user_")]:
        monkeypatch.delitem(sys.modules, name)
    Path("mine.py").write_text(MARKED)
    MARKER.unlink(missing_ok=True)


@pytest.fixture
def received(tmp_path):
    return Path(shutil.copytree("x", tmp_path / "x"))


@pytest.fixture
def comparison(tmp_path):
    return Path(shutil.copytree("runs", tmp_path / "runs")) / "c"


def test_a_run_is_read_without_its_code(received):
    result = load_run(received)
    method = result.config.method
    assert (method.name, method.options()) == ("mine", {"scale": 2.0})
    assert 'name = "' in result.config.toml() and "mine.py:Mine" in result.config.toml()
    assert "mine" in succeed("show", received)
    assert "mine on glyphs" in repr(result)
    for needs_code in (lambda: result.network(), lambda: analysis.confusion(result, "scan")):
        with pytest.raises(ProtofedError, match=r"code of method mine.*--trust-code"):
            needs_code()
    assert not MARKER.exists()


def test_a_report_executes_only_trusted_code(received):
    (group,) = collect([received]).groups
    assert "code of method mine" in str(analyze(group, 4, lambda text: None).missing)
    assert not MARKER.exists()
    trust_code()
    assert analysis.confusion(received, "scan").sum() > 0
    assert MARKER.exists()


def test_what_is_loaded_is_used(received):
    method_class("mine.py:Mine")  # named by a person
    assert type(load_run(received).config.method).__name__ == "Mine"


def test_a_run_whose_method_is_nowhere(received):
    Path("mine.py").unlink()
    assert load_run(received).config.method.name == "mine"
    config = received / "config.toml"
    config.write_text(config.read_text().replace(str(Path("mine.py").resolve()), "__main__"))
    with pytest.raises(ProtofedError, match="does not match its checksum"):
        load_run(received)
    reseal(config)
    assert load_run(received).config.method.reference == "__main__:Mine"
    trust_code()
    with pytest.raises(ProtofedError, match="'__main__:Mine', which is in no file"):
        analysis.confusion(received, "scan")


def test_a_received_config_names_code(received):
    again = ("run", "--quiet", "--config", received / "config.toml", "--out", received / "again")
    code, _, err = call(*again)
    assert code == 2
    for part in ("names code", "mine.py:Mine", "--trust-code", "--method"):
        assert part in err
    with pytest.raises(ProtofedError, match="names code"):
        run(config=received / "config.toml")
    assert not MARKER.exists()
    succeed(*again, "--trust-code")
    assert MARKER.exists()


def test_a_config_with_the_code_that_a_person_names(received):
    method = f"{Path('mine.py').resolve()}:Mine"
    out = received / "again"
    succeed(
        "run", "--quiet", "--config", received / "config.toml", "--out", out, "--method", method
    )
    assert MARKER.exists()
    assert "scale = 2.0" in (out / "config.toml").read_text()


def test_a_study_is_read_without_its_code(comparison):
    shown = succeed("study", "show", comparison)
    assert "mine.py:Mine" in shown and "scale=2" in shown
    assert "mine" in succeed("study", "table", comparison)
    table = succeed("study", "table", comparison, "--format", "csv")
    assert table.count("mine,") == table.count("fedavg,") > 0
    packed = comparison.parent / "packed"
    succeed("study", "pack", comparison, "--to", packed, "--images", 0)
    assert succeed("study", "table", packed, "--format", "csv") == table
    assert [r.config.method.name for r in collect([packed]).groups[0].results] == ["fedavg", "mine"]
    assert not MARKER.exists()
    Path("mine.py").write_text(MARKED + "\n# changed\n")  # the runs in the pool are of the old one
    assert succeed("study", "table", comparison, "--format", "csv") == table
    assert not MARKER.exists()


def test_the_recorded_method_asks_for_the_same_runs(comparison):
    study = StudyFolder.open(comparison).study
    recorded = study.rows["mine"].make("glyphs")
    assert isinstance(recorded, RecordedMethod)
    real = method_class("mine.py:Mine").create({"scale": 2})
    assert make_config(method=recorded).hash == make_config(method=real).hash
    assert make_config(method=recorded).hash != make_config(method=real, seed=1).hash


def test_a_study_without_a_record_of_its_method(comparison):
    file = comparison / "study.toml"
    text = file.read_text()
    file.write_text(text[: text.index("[methods")])
    assert "--trust-code" in succeed("study", "show", comparison)
    assert "--trust-code" in succeed("study", "table", comparison)
    assert not MARKER.exists()
    assert "--trust-code" not in succeed("study", "table", comparison, "--trust-code")
    assert MARKER.exists()


def test_a_study_runs_only_trusted_code(comparison, monkeypatch):
    """Also where its runs can be found without the code."""
    started = run_in_process(monkeypatch)
    pool = comparison.parent
    arguments = ("study", "run", comparison, "--runs", pool, "--rounds", 2, "--methods", "mine")
    code, _, err = call(*arguments)
    assert code == 2 and "names code" in err and "--trust-code" in err
    assert not MARKER.exists()
    succeed(*arguments, "--trust-code")
    assert MARKER.exists()
    assert "--trust-code" in started[-1], "the run's own process is to execute it, too"


BAD_RECORDS = {
    "not a table": ('"mine.py:Mine" = 1', "must be a table"),
    "unknown key": ('"mine.py:Mine" = {nam = "x"}', "nam"),
    "no name": ('"mine.py:Mine" = {source = "x"}', "name must be text"),
    "defaults": ('"mine.py:Mine" = {name = "m", source = "", defaults = 3}', "defaults"),
    "a table as value": (
        '"mine.py:Mine" = {name = "m", source = "", defaults = {glyphs = {scale = {}}}}',
        "neither a number nor a word",
    ),
}


@pytest.mark.parametrize(("text", "words"), BAD_RECORDS.values(), ids=list(BAD_RECORDS))
def test_a_damaged_record_of_a_method(text, words):
    Path("s.toml").write_text(
        f'tasks.glyphs = {{}}\nrows.mine = "mine.py:Mine"\n[methods]\n{text}\n'
    )
    code, _, err = call("study", "show", "s.toml")
    assert code == 2 and words in err
    assert not MARKER.exists()
