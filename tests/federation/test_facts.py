"""Facts: what a run finds, and the name they give it."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.federation.facts import (
    MANY_QUEUES,
    WORK_QUEUES,
    Facts,
    _head,
    ask_for_work_queues,
    choose_engine,
    discover,
    find_commit,
    find_device,
    find_precision,
)
from protofed.testing.checks import TINY, tiny_task


def facts_of(config, task=None, **changes) -> Facts:
    return replace(discover(config, task or tiny_task()), **changes)


def test_cuda_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == "cpu"
    with pytest.raises(ProtofedError, match="no GPU") as error:
        find_device("cuda")
    assert "--device cpu" in error.value.hint


def test_lanes_get_work_queues_unless_processes_share_them(monkeypatch):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setenv(WORK_QUEUES, "4")
    ask_for_work_queues()
    assert os.environ[WORK_QUEUES] == "4", "what a user says is kept"
    monkeypatch.delenv(WORK_QUEUES)
    ask_for_work_queues()
    assert os.environ[WORK_QUEUES] == MANY_QUEUES
    monkeypatch.delenv(WORK_QUEUES)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "somewhere")
    ask_for_work_queues()
    assert WORK_QUEUES not in os.environ
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    facts_of(make_config(tiny_task(), "fedavg", **{**TINY, "device": "cpu"}))
    assert WORK_QUEUES not in os.environ, "only a run on a GPU asks"
    facts_of(make_config(tiny_task(), "fedavg", **{**TINY, "device": "auto"}))
    assert os.environ[WORK_QUEUES] == MANY_QUEUES


def test_precision_is_what_was_asked_for_or_what_the_device_can(monkeypatch):
    assert find_precision("auto", "cpu") == "fp32"
    assert find_precision("fp64", "cpu") == "fp64"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert find_precision("auto", "cuda") == "bf16"


def test_the_engine_follows_the_device():
    assert choose_engine("auto", "cuda")[0] == "lanes"
    assert choose_engine("auto", "cpu", 4)[0] == "workers"
    assert choose_engine("auto", "cpu", 1)[0] == "loop"
    assert choose_engine("loop", "cuda") == ("loop", "asked for")
    with pytest.raises(ProtofedError, match="needs a GPU"):
        choose_engine("lanes", "cpu")
    with pytest.raises(ProtofedError, match="runs on the CPU"):
        choose_engine("workers", "cuda")


def test_a_runs_name_stands_for_config_and_facts():
    config = make_config(tiny_task(), **TINY)
    facts = facts_of(config)
    assert facts.run_name(config) == f"tiny-fedavg-0-{facts.run_hash(config)}"
    changed = [
        facts_of(config, digest="a"),
        facts_of(config, digest="b"),
        facts_of(config, public_digest="3-x"),
        facts_of(config, precision="bf16"),
        facts_of(config, device="cuda"),
    ]
    hashes = {f.run_hash(config) for f in (facts, *changed)}
    assert len(hashes) == len(changed) + 1  # a/pets and b/pets never collide
    same = [facts_of(config, engine="loop"), facts_of(config, versions={}, hardware="another")]
    assert {f.run_hash(config) for f in same} == {facts.run_hash(config)}


def test_what_was_asked_for_explicitly_is_the_same_run():
    plain = make_config(tiny_task(), **TINY)
    explicit = make_config(tiny_task(), **{**TINY, "device": "cpu", "precision": "fp32"})
    assert facts_of(plain).run_hash(plain) == facts_of(explicit).run_hash(explicit)


def test_facts_are_plain_data_and_back():
    facts = facts_of(make_config(tiny_task(), **TINY))
    assert Facts.from_dict({**facts.to_dict(), "of a later version": 1}) == facts
    config = make_config(tiny_task(), **TINY)
    applied = facts.applied(config)
    assert (applied.device, applied.precision) == (facts.device, facts.precision)


def test_a_run_of_a_checkout_knows_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    find_commit.cache_clear()
    monkeypatch.setenv("PROTOFED_COMMIT", "abc1234")  # a copy without its history
    try:
        assert find_commit() == "abc1234"
        find_commit.cache_clear()
        monkeypatch.delenv("PROTOFED_COMMIT")
        found = find_commit()
        assert not found or re.fullmatch("[0-9a-f]{7}", found)
    finally:
        find_commit.cache_clear()


def test_the_commit_is_read_from_git_s_files(tmp_path: Path) -> None:
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs\n1111111aaaa refs/heads/main\n")
    assert _head(git) == "1111111aaaa"
    (git / "refs" / "heads" / "main").write_text("2222222bbbb\n")  # newer than the packed one
    assert _head(git) == "2222222bbbb"
    own = git / "worktrees" / "w"
    own.mkdir(parents=True)
    (own / "HEAD").write_text("ref: refs/heads/main\n")
    (own / "commondir").write_text("../..\n")
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / ".git").write_text(f"gitdir: {own}\n")
    assert _head(tmp_path / "w" / ".git") == "2222222bbbb"
    (own / "HEAD").write_text("3333333cccc\n")
    assert _head(tmp_path / "w" / ".git") == "3333333cccc"
