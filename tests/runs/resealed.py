"""Changed files of a run whose checksums match again, so that what is tested is their content."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from protofed.files import checksum


def reseal(file: Path) -> None:
    """Give the objects in a JSON, JSON lines (also packed) or TOML file the checksums they need."""
    content = file.read_bytes()
    if file.suffix == ".toml":
        text = content.decode()
        text = text.partition("\n")[2] if text.startswith("# checksum ") else text
        content = f"# checksum {checksum(text)}\n{text}".encode()
    elif file.suffix == ".gz":
        content = gzip.compress(_lines(gzip.decompress(content)))
    else:
        content = _lines(content) if file.suffix == ".jsonl" else _object(content)
    file.write_bytes(content)


def _lines(content: bytes) -> bytes:
    return b"".join(_object(line) + b"\n" for line in content.splitlines())


def _object(text: bytes) -> bytes:
    found = json.loads(text)
    if not isinstance(found, dict):
        return text
    found.pop("checksum", None)
    return json.dumps({**found, "checksum": checksum(json.dumps(found))}).encode()
