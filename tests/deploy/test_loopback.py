"""Two sites over loopback, with TLS and authenticated sites; nothing here is a stand-in."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.deploy.exploits import assert_gate_is_shut, assert_tasks_need_the_secret
from tests.deploy.loopback_world import TINY, Deployment

from protofed.runs.result import load_run

SITES = ("scan-0", "print-0")
SAMPLES = ("--samples", "scan=30,print=24")


@pytest.mark.drill
def test_sites_over_loopback_equal_the_simulator(deployment: Deployment, tmp_path: Path) -> None:
    deployment.init("--gather-seconds", "200", "--minimum", "2", sites=SITES)
    for name in SITES:
        deployment.relay(name)
    deployment.server()
    home = deployment.home / "server"
    assert_gate_is_shut(deployment.port, home / "ca.crt")
    link = tomllib.loads((home / "operator" / "config.toml").read_text())["superlink"]["federation"]
    assert_tasks_need_the_secret(link["address"], home / "flower" / "loopback-ca.crt")
    for name in SITES:
        deployment.site(name)
    done = deployment.start("--method", "fpl", "--rounds", "2", *TINY, *SAMPLES, "--wait")
    assert done.returncode == 0, done.stdout + done.stderr + deployment.log()
    records = deployment.assert_simulators("fpl", tmp_path / "oracle")
    assert all("problems" not in r for r in records)
    # for each site and round: what passed the wire, and what the run counted
    first, second = deployment.round_times()
    bill = load_run(deployment.run_of("fpl")).summary["wire"]
    for site in SITES:
        relay = deployment.relays[site]
        for record, since, until in ((records[0], 0.0, first), (records[1], first, second)):
            for way in ("up", "down"):
                tensors = record[f"bytes_{way}"] / len(SITES)
                objects = record["wire"][site][way]
                passed = relay.bytes(way, since, until)
                assert tensors < objects < 1.05 * tensors + 10_000
                # TLS, HTTP and the polling of a waiting node grow with time, not with the model
                assert objects < passed < 1.05 * objects + 250_000, (site, record["round"], way)
        for way in ("up", "down"):  # including the last evaluation
            assert bill[site][way] > sum(r["wire"][site][way] for r in records)
            assert bill[site][way] < relay.bytes(way, 0.0, 1e12) < 1.05 * bill[site][way] + 700_000
