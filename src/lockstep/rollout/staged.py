"""An update's buckets in, a folder that another process can load out: PEFT's adapter format, or a checkpoint's safetensors.

For engines that read weights from a path. What the folder holds is read back and compared with the sender's digest before
anybody is told of it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from lockstep.errors import TransportError
from lockstep.transport.base import Ledger, digest_of, tensor_line
from lockstep.transport.disk import read_bucket, write_bucket
from lockstep.types import Bucket, Manifest


class StagedUpdate:
    """One update on its way into `path`, a new folder. Memory: an adapter whole, of whole weights one bucket."""

    def __init__(self, manifest: Manifest, path: Path, *, model_path: Path | None):
        """`model_path`: the checkpoint whose config.json goes next to whole weights."""
        self.manifest = manifest
        self.path = path
        self._model_path = model_path
        self._ledger = Ledger(manifest)
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._files: list[Path] = []
        path.mkdir(parents=True)

    def receive(self, bucket: Bucket) -> None:
        """See `Receiver.receive`."""
        for name, tensor in bucket.items():
            self._ledger.check(name, tensor)
        if self.manifest.kind == "adapter":
            self._tensors += [(name, tensor.detach().clone()) for name, tensor in bucket.items()]
        else:
            self._write(bucket, f"model-{len(self._files):05}.safetensors")

    def seal(self, digest: str) -> None:
        """Complete the folder. Raises `TransportError` if a tensor is missing or the files hold other bytes than were sent."""
        self._ledger.check_complete()
        if self.manifest.kind == "adapter":
            self._write(Bucket(tuple(self._tensors)), "adapter_model.safetensors")
            config = json.dumps(dict(self.manifest.adapter_config or {}))
            (self.path / "adapter_config.json").write_text(config, encoding="utf-8")
        elif self._model_path is not None:
            shutil.copy(self._model_path / "config.json", self.path)
        buckets = (read_bucket(path, path.stat().st_size) for path in self._files)
        found = digest_of(tensor_line(name, tensor) for bucket in buckets for name, tensor in bucket.items())
        if found != digest:
            raise TransportError(
                f"version {self.manifest.version}: {self.path} holds other bytes (digest {found[:12]}) than were sent "
                f"(digest {digest[:12]}); the update is refused, send it again"
            )

    def remove(self) -> None:
        """Delete the folder. What a server has read from it stays loaded."""
        shutil.rmtree(self.path)

    def _write(self, bucket: Bucket, name: str) -> None:
        write_bucket(bucket, self.path / name)
        self._files.append(self.path / name)
