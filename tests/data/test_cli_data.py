"""``protofed data show`` and ``verify``, and runs on a user's own images."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from protofed.cli import app as cli
from protofed.cli.app import app
from protofed.config import make_config
from protofed.data import load_task
from protofed.errors import ProtofedError
from protofed.federation.simulation import Federation
from protofed.runs.result import load_run
from protofed.runs.run import run

NAMES = [f"{d}/{c}/{i}.png" for d in ("写真", "b") for c in ("cat", "dog") for i in range(10)]
SMALL: dict[str, Any] = {"protocol": "glyphs", "rounds": 1, "epochs": 1, "device": "cpu"}


@pytest.fixture
def name(tmp_path: Path, pictures: Any, own_cache: Path) -> str:
    return f"folder:{pictures.tree(tmp_path / 'pets', NAMES)}"


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_show(name: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "sheet.png"
    result = invoke("data", "show", name, "-o", str(out))
    assert result.exit_code == 0, result.output
    assert out.stat().st_mode & 0o077 == 0 or os.name == "nt"  # pixels are private
    assert "写真" in result.output and "16 + 4" in result.output
    with Image.open(out) as page:
        # two columns of classes and two rows of domains, with 2 × 2 images of 64 pixels each
        assert page.width > 2 * 2 * 64 and page.height > 2 * 2 * 64
        assert len(set(page.convert("L").tobytes())) > 100


def test_show_writes_nothing_unless_asked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    result = invoke("data", "show", name)
    assert result.exit_code == 0 and "16 + 4" in result.output
    assert list((tmp_path / "here").iterdir()) == []


def test_show_takes_a_range_of_values(name: str, tmp_path: Path) -> None:
    deep = Image.fromarray(np.full((40, 40), 300, np.uint16))
    deep.save(tmp_path / "pets" / "b" / "cat" / "3.png")
    result = invoke("data", "show", name, "--pixel-range", "0:4095")
    assert "values from 0:4095 became 0 to 255" in result.output


def test_show_lists_what_it_skips(name: str, tmp_path: Path) -> None:
    (tmp_path / "pets" / "b" / "cat" / "3.png").write_bytes(b"")
    out = str(tmp_path / "s.png")
    result = invoke("data", "show", name, "-o", out)
    assert isinstance(result.exception, ProtofedError) and "b/cat/3.png" in str(result.exception)
    result = invoke("data", "show", name, "-o", out, "--skip-bad")
    assert result.exit_code == 0
    assert "left out 1 file:" in result.output and "b/cat/3.png: it is empty" in result.output


def test_limits_are_options_of_all_that_read_images(
    name: str, tmp_path: Path, pictures: Any
) -> None:
    (tmp_path / "pets" / "b" / "cat" / "3.png").write_bytes(pictures.one(side=60))
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "pets")
    for command in (("data", "show"), ("data", "verify"), ("run", "--rounds", "1", "--task")):
        refused = invoke(*command, name, "--max-image-pixels", "3000")
        told = refused.output + str(refused.exception)
        assert "it has 62 × 60 pixels; --max-image-pixels 3720 allows that" in told, command
        refused = invoke(*command, f"folder:{packed}", "--max-unpacked-gb", "0.00001")
        assert "--max-unpacked-gb 2e-05" in str(refused.exception), command


def test_cache(name: str, own_cache: Path) -> None:
    assert "0 entries" in invoke("data", "cache").output
    load_task(name)
    load_task(name, image_size=16)
    listed = invoke("data", "cache").output
    assert listed.count(" 40 ") == 2 and listed.count(name.removeprefix("folder:")) == 2
    assert f"2 entries, 153.6 kB in {own_cache / 'decoded'}".split(",")[0] in listed
    small = next(word for word in listed.split() if word.startswith("folder-16-"))
    wrong = invoke("data", "cache", "folder-16", "--purge")
    assert isinstance(wrong.exception, ProtofedError) and small in str(wrong.exception)
    assert "deleted 1 entry," in invoke("data", "cache", small, "--purge").output
    assert "1 entry," in (left := invoke("data", "cache").output) and small not in left
    assert "deleted 1 entry," in invoke("data", "cache", "--purge").output
    assert not list((own_cache / "decoded").glob("*.*"))


def test_a_warning_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pets" / "b" / "dog").rename(tmp_path / "pets" / "b" / "Dog")
    monkeypatch.setattr(sys, "argv", ["protofed", "data", "show", name])
    with pytest.raises(SystemExit):
        cli.main()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"warning: {name}: the classes 'Dog' and 'dog' differ only in case"
    assert len(lines) == 2 and "in one domain only: 'Dog' (b), 'dog' (写真)" in lines[1]


def test_verify(name: str, tmp_path: Path) -> None:
    result = invoke("data", "verify", name)
    assert result.exit_code == 0 and "in training and test: none" in result.output
    pets = tmp_path / "pets" / "b"
    shutil.copy(pets / "cat" / "0.png", pets / "cat" / "8.png")  # 8 is a test image
    shutil.copy(pets / "dog" / "0.png", pets / "dog" / "1.png")
    shutil.copy(pets / "cat" / "1.png", pets / "dog" / "2.png")
    result = invoke("data", "verify", name)
    assert result.exit_code == 0
    assert "in training and test: 1\n" in result.output and "cat/8.png" in result.output
    assert "in two classes or domains: 1\n" in result.output
    assert "twice in one split: 2" in result.output
    (pets / "cat" / "5.png").write_bytes(b"junk")
    result = invoke("data", "verify", name)
    assert result.exit_code == 2
    assert "cannot be decoded: 1\n" in result.output and "cat/5.png" in result.output


def test_verify_glyphs() -> None:
    result = invoke("data", "verify", "glyphs")
    assert result.exit_code == 0 and "in training and test: none" in result.output


def test_tasks_needs_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path))
    monkeypatch.setattr(cli.console, "width", 200, raising=False)
    result = invoke("tasks")
    assert result.exit_code == 0, result.output
    for task in ("digits", "office_caltech", "pacs", "vlcs"):
        assert f"files: none yet; run protofed data fetch {task}" in result.output
    assert "folder:PATH" in result.output


def test_errors_of_a_user(tmp_path: Path, own_cache: Path) -> None:
    for arguments, words in (
        (("data", "show", "pacs"), "protofed data fetch pacs"),
        (("data", "show", "pasc"), "did you mean pacs"),
        (("data", "verify", f"folder:{tmp_path / 'absent'}"), "there is no folder"),
        (("run", "--task", "digits", "--data", str(tmp_path / "no")), "looked for"),
        (("run", "--task", "folder"), "folder:PATH"),
        (("run", "--image-size", "64"), "32 pixels"),
        (("data", "show", "folder:~nobody-here/x"), "the home folder is unknown"),
        (("data", "show", "digits", "--data", "~nobody-here/x"), "the home folder is unknown"),
    ):
        result = invoke(*arguments)
        assert isinstance(result.exception, ProtofedError), arguments
        assert words in str(result.exception)
    assert invoke("data", "show", "glyphs", "--images", "1000000").exit_code == 2


def test_names_in_an_archive_do_not_command_the_terminal(
    tmp_path: Path, pictures: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number, name in enumerate(("a/x/1", "a/x/2", "b/x/1", "b/x/2")):
            archive.writestr(f"{name}\x1b[2J.png", pictures.one() if number else b"no image")
            archive.writestr(f"{name}.png", pictures.one())
    monkeypatch.setattr("warnings.showwarning", warnings.showwarning)  # which main replaces
    for more in ((), ("--skip-bad",)):
        monkeypatch.setattr("sys.argv", ["protofed", "data", "show", f"folder:{path}", *more])
        with pytest.raises(SystemExit):
            cli.main()
        said = "".join(capsys.readouterr())
        assert "a/x/1\N{REPLACEMENT CHARACTER}[2J.png" in said and "\x1b" not in said


def test_a_run_on_a_folder_and_its_results_without_it(name: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run(task=name, out=out, flip=False, image_size=16, **SMALL)
    config = result.config
    assert (config.image_size, config.flip, config.test_split) == (16, False, "auto")
    assert result.facts["digest"] == load_task(name, image_size=16).digest
    assert load_run(out).config == config
    assert load_run(out).network()
    (tmp_path / "pets").rename(tmp_path / "gone")
    again = load_run(out)
    assert again.config.hash == config.hash and again.accuracy == result.accuracy


def test_the_hash_knows_the_images_not_their_place(
    name: str, tmp_path: Path, pictures: Any
) -> None:
    def run_name(task: str, **more: Any) -> str:
        return Federation(make_config(task, **SMALL, **more)).name

    before = run_name(name)
    assert before.startswith("folder-pets-fedavg-0-")
    shutil.copytree(tmp_path / "pets", tmp_path / "copy" / "pets")
    copy = f"folder:{tmp_path / 'copy' / 'pets'}"
    assert run_name(copy) == before
    assert run_name(name, flip=False) != before
    assert run_name(name, image_size=16) != before
    (tmp_path / "copy" / "pets" / "b" / "cat" / "0.png").write_bytes(pictures.one(1234))
    assert run_name(copy) != before
    run(name, out=tmp_path / "run", **SMALL)
    with pytest.raises(ProtofedError, match=r"another configuration.*digest \w{64} → \w{64}"):
        run(copy, out=tmp_path / "run", resume=True, **SMALL)


def test_a_run_with_the_augmentation_of_large_images(name: str) -> None:
    result = run(task=name, augment="large", **SMALL)
    plain = run(task=name, **SMALL)
    assert result.config.hash != plain.config.hash
    assert any(not (result.model[k] == plain.model[k]).all() for k in plain.model if "weight" in k)


def test_a_run_lists_what_it_skips(name: str, tmp_path: Path) -> None:
    (tmp_path / "pets" / "b" / "cat" / "3.png").write_bytes(b"")
    (tmp_path / "pets" / "b" / "cat" / "\x1b[2J.png").write_bytes(b"")
    arguments = ("--protocol", "glyphs", "--rounds", "1", "--epochs", "1", "--device", "cpu")
    result = invoke("run", "--task", name, "--out", str(tmp_path / "o"), "--skip-bad", *arguments)
    assert result.exit_code == 0, result.output
    assert "skipped file: " in result.output and "b/cat/3.png: it is empty" in result.output
    assert any("3.png" in line for line in load_run(tmp_path / "o").summary["skipped"])
    again = invoke("predict", str(tmp_path / "o"), str(tmp_path / "pets"), "--skip-bad")
    assert again.exit_code == 0, again.output
    for said in (result.output, again.output):
        assert "b/cat/\N{REPLACEMENT CHARACTER}[2J.png" in said
    assert "\x1b" not in result.output + again.stderr  # the table of predictions is data
