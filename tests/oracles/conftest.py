from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(single_thread: None) -> None:
    """The oracles' tensors are tiny, and the package's run is as it always is."""


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """That a wrong oracle is noticed is a test of the tests: `make slow` does it."""
    for item in items:
        if "oracles" in item.path.parts and "noticed" in item.name:
            item.add_marker(pytest.mark.slow)
