"""Update sizes in; what each transport costs between two processes of this host, against a receiver in the same one, out.

Tensors have the shapes of SmolLM2-135M: an adapter of rank 16 on every linear layer (420 tensors, 19.5 MB in fp32) and the
merged model (272 tensors, 538 MB). The receiver keeps a copy of everything and checks the digest: the least that any
engine does. Ways are measured in turns, so that what else the machine does hits all of them.

    python benchmarks/bench_transport.py [--rounds 5] [--bucket-mib 64] [--slot-mib 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.transport.base import Receiver, digest_of, tensor_line
from lockstep.transport.channel import Address, ConnectionControl, Door, knock, serve
from lockstep.transport.collective import CollectiveInlet, CollectiveOutlet
from lockstep.transport.disk import DiskInlet, DiskOutlet
from lockstep.transport.ends import Outlet, ReceiverInlet
from lockstep.transport.inproc import push
from lockstep.transport.keeper import Keeper
from lockstep.transport.shm import ShmInlet, ShmOutlet
from lockstep.types import Bucket, Manifest, TensorSpec

_MiB = 1 << 20
_LAYERS, _WIDTH, _INNER, _KV, _VOCAB, _RANK = 30, 576, 1536, 192, 49152, 16
_LINEAR = {
    "self_attn.q_proj": (_WIDTH, _WIDTH), "self_attn.k_proj": (_KV, _WIDTH), "self_attn.v_proj": (_KV, _WIDTH),
    "self_attn.o_proj": (_WIDTH, _WIDTH), "mlp.gate_proj": (_INNER, _WIDTH), "mlp.up_proj": (_INNER, _WIDTH),
    "mlp.down_proj": (_WIDTH, _INNER),
}  # fmt: skip
INLETS = {"shm": ShmInlet, "disk": DiskInlet, "collective": CollectiveInlet}


@dataclass(frozen=True, slots=True)
class Row:
    """One transport and one kind of update."""

    update: str
    transport: str
    seconds: float
    """Median of the rounds."""
    fastest: float
    ratio: float
    """Seconds over those of `inproc`."""
    cpu_ratio: float
    """CPU seconds of both processes over those of `inproc`: what else the machine does hardly changes it."""
    num_tensors: int
    nbytes: int


def adapter_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the adapter."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(_LAYERS):
        for module, (out, inner) in _LINEAR.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            shapes |= {f"{name}.lora_A.weight": (_RANK, inner), f"{name}.lora_B.weight": (out, _RANK)}
    return shapes


def merged_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint; the head is tied to the embedding."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_VOCAB, _WIDTH), "model.norm.weight": (_WIDTH,)}
    for layer in range(_LAYERS):
        shapes |= {f"model.layers.{layer}.{module}.weight": shape for module, shape in _LINEAR.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (_WIDTH,)
    return shapes


def make_update(shapes: dict[str, tuple[int, ...]], bucket_bytes: int) -> tuple[list[Bucket], tuple[TensorSpec, ...]]:
    """Random fp32 tensors, in buckets that hold at most `bucket_bytes` or one tensor."""
    specs = tuple(TensorSpec(name, shape, torch.float32) for name, shape in shapes.items())
    buckets: list[Bucket] = []
    held: list[tuple[str, torch.Tensor]] = []
    filled = 0
    for spec in specs:
        if held and filled + spec.nbytes > bucket_bytes:
            buckets.append(Bucket(tuple(held)))
            held, filled = [], 0
        held.append((spec.name, torch.randn(spec.shape)))
        filled += spec.nbytes
    return [*buckets, Bucket(tuple(held))], specs


class Clocked:
    """An inlet that also tells what its process has spent."""

    def __init__(self, inlet: ReceiverInlet):
        self._inlet = inlet

    def handle(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        return {"cpu_s": time.process_time()} if method == "clock" else self._inlet.handle(method, payload)


def serve_all(address: Address, key: bytes, kinds: list[str]) -> None:
    """The other process: one connection per transport, a keeper behind each."""
    torch.set_num_threads(1)
    for kind in kinds:
        serve(Clocked(INLETS[kind](Keeper())), knock(address, key))


def make_outlet(kind: str, control: ConnectionControl, folder: Path, slot_bytes: int) -> Outlet:
    """The trainer's end."""
    if kind == "shm":
        return ShmOutlet(control, slot_bytes=slot_bytes)
    if kind == "disk":
        return DiskOutlet(control, folder)
    return CollectiveOutlet(control, slot_bytes=slot_bytes, timeout_s=120.0)


def measure(bucket_bytes: int, slot_bytes: int, rounds: int, folder: Path) -> list[Row]:
    """Start one process per transport, push every update `rounds` times in turns, after one that warms up."""
    rows: list[Row] = []
    with ExitStack() as stack:
        receivers: dict[str, Receiver] = {"inproc": Keeper()}
        for kind in INLETS:
            door = stack.enter_context(Door())
            process = mp.get_context("spawn").Process(
                target=serve_all, args=(door.address, door.key, [kind]), daemon=True
            )
            process.start()
            control = ConnectionControl(door.admit(300.0, process.is_alive), timeout_s=300.0, is_alive=process.is_alive)
            outlet = make_outlet(kind, control, folder, slot_bytes)
            stack.callback(process.join, 30.0)
            stack.callback(control.close)
            stack.callback(outlet.close)
            receivers[kind] = outlet
        for update, shapes in (("adapter", adapter_shapes()), ("merged", merged_shapes())):
            rows += measure_update(update, shapes, receivers, bucket_bytes, rounds)
    return rows


def measure_update(
    update: str, shapes: dict[str, tuple[int, ...]], receivers: dict[str, Receiver], bucket_bytes: int, rounds: int
) -> list[Row]:
    """Rows of one kind of update, that of its digest alone last."""
    buckets, specs = make_update(shapes, bucket_bytes)
    manifest = Manifest(1, "full", specs)
    ways: dict[str, Callable[[], str]] = {
        kind: lambda receiver=receiver: push(buckets, receiver, manifest).digest for kind, receiver in receivers.items()
    }
    ways["(one digest)"] = lambda: digest_of(tensor_line(*item) for bucket in buckets for item in bucket.items())
    digests = {way() for way in ways.values()}
    assert len(digests) == 1, f"the transports disagree: {digests}"
    times: dict[str, list[float]] = {kind: [] for kind in ways}
    cpu: dict[str, list[float]] = {kind: [] for kind in ways}
    for _ in range(rounds):
        for kind, way in ways.items():
            clock = partial(_cpu_seconds, receivers.get(kind))
            began, cpu_began = time.perf_counter(), clock()
            way()
            times[kind].append(time.perf_counter() - began)
            cpu[kind].append(clock() - cpu_began)
    middle = {kind: (statistics.median(times[kind]), statistics.median(cpu[kind])) for kind in ways}
    base, cpu_base = middle["inproc"]
    nbytes = sum(spec.nbytes for spec in specs)
    return [
        Row(update, kind, wall, min(times[kind]), wall / base, spent / cpu_base, len(specs), nbytes)
        for kind, (wall, spent) in middle.items()
    ]


def _cpu_seconds(receiver: Receiver | None) -> float:
    """Spent so far, by this process and by the one behind the receiver."""
    theirs = receiver.control.call("clock", {})["cpu_s"] if isinstance(receiver, Outlet) else 0.0
    return time.process_time() + theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--slot-mib", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        rows = measure(args.bucket_mib * _MiB, args.slot_mib * _MiB, args.rounds, Path(folder))
    for row in rows:
        rate = row.nbytes / row.seconds / 1e9
        print(
            f"{row.update:8} {row.transport:14} {row.seconds * 1e3:9.1f} ms (fastest {row.fastest * 1e3:8.1f})  "
            f"{row.ratio:5.2f} x inproc, CPU {row.cpu_ratio:5.2f} x  {rate:6.2f} GB/s  {row.num_tensors} tensors, {row.nbytes / 1e6:.1f} MB"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
