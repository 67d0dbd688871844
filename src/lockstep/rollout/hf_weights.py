"""One weight update in; a model in this process that serves exactly it, or still what it served before, out.

*adapter* updates are staged and put in place by exchanging parameters, so that the old adapter can be put back.
*merged* and *full* updates are written into the model's own parameters as they come: there is room for one model only.
Either way the digest is taken of the model's own parameters, after the fact.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.errors import TransportError
from lockstep.known_warnings import while_injecting
from lockstep.rollout.hf_names import same_tensors
from lockstep.transport.base import Ledger, digest_of, tensor_line
from lockstep.types import Bucket, Manifest

_INITS_THAT_KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")


class Update(Protocol):
    """An update that has begun."""

    @property
    def manifest(self) -> Manifest: ...

    def receive(self, bucket: Bucket) -> None: ...

    def commit(self, digest: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Adapter:
    """A complete adapter."""

    config: LoraConfig
    """The engine's own copy; see `engine_config`."""
    tensors: Mapping[str, Tensor]
    """By their names in a PEFT adapter file."""


class AdapterHost:
    """A model and the one PEFT adapter that it serves, or none."""

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self._peft: PeftModel | None = None
        self._config: LoraConfig | None = None
        self._parameters: dict[str, Tensor] = {}

    def serving(self) -> Adapter | None:
        """What is served now. The tensors stay as they are when something else is served."""
        if self._config is None:
            return None
        return Adapter(self._config, {name: parameter.data for name, parameter in self._parameters.items()})

    def shapes(self, config: LoraConfig) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that an adapter of this configuration has in this model."""
        if self._is_injected(config):
            return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        with torch.device("meta"):
            skeleton = type(self._model)(copy.deepcopy(self._model.config))
        tensors = _adapter_parameters(_inject(skeleton, config))
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def serve(self, adapter: Adapter | None) -> None:
        """Serve this adapter, which must have exactly the tensors of its configuration; None serves the base alone."""
        if self._peft is not None and (adapter is None or not self._is_injected(adapter.config)):
            self._peft.unload()
            self._peft, self._config, self._parameters = None, None, {}
        if adapter is None:
            return
        if self._peft is None:
            self._peft = _inject(self._model, adapter.config)
            self._config = adapter.config
            self._parameters = _adapter_parameters(self._peft)
        for name, parameter in self._parameters.items():
            parameter.data = adapter.tensors[name]

    def _is_injected(self, config: LoraConfig) -> bool:
        return self._config is not None and _config_key(config) == _config_key(self._config)


class AdapterUpdate:
    """Staged beside the old adapter, which stays served until `commit` has checked the new one."""

    def __init__(self, host: AdapterHost, manifest: Manifest, device: torch.device):
        self.manifest = manifest
        self._host = host
        self._device = device
        self._config = engine_config(manifest)
        shapes = host.shapes(self._config)
        _check_names(manifest, shapes, [[name] for name in shapes])
        self._ledger = Ledger(manifest)
        self._staged: dict[str, Tensor] = {}

    @torch.no_grad()
    def receive(self, bucket: Bucket) -> None:
        for name, tensor in bucket.items():
            self._ledger.check(name, tensor)
            self._staged[name] = tensor.detach().to(self._device, copy=True).contiguous()

    @torch.no_grad()
    def commit(self, digest: str) -> None:
        self._ledger.check_complete()
        before = self._host.serving()
        try:
            self._host.serve(Adapter(self._config, self._staged))
            served = self._host.serving()
            assert served is not None
            _check_digest(self.manifest, served.tensors, digest)
        except BaseException:
            self._host.serve(before)
            raise


class InPlaceUpdate:
    """Written into the base's own parameters as it comes: what was there is gone with the first bucket."""

    def __init__(self, base: Mapping[str, Tensor], manifest: Manifest):
        self.manifest = manifest
        self._base = base
        _check_names(manifest, {name: tuple(tensor.shape) for name, tensor in base.items()}, same_tensors(base))
        for spec in manifest.specs:
            if spec.dtype != base[spec.name].dtype:
                raise TransportError(
                    f"tensor {spec.name!r} comes as {spec.dtype}, the engine's parameter is {base[spec.name].dtype}; "
                    "nothing is cast silently: export in the engine's dtype, or load the engine in the exported one"
                )
        self._ledger = Ledger(manifest)

    @torch.no_grad()
    def receive(self, bucket: Bucket) -> None:
        for name, tensor in bucket.items():
            self._ledger.check(name, tensor)
            self._base[name].copy_(tensor)

    def commit(self, digest: str) -> None:
        self._ledger.check_complete()
        _check_digest(self.manifest, self._base, digest)


def engine_config(manifest: Manifest) -> LoraConfig:
    """The manifest's PEFT configuration, made ready for serving. Raises `TransportError` if it cannot be served.

    Initial values are overwritten anyway, and dropout does not act, so both are set to PEFT's plainest.
    """
    values = dict(manifest.adapter_config or {})
    if values.get("peft_type") != "LORA":
        raise TransportError(
            f"an adapter update needs manifest.adapter_config with peft_type LORA; {values.get('peft_type')!r} came"
        )
    values.pop("runtime_config", None)
    if values.get("init_lora_weights", True) not in _INITS_THAT_KEEP_THE_BASE or values.get("bias", "none") != "none":
        raise TransportError(
            "the adapter changes base weights (init_lora_weights="
            f"{values.get('init_lora_weights')!r}, bias={values.get('bias')!r}), which do not travel with it; "
            "use sync.mode=merged"
        )
    plain = {"init_lora_weights": True, "lora_dropout": 0.0, "base_model_name_or_path": None, "revision": None}
    try:
        return LoraConfig(**{**values, **plain, "inference_mode": True})
    except (TypeError, ValueError) as error:
        raise TransportError(f"PEFT refuses manifest.adapter_config: {error}") from error


def _inject(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Wrap the model's modules in LoRA layers, in place. The process's random numbers stay as they were.

    Raises `TransportError` if PEFT finds nothing to wrap.
    """
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(device.index for device in devices)), while_injecting():
            # A copy, since PEFT writes the resolved targets into the configuration that it is given.
            peft = get_peft_model(
                model, copy.deepcopy(config), autocast_adapter_dtype=False, low_cpu_mem_usage=_is_meta(model)
            )
    except ValueError as error:
        raise TransportError(f"PEFT cannot put the manifest's adapter into the engine's model: {error}") from error
    assert isinstance(peft, PeftModel)
    return peft.eval().requires_grad_(False)


def _is_meta(model: nn.Module) -> bool:
    return next(model.parameters()).is_meta


def _adapter_parameters(peft: PeftModel) -> dict[str, Tensor]:
    """The live adapter parameters by their names in an adapter file, as PEFT itself names them."""
    live = peft.state_dict(keep_vars=True)
    return get_peft_model_state_dict(peft, state_dict=live, save_embedding_layers=False)


def _config_key(config: LoraConfig) -> str:
    return json.dumps(config.to_dict(), sort_keys=True, default=lambda value: sorted(map(str, value)))


def _check_names(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]], groups: Iterable[list[str]]) -> None:
    """Every manifest name must be one of the engine's, of its shape; of each group of tied names exactly one must come."""
    for spec in manifest.specs:
        if spec.name not in shapes:
            near = difflib.get_close_matches(spec.name, shapes, n=1, cutoff=0.0)
            raise TransportError(
                f"the engine has no tensor {spec.name!r} (version {manifest.version}, kind {manifest.kind}); "
                f"its nearest is {near}, of {len(shapes)}"
            )
        if spec.shape != shapes[spec.name]:
            raise TransportError(
                f"tensor {spec.name!r}: the engine's has shape {list(shapes[spec.name])}, "
                f"the manifest says {list(spec.shape)}"
            )
    listed = {spec.name for spec in manifest.specs}
    missing = [group for group in groups if listed.isdisjoint(group)]
    if missing:
        raise TransportError(
            f"the manifest of version {manifest.version} (kind {manifest.kind}) leaves out {len(missing)} of the "
            f"engine's tensors, first {[group[0] for group in missing[:3]]}"
        )
    twice = [group for group in groups if len(listed.intersection(group)) > 1]
    if twice:
        raise TransportError(f"tied tensors {twice[0]} are one in the engine; list them under one of their names")


def _check_digest(manifest: Manifest, served: Mapping[str, Tensor], digest: str) -> None:
    found = digest_of(tensor_line(spec.name, served[spec.name]) for spec in manifest.specs)
    if found != digest:
        raise TransportError(
            f"version {manifest.version}: the engine holds other bytes (digest {found[:12]}) than were sent "
            f"(digest {digest[:12]}); the update is refused, send it again"
        )
