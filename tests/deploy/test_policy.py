"""A site decides: its policy, the approval of runs, and what it writes down."""

from __future__ import annotations

import re
import resource
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict
from typer.testing import CliRunner

from protofed.cli.app import app
from protofed.deploy import policy as policy_module
from protofed.deploy.audit import AuditLog
from protofed.deploy.client_app import handle
from protofed.deploy.messages import Request, write
from protofed.deploy.policy import Approvals, Policy, read_policy
from protofed.deploy.setup import init
from protofed.deploy.site import SITE_FILE, answer, read_site_config
from protofed.deploy.wire import Refused, add_tree, read_tree
from protofed.errors import ProtofedError
from protofed.files import CannotWrite
from protofed.method import Slots
from protofed.methods import METHODS
from protofed.runs.records import read_records

HERE = "print-0"


def set_policy(w: Any, text: str, *sites: str) -> None:
    for site in sites or (HERE,):
        path = w.folder / "homes" / site / SITE_FILE
        path.write_text(path.read_text() + f"[policy]\n{text}\n")


def problems(w: Any) -> list[str]:
    """What the records say of the site, round by round."""
    return [r.get("problems", {}).get(HERE, "") for r in read_records(w.out / "rounds.jsonl")]


def audit(w: Any, site: str = HERE) -> list[dict[str, Any]]:
    return list(AuditLog(w.folder / "homes" / site).entries())


OUTSIDE = {
    'methods = ["fedavg", "i2pfl"]': "method = 'fpl': the site's policy allows fedavg, i2pfl",
    "max_rounds = 1": "rounds = 2: the site's policy allows at most 1",
    "max_epochs = 1": "epochs = 2: the site's policy allows at most 1",
    "max_batch = 4": "batch = 8: the site's policy allows at most 4",
    "max_lr = 1e-3": "lr = 0.01: the site's policy allows at most 0.001",
    "min_lr = 0.1": "lr = 0.01: the site's policy allows at least 0.1",
    'models = ["resnet10"]': "model = 'cnn2': the site's policy allows resnet10",
    "max_width = 1": "width = 2: the site's policy allows at most 1",
    'norms = ["group"]': "norm = 'batch': the site's policy allows group",
}
INSIDE = """
methods = ["fpl"]
max_rounds = 2
max_epochs = 2
max_batch = 8
min_lr = 0.01
max_lr = 0.01
models = ["cnn2"]
max_width = 2
norms = ["batch"]
max_delta = 1e-9
private_state = false
"""


def ask(w: Any, policy: str, round: int = 0) -> Any:
    """What the site of this policy says to a message."""
    site = read_site_config(w.folder / "homes" / HERE)
    path = site.folder / SITE_FILE
    path.write_text(f'site = "{HERE}"\ndevice = "cpu"\n[policy]\n{policy}\n')
    request = Request(HERE, w.run.hash, round, train=True, evaluate=False, accepted="")
    content = add_tree(write(request), w.coordinator().server.broadcast())
    return answer(read_site_config(site.folder), w.spec, content)


def test_what_is_outside_is_refused_by_the_settings_name(world: Callable[..., Any]) -> None:
    w = world(rounds=2, epochs=2, norm="batch", schedule="cosine")
    for policy, said in OUTSIDE.items():
        with pytest.raises(Refused, match=re.escape(said)):
            ask(w, policy + "\napproval = true")  # nobody is asked to approve it
        asked, refused = audit(w)[-2:]
        assert (asked["event"], refused["event"]) == ("asked", "refused")
        assert (refused["why"], refused["run"], refused["round"]) == (said, w.run.hash, 1)
    ask(w, INSIDE, round=1)
    assert audit(w)[-1]["event"] == "sent"


def test_the_server_learns_the_settings_name_and_goes_on_without_the_site(
    world: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    w = world(rounds=1, epochs=2)
    set_policy(w, "max_epochs = 1")
    w.coordinator().run()
    (record,) = read_records(w.out / "rounds.jsonl")
    assert record["clients"] == 2
    assert OUTSIDE["max_epochs = 1"] in record["problems"][HERE]


def test_a_phase_of_the_method_is_held_to_the_policy(world: Callable[..., Any]) -> None:
    w = world("fedmd", {"digest_batch": 64}, rounds=2)
    with pytest.raises(Refused, match="batch = 64: the site's policy allows at most 32"):
        ask(w, "max_batch = 32", round=1)
    with pytest.raises(Refused, match="epochs = 2: the site's policy allows at most 1"):
        ask(w, "max_epochs = 1", round=1)  # one of each phase


def test_a_width_is_refused_before_the_model_is_built(world: Callable[..., Any]) -> None:
    config = world(rounds=1).run.config
    small = Policy(max_width=31)
    small.check(replace(config, width=31))
    for width, found in ((10**5, "100000"), (None, "32")):
        with pytest.raises(Refused, match=f"width = {found}: the site's policy allows at most 31"):
            small.check(replace(config, width=width))


def test_privacy_budgets_that_a_policy_demands(world: Callable[..., Any]) -> None:
    pytest.importorskip("dp_accounting")
    budget = {"proto_epsilon": 5.0, "update_epsilon": 50.0, "delta": 1e-3, "norm": "group"}
    protected, open_, scaffold = world(rounds=1, **budget), world(rounds=1), world("scaffold")
    said = ": the site's policy allows at most"
    for w, policy, why in (
        (protected, "max_proto_epsilon = 4", f"proto_epsilon = 5{said} 4"),
        (protected, "max_update_epsilon = 40", f"update_epsilon = 50{said} 40"),
        (protected, "max_delta = 1e-4", f"delta = 0.001{said} 0.0001"),
        (open_, "max_proto_epsilon = 4", f"proto_epsilon is not set{said} 4"),
        (open_, "max_update_epsilon = 40", f"update_epsilon is not set{said} 40"),
        (scaffold, "max_proto_epsilon = 4", f"proto_epsilon is not set{said} 4"),
    ):
        with pytest.raises(Refused, match=re.escape(why)):
            ask(w, policy)
    ask(protected, "max_proto_epsilon = 5\nmax_update_epsilon = 50\nmax_delta = 1e-3")
    ask(world("fedavg"), "max_proto_epsilon = 1e-3")  # has no prototypes to protect
    ask(world("fedgh"), "max_update_epsilon = 1e-3")  # its model stays at the site


@pytest.mark.parametrize("method", ["fedbn", "moon"])
def test_no_private_state_is_kept_where_the_policy_allows_none(
    world: Callable[..., Any], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(method, rounds=2, norm="batch")
    said = re.escape(
        f"method = '{method}' keeps a private state at the site, and the site's policy allows none"
    )
    with monkeypatch.context() as patch, pytest.raises(Refused, match=said):
        patch.setattr("protofed.deploy.site.train_client", lambda *_: pytest.fail("it trained"))
        ask(w, "private_state = false")
    if method == "moon":  # one that does not say so is found out when it is to be kept
        monkeypatch.setattr(METHODS[method], "slots", Slots())
        with pytest.raises(Refused, match=said):
            ask(w, "private_state = false")
    states = w.folder / "homes" / HERE / "states"
    assert not states.exists()
    ask(w, "private_state = true")
    assert any(states.iterdir())


def test_a_policy_may_demand_more_images_of_a_class(world: Callable[..., Any]) -> None:
    w = world(rounds=1, min_class_count=2)
    set_policy(w, "min_class_count = 1000")
    counts = {}

    def spoil(name: str, reply: Any) -> Any:
        if reply.has_content() and "tree.prototypes" in reply.content.array_records:
            counts[name] = read_tree(reply.content)["prototypes"]["count"]
        return reply

    w.grid.spoil = spoil
    w.coordinator().run()
    assert not counts[HERE].any()
    assert set(counts["scan-0"].tolist()) - {0.0} and 1.0 not in counts["scan-0"].tolist()
    assert problems(w) == [""]


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("max_round = 1", "max_rounds"),
        ("max_rounds = 0", "max_rounds of .policy. in .* must be a whole number"),
        ("max_lr = 'high'", "max_lr of"),
        ("max_width = 2.5", "max_width of .policy. in .* must be a whole number"),
        ("max_proto_epsilon = 0", "max_proto_epsilon of .policy. in .* must be"),
        ("max_delta = 1", "max_delta of .policy. in .* must be"),
        ("methods = 'fpl'", "must be a list of names"),
        ("methods = []", "must be a list of names"),
        ("methods = ['fpll']", "fpl"),
        ("norms = ['layer']", "norms"),
        ("approval = 1", "must be true or false"),
    ],
)
def test_a_wrong_policy_is_an_error_before_the_site_joins(
    world: Callable[..., Any], policy: str, said: str
) -> None:
    w = world(rounds=1)
    set_policy(w, policy)
    with pytest.raises(ProtofedError, match=said):
        read_site_config(w.folder / "homes" / HERE)


def test_the_documented_policies_have_every_limit(tmp_path: Path) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    init(tmp_path / "f", ["a", "b"], classes=["x", "y"])
    written = (tmp_path / "f" / "sites" / "a" / SITE_FILE).read_text()
    commented = written.partition("# [policy]")[2].replace("\n# ", "\n")
    for text in (docs.partition("```toml\n[policy]")[2].partition("```")[0], commented):
        raw = tomllib.loads(text)
        assert raw.keys() == {field.name for field in fields(Policy)}
        read_policy(Path(SITE_FILE), raw, {})


# ---- approval -----------------------------------------------------------------------------------


def cli(*words: str) -> str:
    done = CliRunner().invoke(app, ["deploy", *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_a_run_waits_until_it_is_approved_at_the_site(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(rounds=2, minimum=3, wait_seconds=60.0)
    set_policy(w, "approval = true")
    home = w.folder / "homes" / HERE
    coordinator = w.coordinator()
    seen: list[str] = []

    def approve(sites: Any) -> bool:
        """In place of the wait: what the people at the site do."""
        seen.extend(sites)
        said = cli("approve", "--dir", str(home))
        assert f"{w.run.hash}  waits" in said and "method fpl" in said and "rounds 2" in said
        cli("approve", w.run.hash, "--dir", str(home))
        return True

    monkeypatch.setattr(coordinator, "_wait_for_approval", approve)
    coordinator.run()
    assert seen == [HERE] and problems(w) == ["", ""]
    events = [entry["event"] for entry in audit(w)]
    assert events == [
        "asked",
        "refused",
        "approved",
        "asked",
        "sent",
        "asked",
        "sent",
        "asked",
        "sent",
    ]
    assert f"run {w.run.hash} waits for approval at the site (approval)" in audit(w)[1]["why"]
    assert f"{w.run.hash}  approved" in cli("approve", "--dir", str(home))
    with pytest.raises(ProtofedError, match="unknown run that this site was asked for"):
        cli("approve", "0000000000", "--dir", str(home))


def test_the_server_waits_for_approval_as_long_as_for_sites(world: Callable[..., Any]) -> None:
    w = world(rounds=1, minimum=3, wait_seconds=1.0)
    set_policy(w, "approval = true")
    with pytest.raises(ProtofedError, match=rf"failed 3 times.*run {w.run.hash} waits for approv"):
        w.coordinator().run()
    assert len(audit(w)) > 2 * 3


def test_an_approval_is_for_all_of_a_run(world: Callable[..., Any]) -> None:
    """A spec with the same hash but another text needs another approval, under another name.

    Under the same name, it could take the other's place between the list and the approval.
    """
    w = world(rounds=1)
    home = w.folder / "homes" / HERE
    approvals = Approvals(home)
    with pytest.raises(ProtofedError, match="waits for approval"):
        approvals.require(w.run, w.spec)
    approvals.approve(w.run.hash)
    approvals.require(w.run, w.spec)
    other = w.spec.replace('"skip_bad": false', '"skip_bad": true')
    for _ in range(2):
        with pytest.raises(ProtofedError, match=f"run {w.run.hash}-2 waits for approval"):
            approvals.require(w.run, other)
    listed = approvals.list()
    assert [(r["run"], bool(r["approved"])) for r in listed] == [
        (w.run.hash, True), (f"{w.run.hash}-2", False)
    ]  # fmt: skip
    approvals.require(w.run, w.spec)  # still approved
    approvals.approve(f"{w.run.hash}-2")
    approvals.require(w.run, other)
    (home / "approvals" / f"{w.run.hash}.json").unlink()
    approvals.require(w.run, other)
    with pytest.raises(ProtofedError, match=f"run {w.run.hash} waits for approval"):
        approvals.require(w.run, w.spec)


def test_a_server_cannot_fill_a_site_with_texts_of_one_run(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_module, "MAX_TEXTS", 2)
    w = world(rounds=1)
    approvals = Approvals(w.folder / "homes" / HERE)
    for number, words in enumerate(["waits", "waits", "with 2 other settings"]):
        with pytest.raises(ProtofedError, match=words):
            approvals.require(w.run, f"text {number}")


# ---- the audit log ------------------------------------------------------------------------------


def test_the_audit_log_has_what_was_asked_and_what_was_sent(world: Callable[..., Any]) -> None:
    w = world(rounds=1)
    w.coordinator().run()
    asked, sent, last_asked, last_sent = audit(w)
    assert asked["settings"]["method"] == "fpl" and asked["settings"]["lr"] == 0.01
    assert asked["train"] and not last_asked["train"] and last_asked["round"] == 1
    assert [e["round"] for e in (asked, sent, last_asked, last_sent)] == [1, 1, 1, 1]
    assert asked["received"]["model"]["bytes"] > 0
    slots = sent["slots"]
    assert slots["prototypes"]["shapes"]["count"] == [10] and slots["prototypes"]["norm"] > 0
    assert sent["samples"] == 24 and last_sent["tested"] > 0 and last_sent["slots"] == {}
    path = w.folder / "homes" / HERE / "audit.jsonl"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_message_that_cannot_be_written_down_is_not_answered(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(rounds=1)
    path = w.folder / "homes" / HERE / "audit.jsonl"
    path.mkdir()  # not even root can write a file there
    w.coordinator().run()
    assert "CannotWrite" in problems(w)[0]


def test_messages_for_others_and_after_the_last_round_are_refused_and_noted(
    world: Callable[..., Any],
) -> None:
    w = world(rounds=2)
    site = read_site_config(w.folder / "homes" / HERE)
    asked = Request(HERE, w.run.hash, 0, train=True, evaluate=False, accepted="")
    for request, said in (
        (replace(asked, site="scan-0"), "the message is for 'scan-0'"),
        (replace(asked, round=2), "round 2: the run has rounds = 2"),
        (replace(asked, round=-1), "round -1: the run has rounds = 2"),
        (replace(asked, run="0000000000"), "the message is for run 0000000000"),
    ):
        with pytest.raises(ProtofedError, match=said):
            answer(site, w.spec, write(request))
        assert said in audit(w)[-1]["why"]
    with pytest.raises(ProtofedError, match="cannot be read"):
        answer(site, "{}", write(asked))
    assert audit(w)[-1]["event"] == "failed"


def test_text_from_the_server_is_one_line_at_the_site(
    world: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A forged line in its log, or commands to its terminal."""
    w = world(rounds=1)
    home = w.folder / "homes" / HERE
    evil = "x\n2025-01-01 all is well\x1b[2J\u202e"
    request = Request(HERE, evil, 0, train=True, evaluate=False, accepted="")
    context = Context(1, 1, {"site-folder": str(home)}, RecordDict(), {"spec": w.spec})
    reply = handle(Message(write(request), dst_node_id=1, message_type="train"), context)
    assert reply.has_error()
    assert all(m.isprintable() for m in caplog.messages), caplog.messages
    AuditLog(home).append("refused", why=f"\ud800 {evil}")  # half a character
    shown = cli("audit", "--dir", str(home))
    assert all(line.isprintable() for line in shown.splitlines()) and "2 entries" not in shown
    assert audit(w)[-1]["why"].startswith("\ud800 x")


def test_tampering_is_found_and_named(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    assert "0 entries" in cli_audit(tmp_path)
    for n in range(5):
        log.append("asked", run="r", n=n)
    said = cli_audit(tmp_path)
    assert "5 entries" in said and log.head in said and said.count("asked") == 5
    whole = log.path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for spoiled, number in (
        ([*lines[:2], lines[2].replace(b'"n": 2', b'"n": 7'), *lines[3:]], 4),
        ([*lines[:2], *lines[3:]], 3),
        ([lines[1], *lines[2:]], 1),
        ([lines[0], lines[0], *lines[1:]], 2),
        ([*lines[:1], lines[2], lines[1], *lines[3:]], 2),
        ([*lines[:4], lines[4][:-9]], 5),
        ([*lines[:3], b"\n", *lines[3:]], 4),
        ([*lines[:3], b"[" * 100_000 + b"\n", *lines[3:]], 4),
        ([*lines[:4], lines[4].replace(b'"event"', b'"what"')], 5),
        ([*lines[:3], b"[]\n", *lines[3:]], 4),
    ):
        log.path.write_bytes(b"".join(spoiled))
        with pytest.raises(ProtofedError, match=f"line {number} "):
            list(log.entries())
        with pytest.raises(ProtofedError, match="has been altered"):
            cli_audit(tmp_path)
    log.append("asked")  # after a crash the log goes on, and the damage stays visible
    with pytest.raises(ProtofedError, match="line 4 "):
        list(log.entries())
    log.path.write_bytes(whole)
    head = log.head
    log.path.write_bytes(b"".join(lines[:-1]))
    assert log.head != head and len(list(log.entries())) == 4


def test_long_entries_and_a_torn_last_line(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    for n in (1, 10**5, 3):
        log.append("sent", why="ü\n" * n)
    assert len(list(log.entries())) == 3
    log.path.write_bytes(log.path.read_bytes()[:-5])
    log.append("sent")
    assert log.path.read_bytes().count(b"\n") == 4  # the torn line stays apart from the next
    with pytest.raises(ProtofedError, match="line 3 is not an entry"):
        list(log.entries())


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    log.append("asked")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 50, hard))
    try:
        with pytest.raises(CannotWrite):
            log.append("sent", why="x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.append("failed")
    assert [entry["event"] for entry in log.entries()] == ["asked", "failed"]


def cli_audit(folder: Path) -> str:
    (folder / SITE_FILE).touch()
    return cli("audit", "--dir", str(folder))
