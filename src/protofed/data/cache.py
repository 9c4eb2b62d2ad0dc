"""Where made or downloaded data is kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The cache folder: ``PROTOFED_CACHE``, else ``protofed`` in the user's cache folder."""
    own = os.environ.get("PROTOFED_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says a relative path is invalid and is to be ignored.
    root = Path(shared) if Path(shared).is_absolute() else Path.home() / ".cache"
    return root / "protofed"
