"""A method that reads files between sites: each machine has copies, and finds them by content."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from safetensors.torch import load_file, save_file
from tests.some_methods import options_of

from protofed.config import method_files
from protofed.deploy import operator
from protofed.deploy.spec import FILES, pack, unpack, with_own_files
from protofed.deploy.wire import Refused
from protofed.runs.records import read_records

BAD = "print-0"
OPTIONS = options_of("ccst")


def copies(home: Path) -> dict[str, Path]:
    return {path.stem.removeprefix("copy-of-"): path for path in (home / FILES).iterdir()}


def test_no_path_travels_and_none_that_does_is_opened(
    world: Callable[..., Any], tmp_path: Path
) -> None:
    w = world("ccst", OPTIONS, rounds=1)
    outline = unpack(w.spec)
    assert outline.hash == w.run.hash
    assert outline.config.method.options()["encoder"] == "file:"
    for path in method_files(w.config.method).values():
        assert path not in w.spec
    told = json.loads(w.spec)
    told["method"]["options"]["encoder"] = f"file:{tmp_path / 'private'}"
    own = with_own_files(unpack(json.dumps(told)), w.folder / "homes" / BAD / FILES, "it")
    found = {name: Path(path) for name, path in method_files(own.config.method).items()}
    assert found == copies(w.folder / "homes" / BAD)
    assert own.hash == w.run.hash


def test_a_site_with_other_files_or_none_is_refused_and_the_rounds_continue(
    world: Callable[..., Any],
) -> None:
    w = world("ccst", OPTIONS, rounds=2)
    path = copies(w.folder / "homes" / BAD)["decoder"]
    weights = load_file(path)
    weights["28.bias"] += 1
    save_file(weights, path)
    for _ in range(2):
        w.coordinator().run(overwrite=True)
        for record in read_records(w.out / "rounds.jsonl"):
            problem = record["problems"][BAD]
            words = f"site '{BAD}' has no copy of the file that ccst needs as its decoder"
            assert words in problem and "into files/ in its own folder" in problem
            assert record["clients"] == 2 and list(record["problems"]) == [BAD]
        path.unlink(missing_ok=True)  # the second time, it has none


def test_the_operator_hands_copies_to_the_server(
    world: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world("ccst", OPTIONS, rounds=1)
    monkeypatch.setattr(operator, "runs", lambda folder: [])
    monkeypatch.setattr(operator, "flwr", lambda *_: {"run-id": 7})
    server = tmp_path / "new-server"
    assert operator.start(server, w.run, resume=False, overwrite=False) == 7
    digests = str(w.run.facts.files_digest).split(",")
    assert sorted(p.name for p in (server / FILES).iterdir()) == sorted(digests)
    own = with_own_files(unpack(pack(w.run)), server / FILES, "the server")
    for name, path in method_files(own.config.method).items():
        original = Path(method_files(w.config.method)[name])
        assert Path(path).read_bytes() == original.read_bytes()
    (server / FILES / digests[0]).write_bytes(b"other")
    with pytest.raises(Refused, match=r"the server has no copy of the file .* as its encoder"):
        with_own_files(unpack(pack(w.run)), server / FILES, "the server")


@pytest.mark.parametrize("digests", [None, "", "0", "0,0,0"])
def test_a_run_with_other_digests_than_files_is_refused(
    world: Callable[..., Any], digests: str | None
) -> None:
    w = world("ccst", OPTIONS, rounds=1)
    told = json.loads(w.spec)
    told["facts"]["files_digest"] = digests
    told["hash"] = unpack_hash(told)
    with pytest.raises(Refused, match="needs as its encoder"):
        with_own_files(unpack(json.dumps(told)), w.folder / "homes" / BAD / FILES, "it")


def unpack_hash(told: dict[str, Any]) -> str:
    """The hash of a run as its text has it."""
    from protofed.errors import ProtofedError

    with pytest.raises(ProtofedError) as error:
        unpack(json.dumps(told))
    return error.value.message.split()[4]
