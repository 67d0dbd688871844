"""A checkpoint's safetensors files in, lines that tell what they hold out: equal for equal files, other for nearly all others.

Ranks compare these lines before each reads its own rows, so that copies on several machines that are not the same are noticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import xxhash

from lockstep.errors import ModelError

SMALL_FILE = 4 << 20
"""Files up to this size (bytes) are digested whole."""
_BLOCK = 4 << 10
_NUM_BLOCKS = 4


def content_lines(weights: Mapping[str, Path]) -> list[str]:
    """A line for each stored tensor of each file, then one for each file's size. Not collective.

    `weights`: stored name -> its file. Told of a tensor: file name (not its folder), name, dtype, shape, place, and an xxh3-128
    of its bytes: of all of them in a file of at most 4 MiB and in a tensor of at most 16 KiB, else of 4 blocks of 4 KiB, the
    first, the last and two between. So another training run's values are seen and another dtype or layout always; what differs
    only between the blocks of a large tensor is not. The files' free metadata is told by nothing but the file's size.
    Raises `ModelError` for a file that cannot be read.
    """
    lines: list[str] = []
    sizes: list[str] = []
    for path in sorted(set(weights.values())):
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                lines += sorted(_tensor_lines(file, path.name, size))
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        sizes.append(f"stored file {path.name}: {size} bytes")
    return lines + sizes


def _tensor_lines(file: BinaryIO, name: str, size: int) -> Iterator[str]:
    """In the order in which the tensors lie in the file. Its form: 8 bytes of length, JSON of that length, the tensors' bytes."""
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for stored, said in sorted(header.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
        begin, end = said["data_offsets"]
        is_whole = size <= SMALL_FILE or end - begin <= _BLOCK * _NUM_BLOCKS
        digest = xxhash.xxh3_128()
        for start, stop in [(begin, end)] if is_whole else _blocks(begin, end):
            file.seek(8 + length + start)
            digest.update(file.read(stop - start))
        yield (
            f"stored {stored} {said['dtype']} {said['shape']} at {begin} of {name}, xxh3 of "
            f"{'its bytes' if is_whole else 'a sample of its bytes'} {digest.hexdigest()}"
        )


def _blocks(begin: int, end: int) -> list[tuple[int, int]]:
    step = (end - begin - _BLOCK) // (_NUM_BLOCKS - 1)
    starts = [begin + index * step for index in range(_NUM_BLOCKS - 1)] + [end - _BLOCK]
    return [(start, start + _BLOCK) for start in starts]
