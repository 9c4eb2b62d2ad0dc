from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(single_thread: None) -> None:
    """The oracles' tensors are tiny, and the package's run is as it always is."""
