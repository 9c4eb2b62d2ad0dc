from __future__ import annotations

import pytest
from tests.engines.lanes.cpu_stand_in import pretend


@pytest.fixture
def lanes_on_cpu(monkeypatch: pytest.MonkeyPatch, single_thread: None) -> None:
    """Lanes run on a CPU, with stand-ins for streams and graphs."""
    pretend(monkeypatch)
