"""Rows of a local file, JSONL, JSON or Parquet, with their numbers, so that a mistake can be found again."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PARQUET_MAGIC = b"PAR1"
_SUFFIXES = frozenset({".jsonl", ".json", ".parquet"})

Row = Mapping[str, Any]
"""Values by column."""


class DataError(ValueError):
    """Rows cannot be read, or are no problems; one line that begins with the file or dataset."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with named columns, read when they are asked for.

    Attributes:
        name: The file or dataset, as messages call it.
        stem: A short word for it, for the ids of its problems.
        unit: What its numbers count: "line" or "row".
        columns: Every column that a row has, in the order in which they first come.
        read: Numbers from 1 and rows, of which the given columns are wanted; a row may lack some of them.
    """

    name: str
    stem: str
    unit: str
    columns: tuple[str, ...]
    read: Callable[[Sequence[str]], Iterator[tuple[int, Row]]]


def is_file(source: str) -> bool:
    """Whether a source is meant as a local file: it exists, or looks like a path rather than a dataset's id."""
    is_path = source.startswith(("/", ".", "~")) or Path(source).suffix in _SUFFIXES
    return is_path or Path(source).exists()


def read_file(source: str) -> Table:
    """Opens a file: Parquet by its first bytes, a JSON array by its first character, and else JSONL.

    Args:
        source: Path; `~` is the home folder.

    Raises:
        DataError: There is no such file, it is empty, or a line of it is no JSON object.
    """
    path = Path(source).expanduser()
    try:
        with path.open("rb") as file:
            is_parquet = file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
        if is_parquet:
            return _parquet(path, name=source)
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{source}: {error.strerror}") from error
    text = _decode(content, name=source)
    is_array = text.lstrip().startswith("[")
    rows = _array(text, name=source) if is_array else dict(_lines(text, name=source))
    if not rows:
        raise DataError(f"{source}: is empty, it must have at least one row")
    columns = dict.fromkeys(column for row in rows.values() for column in row)
    return Table(
        name=source,
        stem=path.stem,
        unit="row" if is_array else "line",
        columns=tuple(columns),
        read=lambda _wanted: iter(rows.items()),
    )


def _decode(content: bytes, *, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name}:{line}: is no UTF-8 text") from error


def _lines(text: str, *, name: str) -> Iterator[tuple[int, Row]]:
    # Not splitlines(), which also parts at U+2028 and others that stand unescaped in JSON texts.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, _object(_parse(line, place=f"{name}:{number}"), place=f"{name}:{number}")


def _array(text: str, *, name: str) -> dict[int, Row]:
    values = _parse(text, place=name)
    return {number: _object(value, place=f"{name}: row {number}") for number, value in enumerate(values, start=1)}


def _parse(text: str, *, place: str) -> Any:
    try:
        return json.loads(text)
    # Besides what is no JSON: integers of more digits than Python reads, and brackets nested too deep for it.
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: is no JSON: {error}") from error


def _object(value: Any, *, place: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{place}: must be a JSON object with a value for each column, is a {type(value).__name__}")
    return value


def _parquet(path: Path, *, name: str) -> Table:
    from pyarrow import ArrowException, parquet  # noqa: PLC0415  0.3 s, which only Parquet files need

    try:
        file = parquet.ParquetFile(path)
    except ArrowException as error:
        raise DataError(f"{name}: is no Parquet file that can be read: {_first_line(error)}") from error
    if file.metadata.num_rows == 0:
        raise DataError(f"{name}: is empty, it must have at least one row")

    def read(wanted: Sequence[str]) -> Iterator[tuple[int, Row]]:
        number = 0
        try:
            for batch in file.iter_batches(columns=list(wanted)):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except (ArrowException, OSError) as error:
            raise DataError(f"{name}: cannot be read after row {number}: {_first_line(error)}") from error

    return Table(name=name, stem=path.stem, unit="row", columns=tuple(file.schema_arrow.names), read=read)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
