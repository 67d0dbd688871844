"""An adapter's manifest and tensors in; a LoRA that vLLM loads from this process's memory, and the proof of its slots, out.

vLLM loads an adapter from a path that its front end was told. Here that path is a name: "lockstep:" and an id, and vLLM's
loader is given the staged tensors where it would read files. So a slot that vLLM evicts or drops (its `reload_weights` drops
all) is filled again from the same tensors. vLLM's prefix cache tells adapters apart by name and path, and no path is ever
used twice. Runs inside vLLM's worker process, but imports nothing of vllm.
"""

from __future__ import annotations

import difflib
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.errors import TransportError
from lockstep.transport.base import Ledger, digest_of, tensor_line
from lockstep.types import Bucket, Manifest

PREFIX = "lockstep:"
_KEPT = 4
"""Staged adapters that are kept: what is served, and the ones before, which requests may still be using. vLLM's engine ends
when it cannot load the adapter of a running request, so a completion may see this many commits less one."""
_PEFT_PREFIX = "base_model.model."
_UNSERVED_MODULES = ("lm_head", "embed_tokens")

_HARMLESS = {
    "peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode",
    "runtime_config", "lora_dropout", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out",
    "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core",
    "qalora_group_size",
}  # fmt: skip
"""Say how an adapter was made or which modules it has, which its tensors say as well; nothing of them acts when it serves."""
_UNDERSTOOD = {"r", "lora_alpha", "target_modules", "use_rslora", "rank_pattern", "alpha_pattern"}
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")


class Helper(Protocol):
    """vLLM's reading of a PEFT configuration (vllm.lora.peft_helper.PEFTHelper)."""

    def validate_legal(self, lora_config: Any) -> None: ...

    def get_rank_and_scaling(self, module_name: str) -> tuple[int, float]: ...


class AdapterHost:
    """vLLM's LoRA manager and the adapters staged for it, by path."""

    def __init__(self, manager: Any, read_config: Callable[[dict[str, Any]], Helper]):
        """`manager`: vLLM's WorkerLoRAManager; the method by which it reads adapters is wrapped. `read_config`: vLLM's
        own reading of a PEFT configuration. Raises `TransportError` for a manager without that method."""
        read: Callable[[Any], Any] | None = getattr(manager, "_load_adapter", None)
        if read is None:
            raise TransportError("this vLLM's LoRA manager has no _load_adapter, which lockstep needs; use vLLM 0.32.0")
        self._manager = manager
        self.read_config = read_config
        self._read_files = read
        self._staged: dict[str, AdapterUpdate] = {}
        self._ids: dict[str, int] = {}
        manager._load_adapter = self._load

    @property
    def config(self) -> Any:
        """vLLM's LoRAConfig."""
        return self._manager.lora_config

    @property
    def layers(self) -> Mapping[str, Any]:
        """vLLM's wrapped modules by its own names: qkv_proj rather than q_proj."""
        return self._manager._adapter_manager.modules

    @property
    def parts(self) -> Mapping[str, list[str]]:
        """Fused module -> its parts, by full names, in order."""
        return self._manager._adapter_manager.packed_modules

    def describe(self) -> dict[str, Any]:
        """JSON-able."""
        config = self.config
        dtype = str(config.lora_dtype).removeprefix("torch.")
        return {"max_rank": config.max_lora_rank, "max_loras": config.max_loras, "dtype": dtype}

    def place(self, module: str) -> tuple[str, int] | None:
        """Where the LoRA of a module acts: vLLM's module and which of its slices. None where vLLM has no place for it."""
        if module in self.layers and module not in self.parts:
            return module, 0
        for fused, parts in self.parts.items():
            if module in parts:
                return fused, parts.index(module)
        return None

    def mapped(self, module: str) -> str:
        """vLLM's name of a module of the checkpoint."""
        mapper = getattr(self._manager._adapter_manager.model, "hf_to_vllm_mapper", None)
        return module if mapper is None else (mapper.get_rename_mapper()._map_name(module) or module)

    def stage(self, update: AdapterUpdate) -> str:
        """Make the adapter loadable. Returns the path to tell vLLM's front end. Forgets all but the `_KEPT` latest."""
        path = f"{PREFIX}{uuid.uuid4().hex}"
        self._staged[path] = update
        for old in list(self._staged)[:-_KEPT]:
            del self._staged[old]
            if old in self._ids:
                self._manager.remove_adapter(self._ids.pop(old))
        return path

    def clear(self) -> None:
        """Drop every adapter: the base has changed under them."""
        self._staged.clear()
        self._ids.clear()
        self._manager.remove_all_adapters()

    @torch.no_grad()
    def check_served(self, update: AdapterUpdate) -> tuple[str, ...]:
        """Compare vLLM's slot with what was sent, zeros included. Returns the names of tensors whose slot has another form.

        B is stored multiplied by the scaling, so this covers alpha, rank and rsLoRA as well. Raises `TransportError`.
        """
        path = next((path for path, staged in self._staged.items() if staged is update), None)
        lora_id = self._ids.get(path or "")
        slots = self._manager._adapter_manager.lora_index_to_id
        if lora_id is None or lora_id not in slots:
            raise TransportError(
                f"version {update.manifest.version}: vLLM has not loaded the adapter into a slot (id {lora_id}, slots {slots})"
            )
        slot = slots.index(lora_id)
        unread: list[str] = []
        for name, layer in self.layers.items():
            unread += _check_layer(update, name, layer, self.parts.get(name, [name]), slot)
        return tuple(unread)

    def _load(self, request: Any) -> Any:
        """Stands in for vLLM's `_load_adapter`: other paths are read as ever."""
        if not request.lora_path.startswith(PREFIX):
            return self._read_files(request)
        if request.lora_path not in self._staged:
            raise TransportError(f"adapter {request.lora_name} is not held any more; only the last {_KEPT} are")
        update = self._staged[request.lora_path]
        self._ids[request.lora_path] = request.lora_int_id
        mapper = getattr(self._manager._adapter_manager.model, "hf_to_vllm_mapper", None)
        # Clones: vLLM multiplies B by the scaling in place.
        return self._manager._lora_model_cls.from_lora_tensors(
            lora_model_id=request.lora_int_id,
            tensors={name: tensor.clone() for name, tensor in update.tensors.items()},
            peft_helper=update.helper,
            device="cpu",
            dtype=self.config.lora_dtype,
            model_vocab_size=self._manager.vocab_size,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )


class AdapterUpdate:
    """An adapter that is arriving, or has arrived whole. The one that is served is not touched."""

    def __init__(self, host: AdapterHost, manifest: Manifest):
        """Raises `TransportError` naming what vLLM cannot serve as it was trained."""
        self.manifest = manifest
        self._host = host
        self.helper = _helper(manifest, host)
        self.pairs = _check_tensors(manifest, host, self.helper)
        """vLLM's module name -> names of its A and B and the scaling."""
        self._ledger = Ledger(manifest)
        self.tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def receive(self, bucket: Bucket) -> None:
        for name, tensor in bucket.items():
            self._ledger.check(name, tensor)
            self.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def commit(self, digest: str) -> None:
        """The digest of the staged tensors. That vLLM's slots hold them is checked by `AdapterHost.check_served`."""
        self._ledger.check_complete()
        found = digest_of(tensor_line(name, tensor) for name, tensor in self.tensors.items())
        if found != digest:
            raise TransportError(
                f"version {self.manifest.version}: other bytes came (digest {found[:12]}) than were sent "
                f"(digest {digest[:12]}); the update is refused, send it again"
            )

    def stage(self) -> str:
        """See `AdapterHost.stage`."""
        return self._host.stage(self)


def _helper(manifest: Manifest, host: AdapterHost) -> Helper:
    """vLLM's reading of the PEFT configuration, after everything in it that vLLM would ignore has been refused."""
    values = dict(manifest.adapter_config or {})
    if values.get("peft_type") != "LORA":
        raise TransportError(
            f"an adapter update needs manifest.adapter_config with peft_type LORA; {values.get('peft_type')!r} came"
        )
    if values.get("init_lora_weights", True) not in _KEEPS_BASE or values.get("bias", "none") != "none":
        raise TransportError(
            f"the adapter changes base weights (init_lora_weights={values.get('init_lora_weights')!r}, "
            f"bias={values.get('bias')!r}), which do not travel with it; use sync.mode=merged"
        )
    odd = {key: value for key, value in values.items() if value and key not in _HARMLESS | _UNDERSTOOD | {"bias"}}
    if odd:
        raise TransportError(f"vLLM cannot serve an adapter with {odd}: it would ignore that; use sync.mode=merged")
    try:
        helper = host.read_config(values)
        helper.validate_legal(host.config)
    except (TypeError, ValueError) as error:
        raise TransportError(
            f"vLLM refuses the adapter of version {manifest.version}: {error} Use sync.mode=merged, or start vLLM with a "
            "higher max_lora_rank (engine.args) where that is what is said"
        ) from error
    return helper


def _check_tensors(manifest: Manifest, host: AdapterHost, helper: Helper) -> dict[str, tuple[str, str, float]]:
    found: dict[str, dict[str, str]] = {}
    for spec in manifest.specs:
        module, _, kind = spec.name.removeprefix(_PEFT_PREFIX).removesuffix(".weight").rpartition(".")
        if kind not in ("lora_A", "lora_B") or not spec.name.endswith(".weight") or not module:
            raise TransportError(f"tensor {spec.name!r} is no LoRA matrix of a linear layer; use sync.mode=merged")
        if module.rpartition(".")[2] in _UNSERVED_MODULES:
            raise TransportError(
                f"vLLM is not given LoRA on embeddings or the head ({spec.name!r}); use sync.mode=merged"
            )
        if host.place(host.mapped(module)) is None:
            near = difflib.get_close_matches(host.mapped(module), _modules(host), n=1, cutoff=0.0)
            raise TransportError(
                f"vLLM has no module {module!r} that takes LoRA; the nearest is {near}: use sync.mode=merged"
            )
        if spec.dtype != host.config.lora_dtype:
            raise TransportError(
                f"tensor {spec.name!r} comes as {spec.dtype}, vLLM keeps LoRA in {host.config.lora_dtype}; nothing is cast "
                "silently: export the adapter in that dtype, or start vLLM with another --lora-dtype"
            )
        rank = helper.get_rank_and_scaling(module)[0]
        if len(spec.shape) != 2 or spec.shape[0 if kind == "lora_A" else 1] != rank:
            raise TransportError(
                f"tensor {spec.name!r} has shape {list(spec.shape)}; its configuration says rank {rank}"
            )
        found.setdefault(module, {})[kind] = spec.name
    half = [module for module, pair in found.items() if len(pair) < 2]
    if half or not found:
        raise TransportError(
            f"the adapter of version {manifest.version} has only one of A and B for {half[:3] or 'nothing'}"
        )
    return {
        host.mapped(module): (pair["lora_A"], pair["lora_B"], helper.get_rank_and_scaling(module)[1])
        for module, pair in found.items()
    }


def _modules(host: AdapterHost) -> list[str]:
    return [*host.layers, *(part for parts in host.parts.values() for part in parts)]


def _check_layer(update: AdapterUpdate, name: str, layer: Any, parts: list[str], slot: int) -> list[str]:
    """One wrapped module's slot: the parts that were sent, zeros elsewhere. Returns the tensors that cannot be read there."""
    sent = [update.pairs[part][:2] for part in parts if part in update.pairs]
    stacked_a, stacked_b = getattr(layer, "lora_a_stacked", ()), getattr(layer, "lora_b_stacked", ())
    is_plain = len(stacked_a) == len(stacked_b) == len(parts) and all(a.ndim == 4 for a in (*stacked_a, *stacked_b))
    if not is_plain:
        return [tensor for pair in sent for tensor in pair]
    for index, part in enumerate(parts):
        a, b = stacked_a[index][slot, 0], stacked_b[index][slot, 0]
        name_a, name_b, scaling = update.pairs.get(part, ("", "", 1.0))
        if name_a:
            want_a, want_b = update.tensors[name_a].to(a.device), update.tensors[name_b].to(b.device)
            want_b = want_b if scaling == 1 else want_b * scaling
            rank = want_a.shape[0]
            is_same = torch.equal(a[:rank], want_a) and torch.equal(b[:, :rank], want_b)
            is_same = is_same and not a[rank:].any() and not b[:, rank:].any()
        else:
            is_same = not a.any() and not b.any()
        if not is_same:
            raise TransportError(
                f"version {update.manifest.version}: the slot of {name} in vLLM does not hold the adapter's {part} times "
                f"{scaling}; the update is refused, send it again"
            )
    return []
