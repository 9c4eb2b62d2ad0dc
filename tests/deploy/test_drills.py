"""Faults of a real deployment over loopback, by doing them: ``make drill``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from tests.deploy.flower_world import images, in_file_order, pictures, write_site
from tests.deploy.loopback_world import PROTOFED, SAMPLES, SITES, TINY, Deployment
from tests.deploy.spoiled import SPOILED

from protofed import tree
from protofed.deploy.certificates import Authority, node_key
from protofed.deploy.members import read_members
from protofed.runs.model_file import read_model
from protofed.runs.records import read_records
from protofed.runs.run import run

pytestmark = pytest.mark.drill
HERE = Path(__file__).parent


def test_equality_with_a_killed_server_and_a_killed_site(
    deployment: Deployment, tmp_path: Path
) -> None:
    deployment.init("--gather-seconds", "200", "--minimum", "3")
    deployment.server()
    for name in SITES:
        deployment.site(name)
    for method in ("fpl", "i2pfl"):
        words = ("--method", method, "--rounds", "3", *TINY, *SAMPLES, "--wait")
        done = deployment.start(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        deployment.assert_simulators(method, tmp_path / f"oracle-{method}")
    # FedSeProto keeps private entries at the sites. After the first round the server dies, and a
    # site with it, which has to find its private state on its disk again.
    words = ("--method", "fedseproto", "--rounds", "3", *TINY, *SAMPLES)
    assert deployment.start(*words).returncode == 0
    deployment.until(
        lambda: "round 1/3: 3 of 3" in deployment.log("fedseproto"), 200, "the first round"
    )
    deployment.kill("server")
    deployment.kill("print-0")
    assert not list((deployment.home / "server/runs").glob("*-fedseproto-*/summary.json"))
    deployment.server()
    deployment.site("print-0")
    refused = deployment.start(*words)
    assert refused.returncode == 2 and "--resume" in refused.stderr
    done = deployment.start(*words, "--resume", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed after round" in deployment.log("fedseproto")
    deployment.assert_simulators("fedseproto", tmp_path / "oracle-fedseproto")


def test_a_site_joins_late_is_killed_and_comes_back(deployment: Deployment) -> None:
    deployment.init("--gather-seconds", "5", "--wait-seconds", "200", "--round-seconds", "300")
    deployment.server()
    for name in ("scan-0", "print-0"):
        deployment.site(name)
    deployment.until(lambda: deployment.status().count("): connected") == 2, 120, "two sites")
    words = ("--method", "fpl", "--rounds", "60", *TINY, *SAMPLES)
    assert deployment.start(*words).returncode == 0
    deployment.until(lambda: "round 1/60: 2 of 3" in deployment.log(), 200, "round 1")
    deployment.site("photo-0")
    deployment.until(lambda: ": 3 of 3" in deployment.log(), 200, "the late site")
    asked = deployment.text("print-0").count("Receiving: train message")
    deployment.until(
        lambda: deployment.text("print-0").count("Receiving: train message") > asked, 120, "a round"
    )
    deployment.kill("print-0")
    killed = time.monotonic()
    deployment.until(lambda: "site print-0: error" in deployment.log(), 150, "the lost site")
    lost = time.monotonic() - killed
    assert lost < 120, lost
    deployment.until(lambda: deployment.log().count(": 2 of 3") >= 2, 60, "the round without it")
    before = deployment.log().count(": 3 of 3")
    deployment.site("print-0")
    deployment.until(lambda: deployment.log().count(": 3 of 3") >= before + 2, 200, "its return")
    second = deployment.start("--method", "fedavg", "--rounds", "9")
    assert second.returncode == 2 and "protofed deploy stop" in second.stderr, second.stderr
    assert deployment.cli("stop", "--dir", str(deployment.home)).returncode == 0
    records = read_records(deployment.run_of("fpl") / "rounds.jsonl")
    assert records[0]["problems"] == {"photo-0": "not connected"}
    assert any("error 5" in r.get("problems", {}).get("print-0", "") for r in records)
    assert records[-1]["clients"] == 3


def test_bad_replies_of_a_real_site(deployment: Deployment) -> None:
    """A site with a good key and bad answers: each refused by name, and the rounds go on."""
    kinds = ("nan", "shape", "dtype", "giant", "empty", "other method", "stale",
             "huge prototypes", "billion samples", "test images", "variance")  # fmt: skip
    plan = {str(i + 1): kind for i, kind in enumerate(kinds)}
    late, die = len(kinds) + 1, len(kinds) + 3  # and a round to come back after each
    plan |= {str(late): "late", str(die): "die"}
    rounds, limit = die + 2, 80
    deployment.init(
        "--gather-seconds", "200", "--minimum", "1", "--round-seconds", str(limit),
        sites=("scan-0", "print-0"),
    )  # fmt: skip
    deployment.server()
    deployment.site("scan-0")
    paths = [str(HERE / "rogue"), str(HERE.parents[1])]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    rogue = {"ROGUE": json.dumps(plan), "ROGUE_LATE": str(limit + 5)}
    deployment.site("print-0", PYTHONPATH=os.pathsep.join(paths), **rogue)
    words = ("--method", "fpl", "--rounds", str(rounds), *TINY, "--samples", "scan=30,print=24")
    done = deployment.start(*words, "--wait", seconds=900)
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_records(deployment.run_of("fpl") / "rounds.jsonl")
    assert len(records) == rounds
    for i, kind in enumerate(kinds, start=1):
        assert records[i]["clients"] == 1, kind
        assert "refused" in records[i]["problems"]["print-0"], kind
        assert SPOILED[kind][1] in records[i]["problems"]["print-0"], kind
        assert "scan-0" not in records[i]["problems"], kind
    assert records[late]["problems"] == {"print-0": f"no reply within {limit} s"}
    assert records[late]["clients"] == 1 and records[late]["seconds"]["train"] < limit + 15
    assert "print-0" in records[die]["problems"]
    assert records[die]["seconds"]["train"] < limit + 15
    for fine in (0, late + 1, die + 1):
        assert records[fine]["clients"] == 2, fine


def test_wrong_certificates_unknown_keys_and_too_few(deployment: Deployment) -> None:
    deployment.init("--gather-seconds", "3", "--wait-seconds", "5")
    sites = deployment.home / "sites"
    deployment.server()
    other, (key, _) = Authority("other"), node_key()
    home = str(deployment.home)
    right = (sites / "scan-0" / "ca.crt").read_bytes()
    (sites / "scan-0" / "ca.crt").write_bytes(other.certificate)
    done = deployment.cli("site", "--dir", home, "--site", "scan-0", "--patience", "1")
    assert done.returncode == 2 and "CERTIFICATE_VERIFY_FAILED" in done.stdout + done.stderr
    (sites / "scan-0" / "ca.crt").unlink()
    done = deployment.cli("site", "--dir", home, "--site", "scan-0", "--patience", "1")
    assert done.returncode == 2 and "ca.crt" in done.stderr
    (sites / "scan-0" / "ca.crt").write_bytes(right)
    (sites / "print-0" / "node.key").write_bytes(key)
    done = deployment.cli("site", "--dir", home, "--site", "print-0", "--patience", "1")
    assert done.returncode == 2 and "cannot join" in done.stderr
    assert "2004" in done.stdout + done.stderr
    deployment.site("scan-0")  # one site, and two are needed
    done = deployment.start("--method", "fpl", "--rounds", "2", *TINY, *SAMPLES, "--wait")
    assert done.returncode == 2
    assert "waiting for sites" in done.stdout and "a round needs 2" in deployment.log()
    done = deployment.cli("stop", "--dir", home)
    assert done.returncode == 2 and "no run is running" in done.stderr


def test_sites_with_folders_a_run_is_looked_at_stopped_and_resumed(
    deployment: Deployment, tmp_path: Path, grid: Callable[..., Any], single_thread: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The way of a consortium, with images of its own; equal to the same run in one process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    classes = {
        "north": ("cat", "dog", "eel"), "south": ("cat", "dog"), "coast": ("cat", "dog", "eel"),
    }  # fmt: skip
    deployment.init(
        "--classes", "cat,dog,eel", "--image-size", "16", "--minimum", "3",
        "--gather-seconds", "200", "--domains", "south=inland,north=inland", sites=tuple(classes),
    )  # fmt: skip
    for site, own in classes.items():
        images(tmp_path / "data" / site, own, split=site == "coast")
    deployment.server()
    for site in classes:
        deployment.site(site, "--data", str(tmp_path / "data" / site))
    words = ("--method", "fpl", "--rounds", "16", "--epochs", "1", "--batch", "4",
             "--model", "cnn2", "--width", "4", "--seed", "3")  # fmt: skip
    assert deployment.start(*words).returncode == 0
    declares = "it takes part once you confirm"
    deployment.until(lambda: deployment.log().count(declares) == 3, 200, "what sites declare")
    done = deployment.cli("confirm", "--dir", str(deployment.home))
    assert done.returncode == 0 and done.stdout.count(", confirmed") == 3, done.stdout
    deployment.until(lambda: "round 1/16: 3 of 3" in deployment.log(), 200, "the first round")
    during = deployment.status()
    assert during.count("): connected") == 3 and ": running" in during, during
    assert "last in the log: " in during, during
    stopped = deployment.cli("stop", "--dir", str(deployment.home))
    assert stopped.returncode == 0 and "is stopped" in stopped.stdout
    out = deployment.run_of("fpl")
    assert not (out / "summary.json").exists()
    assert "finished:stopped" in deployment.status()
    done = deployment.start(*words, "--resume", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the run ended: stopped" in deployment.log()
    records = read_records(out / "rounds.jsonl")
    assert [r["clients"] for r in records] == [3] * 16
    assert set(records[-1]["accuracy"]) == {"inland", "coast"}
    # the same in one process, without interruption
    members = read_members(deployment.home / "server")
    for site in classes:
        home = tmp_path / "homes" / site
        home.mkdir(parents=True)
        shutil.copy(deployment.home / "server" / "federation.toml", home)
        write_site(home, tmp_path / "data" / site)
    (own,) = (deployment.home / "server" / "apps").glob("*.toml")
    spec = tomllib.loads(own.read_text("utf-8"))["spec"]
    grid(members, tmp_path / "homes", spec, tmp_path / "oracle").run()
    assert tree.equal(
        tree.load(out / "model.safetensors")[0],
        tree.load(tmp_path / "oracle" / "model.safetensors")[0],
    )
    report = subprocess.run(
        [PROTOFED, "report", str(out), "--out", str(tmp_path / "report.html")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert report.returncode == 0, report.stderr


def test_public_images_are_compared_and_the_models_are_the_simulators(
    deployment: Deployment, tmp_path: Path, single_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sites with folders and different models; one has other public images at first."""
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "cache"))
    classes = {
        "coast-0": ("cat", "dog", "eel"), "north-0": ("cat", "dog", "eel"),
        "south-0": ("cat", "dog"),
    }  # fmt: skip
    deployment.init(
        "--classes", "cat,dog,eel", "--image-size", "16", "--minimum", "2", "--gather-seconds",
        "200", "--domains", ",".join(f"{s}={s[:-2]}" for s in classes), sites=tuple(classes),
    )  # fmt: skip
    public = pictures(tmp_path / "secret-name", 30)
    for site, own in classes.items():
        images(tmp_path / "data" / site[:-2], own, split=site == "coast-0")
        shutil.copytree(public, tmp_path / f"copy-{site}")
    missing = tmp_path / "copy-north-0" / "batch1" / "patient7.png"
    missing.rename(tmp_path / "forgotten.png")
    with (deployment.home / "sites" / "south-0" / "site.toml").open("a") as file:
        file.write(f"public = {json.dumps(str(tmp_path / 'copy-south-0'))}\n")
    deployment.server()
    for site in classes:
        named = () if site == "south-0" else ("--public", str(tmp_path / f"copy-{site}"))
        deployment.site(site, "--data", str(tmp_path / "data" / site[:-2]), *named)
    settings: dict[str, Any] = {
        "rounds": 2, "epochs": 1, "batch": 4, "model": "cnn3,cnn2", "width": 4, "seed": 3,
    }  # fmt: skip
    words = ["--method", "fedmd", "--set", "images=20", "--public", str(public), "--wait"]
    words.append("--confirm")
    for name, value in settings.items():
        words += [f"--{name}", str(value)]
    done = deployment.start(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "public: 30 images (" in done.stdout
    assert "site north-0: public folder: 29 images (" in deployment.text("north-0")
    out = deployment.run_of("fedmd")
    records = read_records(out / "rounds.jsonl")
    assert [r["clients"] for r in records] == [2, 2]
    for record in records:
        assert "site 'north-0' differ from the run's: 29 images (" in str(record["problems"])
        assert "copy the folder again" in record["problems"]["north-0"]
    # copied again, the running site takes part: it compares for every message
    shutil.copy(tmp_path / "forgotten.png", tmp_path / "copy-north-0" / "new name.png")
    done = deployment.start(*words, "--overwrite")
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_records(out / "rounds.jsonl")
    assert [r["clients"] for r in records] == [3, 3] and "problems" not in records[0]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["public"] == {"folder": 20}
    in_file_order(monkeypatch, summary["clients"])
    options = {"images": 20, "public": f"folder:{public}"}
    oracle = run(f"folder:{tmp_path / 'data'}", "fedmd", options=options, image_size=16,
                 device="cpu", engine="loop", out=tmp_path / "oracle", **settings)  # fmt: skip
    for site in classes:
        folder = deployment.home / "sites" / site / "models"
        own = read_model(folder / f"{out.name}.safetensors").clients[site]
        assert tree.equal({"model": own}, {"model": oracle.client_models[site]})
    for mine, other in zip(records, oracle.rounds, strict=True):
        assert mine["loss"] == other["loss"] and mine["bytes_up"] == other["bytes_up"]
    # neither paths nor names of public images have left their machines
    traveled = [*(deployment.home / "server" / "apps").rglob("*.toml"), *out.iterdir(),
                 *out.parent.glob("*.log")]  # fmt: skip
    for path in traveled:
        content = path.read_bytes()
        assert not any(w in content for w in (b"secret-name", b"patient", b"copy-")), path
