"""Records of rounds: columns, means, and the file they are read from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protofed.errors import ProtofedError
from protofed.files import checksum
from protofed.runs.records import Records, digest, last_mean, read_records, to_line


def record(round: int, **loss: float) -> dict[str, Any]:
    accuracy = {"left": 10.0 * round, "right": 50.0}
    average = sum(accuracy.values()) / 2
    return {"round": round, "accuracy": accuracy, "average": average, "loss": loss, "clients": 4}


def test_columns_rows_and_html() -> None:
    records = Records([record(i, ce=1.0, cpcl=0.5 * i) for i in (1, 2, 3)])
    assert records["average"] == [30, 35, 40]
    assert records["accuracy.left"] == [10, 20, 30]
    assert records["round"] == [1, 2, 3]
    assert records[0]["round"] == 1
    assert records.columns[:4] == ["round", "accuracy.left", "accuracy.right", "average"]
    rows = records.rows()
    assert [list(row) for row in rows] == [records.columns] * 3
    assert rows[2]["loss.cpcl"] == records[2]["loss"]["cpcl"]
    assert not any(isinstance(v, dict) for row in rows for v in row.values())
    html = records._repr_html_()
    assert html.count("<tr>") == 4
    for column in records.columns:
        assert f"<th>{column}</th>" in html
    assert f"<td>{records[1]['average']:.4g}</td>" in html
    with pytest.raises(KeyError):
        records["nothing"]
    assert Records().columns == []
    assert Records()._repr_html_().count("<tr>") == 1


def test_columns_of_rounds_with_other_terms() -> None:
    html = Records([record(1, ce=1.0), record(2, ce=0.5, later=0.1)])._repr_html_()
    heads, *rows = html.split("<tr>")[1:]
    assert "loss.later" in heads
    assert [row.count("<td>") for row in rows] == [heads.count("<th>")] * 2


def test_last_mean_by_hand() -> None:
    records = [
        {"accuracy": {"a": float(i), "b": 10.0 * i}, "average": 5.5 * i} for i in range(1, 8)
    ]
    assert last_mean(records) == {"a": 5.0, "b": 50.0, "average": 27.5}  # rounds 3 to 7
    assert last_mean(records[:5]) == {"a": 3.0, "b": 30.0, "average": 16.5}
    assert last_mean(records[:2]) == {"a": 1.5, "b": 15.0, "average": 8.25}
    assert last_mean(records[:1]) == {"a": 1.0, "b": 10.0, "average": 5.5}


@pytest.mark.parametrize("cut", ['{"round": 2, "acc', "{", '{"round": 2}'])
def test_a_truncated_last_line_is_ignored(tmp_path: Path, cut: str) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text(to_line(record(1)) + cut)
    assert read_records(path) == [record(1)]


def test_a_line_cut_inside_a_character_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    first = {"round": 1, "accuracy": {"grün": 1.0}, "average": 1.0}
    content = (to_line(first) * 2).encode()
    path.write_bytes(content[: content.rindex("ü".encode()) + 1])
    assert read_records(path) == [first]


def test_earlier_versions_counted_rounds_from_0(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    old, new = [record(i) for i in range(3)], [{**record(i), "round": i + 1} for i in range(3)]
    path.write_text("".join(map(to_line, old)))
    assert read_records(path) == new
    assert digest(new) == checksum(json.dumps(old)), "what they stored with them stays valid"
    for wrong in ([record(2), record(3)], [record(0), record(2)], [record(1), record(1)]):
        path.write_text("".join(map(to_line, wrong)))
        with pytest.raises(ProtofedError, match="is not the record of round"):
            read_records(path)


def test_damaged_records(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    with pytest.raises(ProtofedError, match=r"cannot read '.*rounds\.jsonl'"):
        read_records(path)
    nothing = '{"round": 1, "accuracy": {}, "average": 50.0}\n'
    for text in ("garbage\n{}\n", "{}\n", "[1]\n", nothing):
        path.write_text(text)
        with pytest.raises(ProtofedError, match=r"rounds\.jsonl.*damaged"):
            read_records(path)
    path.write_text("")
    assert read_records(path) == []
