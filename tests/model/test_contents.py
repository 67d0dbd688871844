"""Lines about a checkpoint's files: all of a small file, samples of a large one, every header."""

import pytest
import torch
from safetensors.torch import save_file

from lockstep.errors import ModelError
from lockstep.model.contents import SMALL_FILE, content_lines


def lines_of(folder, tensors, **options):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", **options)
    return content_lines(dict.fromkeys(tensors, folder / "model.safetensors"))


def changed(tensors, name, index):
    out = {key: value.clone() for key, value in tensors.items()}
    out[name][index] += 1
    return out


def test_small_files_are_read_whole(tmp_path):
    tensors = {"a": torch.zeros(9000), "b": torch.zeros(3, 5, dtype=torch.bfloat16), "c": torch.zeros(0)}
    lines = lines_of(tmp_path / "one", tensors)
    assert lines == lines_of(tmp_path / "two", tensors) and len(lines) == 4
    for index in (0, 2222, 8999):
        other = lines_of(tmp_path / "two", changed(tensors, "a", index))
        assert [mine == its for mine, its in zip(lines, other, strict=True)] == [
            "stored a" not in line for line in lines
        ]


def test_large_tensors_are_sampled_and_small_ones_beside_them_are_not(tmp_path):
    tensors = {"large": torch.zeros(SMALL_FILE // 4 + 5), "small": torch.zeros(4096)}
    lines = lines_of(tmp_path, tensors)
    seen = ((0, True), (1023, True), (5000, False), (SMALL_FILE // 4 + 4, True), (SMALL_FILE // 4 - 1030, False))
    for index, is_seen in seen:
        assert (lines_of(tmp_path, changed(tensors, "large", index)) != lines) == is_seen, index
    assert lines_of(tmp_path, changed(tensors, "small", 2000)) != lines


def test_dtypes_shapes_and_sizes_are_told(tmp_path):
    lines = lines_of(tmp_path, {"a": torch.zeros(4, 6)})
    assert lines_of(tmp_path, {"a": torch.zeros(6, 4)})[0] != lines[0]
    assert lines_of(tmp_path, {"a": torch.zeros(4, 6, dtype=torch.int32)})[0] != lines[0]
    longer = lines_of(tmp_path, {"a": torch.zeros(4, 6)}, metadata={"note": "x" * 99})
    assert longer[0] == lines[0] and longer[1] != lines[1]


@pytest.mark.parametrize("blob", [b"", b"\x10\0\0\0\0\0\0\0not json", b"\x02\0\0\0\0\0\0\0{}extra"[:5]])
def test_a_file_that_is_none_is_named(tmp_path, blob):
    (tmp_path / "model.safetensors").write_bytes(blob)
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read"):
        content_lines({"a": tmp_path / "model.safetensors"})
