"""Claims: one holder, taken over when dead or silent, whoever asks first."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from protofed.studies import claims
from protofed.studies.claims import Claim, holder


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run[1].claim"  # a name that a glob would misread


def foreign(path, **change):
    """A claim of another machine."""
    found = {"host": "far", "machine": "boot ns", "pid": 1, "started": "1", "token": "t", **change}
    path.write_text(json.dumps(found))


def test_one_holds_it_until_it_is_released(path):
    claim = Claim.acquire(path)
    assert claim is not None
    assert holder(path).pid == os.getpid()
    assert Claim.acquire(path) is None
    assert claim.held()
    claim.release()
    assert list(path.parent.iterdir()) == []
    assert holder(path) is None


def test_of_many_threads_one_succeeds(path):
    barrier, won = threading.Barrier(8), []

    def attempt():
        barrier.wait()
        won.append(Claim.acquire(path))

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(claim is not None for claim in won) == 1


def test_of_many_who_find_it_stale_at_most_one_succeeds(path):
    foreign(path)
    os.utime(path, (0, 0))
    barrier, won = threading.Barrier(8), []

    def attempt():
        barrier.wait()
        won.append(Claim.acquire(path))

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (claim,) = [c for c in won if c is not None]
    assert claim.number == 2
    claim.release()
    assert list(path.parent.iterdir()) == []


def test_a_dead_process_of_this_machine_loses_it_at_once(path):
    mine = claims.me()
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    foreign(path, machine=mine.machine, host=mine.host, pid=done.pid, started=mine.started)
    assert holder(path) is None
    claim = Claim.acquire(path)
    assert claim is not None
    assert claim.number == 2
    claim.release()


def test_a_process_id_that_is_used_again_is_not_the_holder(path):
    mine = claims.me()
    foreign(path, machine=mine.machine, pid=mine.pid, started="another time")
    assert holder(path) is None


def test_another_machine_keeps_it_while_it_beats(path):
    foreign(path)
    assert holder(path).host == "far"
    assert "far" in str(holder(path))
    assert Claim.acquire(path) is None
    silent = time.time() - claims.STALE_SECONDS
    os.utime(path, (silent - 5, silent - 5))
    assert holder(path) is None
    claim = Claim.acquire(path)
    assert claim is not None
    claim.release()
    assert list(path.parent.iterdir()) == []


def test_a_file_not_yet_written_counts(path):
    path.touch()
    assert holder(path) is not None
    assert Claim.acquire(path) is None


def test_who_slept_too_long_notices(path):
    claim = Claim.acquire(path)
    lost = threading.Event()
    claim.keep(lost.set, every=0.02)
    time.sleep(0.1)
    assert not lost.is_set()
    foreign(path.with_name(f"{path.name}.2"))  # somebody took over
    assert lost.wait(5)
    claim.release()
    assert path.with_name(f"{path.name}.2").exists()  # it is not ours to remove


def test_releasing_ends_the_beat(path):
    claim = Claim.acquire(path)
    lost = threading.Event()
    claim.keep(lost.set, every=0.02)
    claim.release()
    assert not lost.wait(0.2)
