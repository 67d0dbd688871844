"""Reading one's own data: each kind of file, and each way in which it is not what the recipe says."""

import json
import math

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from lockstep.config import DataSource
from lockstep.data.source import load_rows
from lockstep.errors import DataError

ROWS = [{"prompt": "1 + 2", "answer": "3", "level": 1}, {"prompt": "2 + 2", "answer": "4", "level": None}]
CHAT = [{"role": "system", "content": "add"}, {"role": "user", "content": "1 + 2"}]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def save_dataset(path, rows):
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


def save_splits(path, rows):
    held_out = datasets.Dataset.from_list(rows[:1])
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows), "test": held_out}).save_to_disk(path)
    return path


KINDS = {"rows.jsonl": write_jsonl, "rows.parquet": write_parquet, "saved": save_dataset, "splits": save_splits}


def read(path, **options):
    return load_rows(DataSource(path=str(path), **options), origin="data.train")


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_same_rows(tmp_path, name):
    path = KINDS[name](tmp_path / name, ROWS)
    assert [dict(row) for row in read(path)] == ROWS
    assert [dict(row) for row in read(path, num_rows=1)] == ROWS[:1]


@pytest.mark.parametrize("name", KINDS)
def test_conversations_survive(tmp_path, name):
    path = KINDS[name](tmp_path / name, [{"prompt": CHAT, "answer": "3"}])
    assert read(path)[0]["prompt"] == CHAT


def test_a_split_is_taken_by_name(tmp_path):
    path = save_splits(tmp_path / "splits", ROWS)
    assert len(read(path, split="test")) == 1


def test_columns_are_named_by_the_recipe(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": "1 + 2"}])
    assert len(read(path, prompt_column="question", answer_column="")) == 1


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"prompt": "1 + 2", "answer": "3"}\n\n  \n', encoding="utf-8")
    assert read(path) == [{"prompt": "1 + 2", "answer": "3"}]


def test_a_task_has_the_same_way_in():
    source = DataSource(task="sums", task_args={"low": 1, "high": 5}, num_rows=3)
    assert len(load_rows(source, origin="data.train")) == 3


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_rows": 3}, r"data\.train\.num_rows: 3 rows are asked for, .* holds 2"),
        (
            {"prompt_column": "promt"},
            r"data\.train\.prompt_column: row 0 .* no column 'promt'; it has prompt, answer, level; the nearest is 'prompt'",
        ),
        ({"answer_column": "anwser"}, r"data\.train\.answer_column: .* the nearest is 'answer'"),
        ({"answer_column": "level"}, r"row 1 \(counted from 0\) has no value in 'level'.*set answer_column to ''"),
    ],
)
def test_what_the_rows_do_not_hold_is_named(tmp_path, name, options, said):
    path = KINDS[name](tmp_path / name, ROWS)
    with pytest.raises(DataError, match=said):
        read(path, **options)


def test_a_column_that_one_line_lacks_is_named_with_its_row(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "3 + 3"}])
    with pytest.raises(DataError, match=r"row 2 .* has no column 'answer'; it has prompt$"):
        read(path)


def test_not_a_number_is_no_answer(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "3 + 3", "answer": math.nan}])
    with pytest.raises(DataError, match=r"row 2 .* has no value in 'answer'"):
        read(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "2 + 2",', r"line 3 is not JSON: Expecting property name .* at column \d+: '{\"prompt\""),
        ("[1, 2]", r"line 3: expected an object such as .*; '\[1, 2\]' came"),
        ("x" * 200, r"line 3 is not JSON: .*: 'x{80}\.\.\.'"),
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path, line, said):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=said):
        read(path)


def test_a_file_that_was_cut_off_says_so(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    path.write_text(path.read_text()[:-4])
    with pytest.raises(DataError, match=r"line 2 is not JSON: .* at column \d+: "):
        read(path)
    path.write_text('{"prompt": "2')
    with pytest.raises(DataError, match=r"line 1 is not JSON: Unterminated string starting at column 12: "):
        read(path)


def test_files_that_are_not_what_they_are_called(tmp_path):
    latin, parquet = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    latin.write_bytes('{"prompt": "é", "answer": "3"}'.encode("latin-1"))
    parquet.write_text("no parquet")
    with pytest.raises(DataError, match="not UTF-8"):
        read(latin)
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read(parquet)


@pytest.mark.parametrize("name", KINDS)
def test_an_empty_data_set_is_refused(tmp_path, name):
    empty = {"rows.parquet": pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})}
    path = tmp_path / name
    if name in empty:
        pyarrow.parquet.write_table(empty[name], path)
    elif name == "rows.jsonl":
        path.write_text("\n")
    else:
        nothing = datasets.Dataset.from_dict({"prompt": [], "answer": []})
        (nothing if name == "saved" else datasets.DatasetDict({"train": nothing})).save_to_disk(path)
    with pytest.raises(DataError, match=r"data\.train: .* holds no rows|it is empty or damaged"):
        read(path)


def test_paths_that_hold_no_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("prompt,answer\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=rf"data\.train\.path: 'no\.jsonl' does not exist \(looked in {tmp_path}\)"):
        read("no.jsonl")
    with pytest.raises(DataError, match=r"expected a \.jsonl or \.parquet file, .* 'rows\.csv' came"):
        read("rows.csv")
    with pytest.raises(DataError, match=r"folder was not saved by datasets\.save_to_disk"):
        read("folder")


def test_a_split_that_is_not_there_names_those_that_are(tmp_path):
    with pytest.raises(DataError, match="no split 'eval'; it has train, test"):
        read(save_splits(tmp_path / "splits", ROWS), split="eval")
