"""Rows of local files, and the line that a mistake is in."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from runtime.problems.rows import DataError, is_file, read_file

ROWS = [{"question": "a\u2028b", "n": 1}, {"question": "c", "m": 2.5}]


def test_the_three_forms_give_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), encoding="utf-8")
    (tmp_path / "x.json").write_text(json.dumps(ROWS, indent=2), encoding="utf-8-sig")
    parquet.write_table(pa.Table.from_pylist([{"n": None, "m": None} | row for row in ROWS]), tmp_path / "x.parquet")

    tables = [read_file(str(tmp_path / f"x.{suffix}")) for suffix in ("jsonl", "json", "parquet")]

    assert [table.unit for table in tables] == ["line", "row", "row"]
    for table in tables:
        assert set(table.columns) == {"question", "n", "m"}
        assert [(number, row["question"]) for number, row in table.read(["question"])] == [(1, "a\u2028b"), (2, "c")]


def test_blank_lines_count_as_lines_and_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\r\n\r\n{"a": 2}\n')

    assert [number for number, _ in read_file(str(tmp_path / "x.jsonl")).read(["a"])] == [1, 3]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(), min_size=1, max_size=5))
def test_any_text_survives_jsonl(tmp_path: Path, texts: list[str]) -> None:
    lines = (json.dumps({"a": text}) for text in texts)
    (tmp_path / "x.jsonl").write_text("\n".join(lines), encoding="utf-8")

    assert [row["a"] for _, row in read_file(str(tmp_path / "x.jsonl")).read(["a"])] == texts


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b'{"a": 1}\n{"a": ', r"x\.jsonl:2: is no JSON"),
        (b'{"a": 1}\n\n7\n', r"x\.jsonl:3: must be a JSON object .*, is a int"),
        (b'{"a": 1}\n{"a": "\xff"}', r"x\.jsonl:2: is no UTF-8 text"),
        (b'[{"a": 1}, 2]', r"x\.jsonl: row 2: must be a JSON object"),
        (b"", r"x\.jsonl: is empty"),
        (b"[]", r"x\.jsonl: is empty"),
        (b"PAR1 and no more", r"x\.jsonl: is no Parquet file"),
        (b'{"a": ' + b"9" * 5000 + b"}", r"x\.jsonl:1: is no JSON"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, content: bytes, line: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)

    with pytest.raises(DataError, match=line) as caught:
        read_file(str(tmp_path / "x.jsonl"))

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "is_path"),
    [("openai/gsm8k", False), ("data/x.jsonl", True), ("~/x", True), ("./x", True), ("/x", True), ("x.parquet", True)],
)
def test_a_path_is_told_from_the_id_of_a_dataset(source: str, is_path: bool) -> None:
    assert is_file(source) is is_path
