"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write ``content`` to ``path`` so that a reader sees the old file or the new, never a part.

    Also after a power cut: the content is on the disk before its name is. The temporary file has
    a name of its own, so that two processes may write at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp's 0600 would lock out the other users of a shared folder
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
