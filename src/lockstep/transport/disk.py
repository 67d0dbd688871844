"""Buckets in, the same tensors in a process that sees the same folder, out: safetensors files and a marker. The slow reference.

    <folder>/version-<version>-<update id>/bucket-00000.safetensors ...   one file per bucket
    <folder>/version-<version>-<update id>/COMMITTED.json                 version, digest, files and their sizes

The marker is written last, by a rename, and the engine reads nothing before it. It says how large every file is and the
digest says what is in it, so that a torn write (a full disk, a power cut between data and marker) is refused, not served.
Memory: the outlet copies one bucket, the inlet holds one. Disk: the update being written and `keep` committed ones.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from lockstep.errors import TransportError
from lockstep.transport.base import Control, raw_bytes
from lockstep.transport.ends import Outlet, ReceiverInlet
from lockstep.transport.packet import Layout, Piece, dtype_name, layout_from_json, layout_to_json
from lockstep.types import Bucket, Manifest, TensorSpec

log = logging.getLogger(__name__)

MARKER = "COMMITTED.json"
_FOLDER = re.compile(r"version-\d+-[0-9a-f]{32}")
_PLAIN = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip
"""Dtypes that every safetensors >= 0.5 stores under their own name. The others are stored as bytes, with a layout."""
_RESERVED = "__metadata__"
"""safetensors keeps this name for itself."""


class DiskOutlet(Outlet):
    """The trainer's end. `keep` committed updates stay in `folder`, the newest included.

    The folder is made where it is missing, and is this outlet's alone until it is closed or its process has ended:
    replicas get one each. Unfinished and old updates that are found in it are removed.
    """

    def __init__(self, control: Control, folder: Path | str, *, keep: int = 1):
        super().__init__(control)
        if keep < 1:
            raise ValueError(f"keep must be at least 1, the update that is served; {keep} came")
        self._folder = Path(folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._keep = keep
        self._path: Path | None = None
        self._files: dict[str, int] = {}
        self._release = _own(self, self._folder)
        self._tidy()

    def _open(self, manifest: Manifest, payload: dict[str, Any]) -> None:
        self._path = self._folder / f"version-{manifest.version}-{payload['update']}"
        self._files = {}
        self._path.mkdir(parents=True)
        self.control.call("begin", {**payload, "path": str(self._path)})

    def _send(self, bucket: Bucket) -> None:
        assert self._path is not None
        path = self._path / f"bucket-{self._next_seq():05}.safetensors"
        write_bucket(bucket, path)
        self._files[path.name] = path.stat().st_size

    def _seal(self, digest: str) -> dict[str, Any]:
        assert self._path is not None and self._manifest is not None
        content = {"version": self._manifest.version, "digest": digest, "files": self._files}
        unfinished = self._path / f"{MARKER}.part"
        unfinished.write_text(json.dumps(content))
        os.replace(unfinished, self._path / MARKER)
        return {}

    def close(self) -> None:
        super().close()
        self._release()

    def _free(self, *, is_committed: bool) -> None:
        path, self._path = self._path, None
        if path is not None and not is_committed:
            _remove(path)
        self._tidy()

    def _tidy(self) -> None:
        """Remove what has no marker, and all but the newest `keep` of what has."""
        updates = [path for path in self._folder.iterdir() if _FOLDER.fullmatch(path.name) and path != self._path]
        marked = sorted((path / MARKER).stat().st_mtime_ns for path in updates if (path / MARKER).is_file())
        oldest = marked[-self._keep :][0] if marked else 0
        for path in updates:
            if not (path / MARKER).is_file() or (path / MARKER).stat().st_mtime_ns < oldest:
                _remove(path)


class DiskInlet(ReceiverInlet):
    """The engine's end. Reads the files when the commit comes, one after the other."""

    _path: Path | None = None

    def _open(self, manifest: Manifest, payload: dict[str, Any]) -> dict[str, Any]:
        self._path = Path(payload["path"])
        if not self._path.is_dir():
            raise TransportError(
                f"{self._path} is not there: both ends must see the folder of the updates under the same path"
            )
        return {}

    def _before_commit(self, payload: dict[str, Any]) -> None:
        assert self._path is not None and self._manifest is not None
        sizes = read_marker(self._path, self._manifest.version, payload["digest"])
        for seq, name in enumerate(sorted(sizes)):
            self._deliver(seq, read_bucket(self._path / name, sizes[name]))


def write_bucket(bucket: Bucket, path: Path) -> None:
    """One safetensors file under the tensors' own names. A dtype that safetensors lacks is stored as its bytes."""
    tensors: dict[str, torch.Tensor] = {}
    pieces = []
    for name, tensor in bucket.items():
        key = name
        while key == _RESERVED or key in tensors:
            key += "_"
        pieces.append((key, Piece(TensorSpec(name, tuple(tensor.shape), tensor.dtype), 0)))
        dtype_name(tensor.dtype)
        plain = tensor.detach() if tensor.dtype in _PLAIN else raw_bytes(tensor)
        # safetensors refuses tensors that share storage, as tied ones and slices do.
        tensors[key] = plain.cpu().clone(memory_format=torch.contiguous_format)
    layout = layout_to_json(Layout(tuple(piece for _, piece in pieces), bucket.nbytes))
    keys = [key for key, _ in pieces]
    save_file(tensors, path, metadata={"lockstep": json.dumps({"keys": keys, "layout": layout})})


def read_bucket(path: Path, nbytes: int) -> Bucket:
    """What `write_bucket` wrote. Raises `TransportError` for a file that is not of `nbytes` bytes, or not whole."""
    if not path.is_file() or path.stat().st_size != nbytes:
        found = f"has {path.stat().st_size}" if path.is_file() else "is not there"
        raise TransportError(f"{path} {found}, {nbytes} bytes were written: a torn write; send the update again")
    data = path.read_bytes()  # not mapped: a file that is cut under a mapping ends the process
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        description = json.loads(header[_RESERVED]["lockstep"])
        layout = layout_from_json(description["layout"], nbytes)
        tensors = load(data)
        stored = [tensors[key] for key in description["keys"]]
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise TransportError(
            f"{path} cannot be read ({type(error).__name__}: {error}); send the update again"
        ) from error
    pairs = zip((piece.spec for piece in layout.pieces), stored, strict=True)
    return Bucket(tuple((spec.name, _restore(spec, tensor)) for spec, tensor in pairs))


def _restore(spec: TensorSpec, stored: torch.Tensor) -> torch.Tensor:
    if spec.dtype in _PLAIN:
        return stored
    if stored.dtype != torch.uint8 or stored.numel() != spec.nbytes:
        raise TransportError(
            f"tensor {spec.name!r}: {spec.nbytes} bytes expected, {stored.numel()} {stored.dtype} found"
        )
    return stored.view(spec.dtype).view(spec.shape)


def read_marker(path: Path, version: int, digest: str) -> dict[str, int]:
    """File name -> size in bytes of a committed update. Raises `TransportError` unless it is marked as this very one."""
    try:
        content = json.loads((path / MARKER).read_text())
        found = (content["version"], content["digest"])
        sizes = {str(name): int(size) for name, size in content["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TransportError(
            f"{path} has no readable {MARKER} ({type(error).__name__}: {error}): its writer did not finish; it is not read"
        ) from error
    if found != (version, digest):
        raise TransportError(f"{path / MARKER} is of version and digest {found}; the commit says {(version, digest)}")
    return sizes


def _own(owner: DiskOutlet, folder: Path) -> Callable[[], object]:
    """Lock the folder for as long as `owner` lives. What is returned lets go of it earlier."""
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise TransportError(
            f"{folder} is in use by another outlet ({error.strerror}): each replica and each run needs a folder of its own"
        ) from error
    return weakref.finalize(owner, os.close, descriptor)


def _remove(path: Path) -> None:
    """An update that cannot be removed costs space, not correctness."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        log.warning("an old update stays on disk: %s", error)
