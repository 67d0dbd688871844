"""An optimizer, or a forward pass, in; the same arithmetic with what it keeps in the host's memory out.

Bit for bit the same: only copies are made. On a CPU the host's memory is where everything is anyway; the copies are then made
all the same, which is what the tests compare (a recipe leaves them out there, and says so).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

CHUNK_BYTES = 64 * 2**20
"""State that is on the device at once, twice: while one chunk is stepped, the next arrives."""
COUNTERS = frozenset({"step"})
"""State that is a number and no tensor of the parameter's elements: torch keeps it on the CPU itself."""
SMALL_BYTES = 64 * 2**10
"""A saved tensor below this stays: copying it costs more than it frees."""


class HostState:
    """A torch optimizer whose per-element state (moments, fp32 copies) lies in host memory between steps.

    Pinned where the parameters are on CUDA. A step brings it over in chunks, on a stream beside the one that computes: the next
    chunk arrives while this one is stepped and the last one leaves. A DTensor's state lies there as its local part, a plain tensor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, chunk_bytes: int = CHUNK_BYTES):
        self._optimizer = optimizer
        self._chunk_bytes = chunk_bytes
        self._params: list[nn.Parameter] = [each for group in optimizer.param_groups for each in group["params"]]
        device = local_of(self._params[0]).device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def step(self) -> None:
        """`optimizer.step()`, of which torch does the part that has gradients: so parameters are stepped a chunk at a time."""
        grads = {param: param.grad for param in self._params}
        chunks = self._chunks()
        arriving = self._fetch(chunks[0])
        for number, chunk in enumerate(chunks):
            self._arrive(arriving)
            arriving = self._fetch(chunks[number + 1]) if number + 1 < len(chunks) else []
            for param in self._params:
                param.grad = grads[param] if param in chunk else None
            self._optimizer.step()
            self._stow(chunk)
        for param, grad in grads.items():
            param.grad = grad
        if self._stream is not None:
            self._stream.synchronize()  # a checkpoint may read the host's side next

    def _chunks(self) -> list[dict[nn.Parameter, None]]:
        """Parameters in order, with about `chunk_bytes` of fp32 moments each; at least one chunk."""
        places = chunks_of([local_of(param).numel() for param in self._params], self._chunk_bytes)
        return [dict.fromkeys(self._params[place] for place in chunk) for chunk in places]

    def _fetch(self, chunk: dict[nn.Parameter, None]) -> list[Tensor]:
        """Begin to bring a chunk's state to its device; what is on its way."""
        arriving: list[Tensor] = []
        with record_function("train::optimizer state to the device"), _on(self._stream):
            for param in chunk:
                for name, kept in self._slots(param):
                    # After a checkpoint was loaded it may be on the device already.
                    local = local_of(kept).to(local_of(param).device, non_blocking=True, copy=True)
                    arriving.append(local)
                    self._optimizer.state[param][name] = _like(param, local)
        return arriving

    def _arrive(self, arriving: Sequence[Tensor]) -> None:
        """Let the computing stream wait for it."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            for tensor in arriving:
                tensor.record_stream(current)  # made on the other stream, used on this one

    def _stow(self, chunk: dict[nn.Parameter, None]) -> None:
        """Begin to bring it back to the host."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with record_function("train::optimizer state to the host"), _on(self._stream):
            for param in chunk:
                for name, slot in self._slots(param):
                    local = local_of(slot)
                    kept = torch.empty(
                        local.shape, dtype=local.dtype, device="cpu", pin_memory=self._stream is not None
                    )
                    kept.copy_(local, non_blocking=True)
                    if self._stream is not None:
                        local.record_stream(self._stream)
                    self._optimizer.state[param][name] = kept

    def _slots(self, param: nn.Parameter) -> list[tuple[str, Tensor]]:
        """State that has the parameter's elements."""
        state: dict[str, Tensor] = self._optimizer.state.get(param, {})
        return [(name, slot) for name, slot in state.items() if name not in COUNTERS]


def chunks_of(numels: Sequence[int], chunk_bytes: int = CHUNK_BYTES) -> list[list[int]]:
    """Places of parameters of so many elements on this rank, in order, cut into chunks. Pure; see `HostState`."""
    chunks: list[list[int]] = [[]]
    filled = 0
    for place, numel in enumerate(numels):
        size = 2 * 4 * numel
        if filled and filled + size > chunk_bytes:
            chunks.append([])
            filled = 0
        chunks[-1].append(place)
        filled += size
    return chunks


@contextmanager
def activations_on_host() -> Iterator[None]:
    """What forward saves for backward inside, goes to (pinned) host memory and comes back in backward.

    Not parameters, nor views of them: the gathered ones of FSDP are freed and gathered anew, and a copy of each layer's would put
    the model into the host's memory. Not small tensors. Under gradient checkpointing what is left is each layer's input. Copies
    run on the computing stream, as in torch's `save_on_cpu`, which makes them.
    """
    pinned = save_on_cpu(pin_memory=True)

    def pack(tensor: Tensor) -> Any:
        # An alias, not the tensor: an operation's output that kept itself would never be freed.
        return pinned.pack_hook(tensor) if _is_worth_it(tensor) else tensor.detach()

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else pinned.unpack_hook(packed)

    with saved_tensors_hooks(pack, unpack):
        yield


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _is_worth_it(tensor: Tensor) -> bool:
    whole = tensor if tensor._base is None else tensor._base
    if isinstance(whole, nn.Parameter) or type(tensor) is not Tensor:
        return False
    return tensor.numel() * tensor.element_size() >= SMALL_BYTES


def _like(param: nn.Parameter, local: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


@contextmanager
def _on(stream: Any) -> Iterator[None]:
    if stream is None:
        yield
    else:
        with torch.cuda.stream(stream):
            yield
