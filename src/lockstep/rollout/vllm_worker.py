"""Calls from the trainer's end in, a `Receiver` inside vLLM's worker process driven by them out: vLLM's `--worker-extension-cls`.

Imported by vLLM before it loads the model, in an environment that has vllm and xxhash and nothing else of lockstep's
dependencies. Written against vLLM 0.32; what it takes from inside vLLM is checked, here and in `describe`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import vllm  # pyright: ignore[reportMissingImports]
import vllm._custom_ops as ops  # pyright: ignore[reportMissingImports]
from vllm.lora.peft_helper import PEFTHelper  # pyright: ignore[reportMissingImports]
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

from lockstep.errors import LockstepError, TransportError
from lockstep.rollout.vllm_guard import TOKEN_ENV
from lockstep.rollout.vllm_receiver import VllmReceiver
from lockstep.transport.base import Inlet
from lockstep.transport.collective import CollectiveInlet
from lockstep.transport.disk import DiskInlet
from lockstep.transport.shm import ShmInlet

_INLETS: dict[str, Callable[[VllmReceiver], Inlet]] = {
    "shm": ShmInlet,
    "disk": DiskInlet,
    "collective": lambda receiver: CollectiveInlet(receiver, token=os.environ.get(TOKEN_ENV)),
}


def keep_weights_live() -> None:
    """On a CPU, stop vLLM from packing weights when it loads them: packed ones cannot be written.

    vLLM packs every linear layer for oneDNN and leaves an empty `weight` behind. `load_weights` then fails, and its own
    `reload_weights` gives a wrong model where the head is tied: the head keeps a packed copy of the old embedding
    (measured with 0.32.0). Costs 5 to 20 % of decoding speed. Raises `RuntimeError` where this vLLM has no such switch.
    """
    if not current_platform.is_cpu():
        return
    if not isinstance(getattr(ops, "_supports_onednn", None), bool):
        raise RuntimeError(
            f"vLLM {vllm.__version__} has no vllm._custom_ops._supports_onednn, by which lockstep keeps a CPU's weights "
            "unpacked; without it an update could be lost silently. Use vLLM 0.32.0 (make vllm-env)"
        )
    ops._supports_onednn = False


keep_weights_live()


class LockstepWorker:
    """Mixed into vLLM's worker class. Has one public name, since it must not clash with any of the worker's."""

    if TYPE_CHECKING:
        model_runner: Any
        vllm_config: Any

    def lockstep_call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        """One call of a `Control`, `method` being "shm.begin", "disk.commit" and so on, or one of the receiver's own.

        Answers {"ok": ...} or {"error": class, "message": ..., "is_ours": whether it is an error of lockstep}. Raises
        nothing: an exception would end vLLM's engine process, or come back without its words.
        """
        try:
            return {"ok": self._lockstep_dispatch(method, payload)}
        except Exception as error:
            return {"error": type(error).__name__, "message": str(error), "is_ours": isinstance(error, LockstepError)}

    def _lockstep_dispatch(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        state = self.__dict__.setdefault("_lockstep_state", None)
        if state is None:
            receiver = VllmReceiver(self, read_config=PEFTHelper.from_dict)
            state = self.__dict__["_lockstep_state"] = (
                receiver,
                {name: make(receiver) for name, make in _INLETS.items()},
            )
        receiver, inlets = state
        transport, _, call = method.rpartition(".")
        if transport:
            if transport not in inlets:
                raise TransportError(f"transport {transport!r} has no end in vLLM's worker; {sorted(inlets)} have")
            return inlets[transport].handle(call, payload)
        return receiver.handle(call, payload)
