"""One `DataSource` section in, its rows out: a list of mappings that hold at least the prompt and answer columns.

JSONL, Parquet, a folder that `datasets.save_to_disk` wrote, or a named task (tasks.py). Files are read where they lie;
nothing is copied into a cache and nothing is downloaded.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet

from lockstep.config import DataSource
from lockstep.data.tasks import make_rows
from lockstep.errors import DataError

Row = Mapping[str, Any]


def load_rows(source: DataSource, *, origin: str) -> list[Row]:
    """All rows that the section asks for, in the file's order.

    `origin` is the section's key ("data.train"), for messages. Raises `DataError` for a path that is missing or of an
    unknown kind, a broken line, a column or split that is not there, and fewer rows than `num_rows`.
    """
    if source.task:
        rows = make_rows(source, origin=origin)
    else:
        rows = list(itertools.islice(_read(source, origin), source.num_rows))
        _check_count(rows, source, origin)
    _check_columns(rows, source, origin)
    return rows


def _read(source: DataSource, origin: str) -> Iterable[Any]:
    path = Path(source.path).expanduser()
    if not path.exists():
        here = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
        raise DataError(f"{origin}.path: {source.path!r} does not exist{here}; give a file or a folder")
    if path.is_dir():
        return _saved_dataset(path, source, origin)
    if path.suffix in (".jsonl", ".ndjson"):
        return _json_lines(path, origin)
    if path.suffix == ".parquet":
        return _parquet(path, origin)
    raise DataError(
        f"{origin}.path: expected a .jsonl or .parquet file, or a folder saved by datasets.save_to_disk; "
        f"{str(path)!r} came"
    )


def _json_lines(path: Path, origin: str) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _json_row(line, f"{origin}: {path} line {number}")
        except UnicodeDecodeError as error:
            raise DataError(f"{origin}: {path} is not UTF-8 text ({error.reason}); save it as UTF-8") from error


def _json_row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}: {_clip(line)}"
        ) from error
    if not isinstance(row, dict):
        raise DataError(f'{where}: expected an object such as {{"prompt": ...}}; {_clip(line)} came')
    return row


def _parquet(path: Path, origin: str) -> Iterator[Row]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{origin}: {path} is not a readable Parquet file: {error}") from error


def _saved_dataset(path: Path, source: DataSource, origin: str) -> Iterable[Any]:
    try:
        loaded = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise DataError(
            f"{origin}.path: the folder {path} was not saved by datasets.save_to_disk; "
            "give such a folder, or one .jsonl or .parquet file"
        ) from error
    except Exception as error:  # datasets 5.2 fails with an IndexError on a folder without rows
        raise DataError(
            f"{origin}.path: datasets cannot load the folder {path}: {type(error).__name__}: {error}; "
            "it is empty or damaged, so save it again"
        ) from error
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if source.split not in loaded:
        raise DataError(f"{origin}.split: {path} has no split {source.split!r}; it has {', '.join(map(str, loaded))}")
    return loaded[source.split]


def _check_count(rows: list[Row], source: DataSource, origin: str) -> None:
    if not rows:
        raise DataError(f"{origin}: {source.path} holds no rows; at least one is needed")
    if source.num_rows is not None and len(rows) < source.num_rows:
        raise DataError(
            f"{origin}.num_rows: {source.num_rows} rows are asked for, {source.path} holds {len(rows)}; "
            "lower it, or leave it out to take them all"
        )


def _check_columns(rows: list[Row], source: DataSource, origin: str) -> None:
    wanted = {"prompt_column": source.prompt_column}
    if source.answer_column:
        wanted["answer_column"] = source.answer_column
    for number, row in enumerate(rows):
        for option, column in wanted.items():
            if _is_missing(row.get(column)):
                raise DataError(_no_column(f"{origin}.{option}", column, row, number))


def _is_missing(value: Any) -> bool:
    """NaN is how pandas writes that a number is missing."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _no_column(option: str, column: str, row: Row, number: int) -> str:
    if column in row:
        empty = " (or set answer_column to '' if the data has no answers)" if option.endswith("answer_column") else ""
        return f"{option}: row {number} (counted from 0) has no value in {column!r}; fill it or remove the row{empty}"
    near = difflib.get_close_matches(column, row, n=1)
    nearest = f"; the nearest is {near[0]!r}" if near else ""
    return f"{option}: row {number} (counted from 0) has no column {column!r}; it has {', '.join(row)}{nearest}"


def _clip(line: str) -> str:
    text = line.strip()
    return repr(text if len(text) <= 80 else text[:80] + "...")
