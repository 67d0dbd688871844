"""An empty base model and the recipe's LoRA section in; a PEFT model whose adapter is real (and equal on every rank) out.

The base stays on meta. The adapter's tensors are made on the CPU from the run's seed, so that every rank holds the same
values before sharding: `fully_shard` cuts each rank's own copy and broadcasts nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lockstep.config import LoraSection
from lockstep.errors import ModelError
from lockstep.known_warnings import while_injecting, while_planning
from lockstep.model.load import ModelFiles, read_tensor
from lockstep.model.peft_tree import adapter_names
from lockstep.names import checkpoint_name, is_adapter_name

ADAPTER = "default"
REFERENCE = "reference"
"""A frozen copy of the adapter that training started from; it exists only when training starts from an adapter."""

# Per-layer containers that PEFT fills with one entry per adapter name.
_CONTAINERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
_INITS_THAT_KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")

Where = Literal["cpu", "meta"]
"""What an adapter is made on: the CPU to be trained, meta to be planned with."""


def inject_lora(
    model: PreTrainedModel,
    lora: LoraSection,
    *,
    seed: int,
    files: ModelFiles | None = None,
    reference: Literal["start", "base"] = "start",
    device: Where = "cpu",
) -> PeftModel:
    """Wrap the targets with LoRA layers; the adapter is real on the CPU, fp32, equal on every rank. `device` meta: without values.

    With `lora.init_from` the adapter's values and configuration are that folder's, and a frozen copy called "reference" is
    kept: then "adapter off" is not the policy that training started from (TRL #1340, #3194). No copy with `reference="base"`.
    `files` are the base's, against which copies of base weights in that folder are checked; None refuses such copies.
    Raises `ModelError` when a target matches nothing (naming near module names), when the folder is not a LoRA adapter, or
    when it changes or trains more than LoRA tensors.
    """
    config = _read_config(lora.init_from) if lora.init_from else _make_config(lora, model)
    base_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    peft_model = _inject(model, config)
    _check_only_lora_is_new(peft_model, base_names)
    _materialise(peft_model, ADAPTER, config, seed=seed, device=device)
    if not lora.init_from:
        return peft_model
    _load_adapter(peft_model, lora.init_from, ADAPTER, files=files)
    if reference == "start":
        with while_injecting(), torch.random.fork_rng(devices=[]):
            peft_model.add_adapter(REFERENCE, config)
        _materialise(peft_model, REFERENCE, config, seed=seed, device=device)
        _load_adapter(peft_model, lora.init_from, REFERENCE, files=files)
        _activate(peft_model, ADAPTER)
    return peft_model


def inject_frozen_lora(
    model: PreTrainedModel, folder: str, *, dtype: torch.dtype, files: ModelFiles | None = None, device: Where = "cpu"
) -> PeftModel:
    """A PEFT folder's adapter on an empty model, for a model that is not trained: everything frozen, the adapter on the CPU in
    `dtype`. Raises `ModelError` as `inject_lora`."""
    config = _read_config(folder, "teacher.adapter")
    peft_model = _inject(model, config)
    _materialise(peft_model, ADAPTER, config, seed=0, device=device)
    _load_adapter(peft_model, folder, ADAPTER, files=files, option="teacher.adapter")
    for name, param in peft_model.named_parameters():
        param.requires_grad_(False)
        if is_adapter_name(name):
            param.data = param.data.to(dtype)
    return peft_model


def inject_value_lora(
    model: PreTrainedModel, lora: LoraSection, *, head: str, seed: int, device: Where = "cpu"
) -> PeftModel:
    """The same for a value model: LoRA below its head, which is trained whole.

    PEFT's own way (task type TOKEN_CLS) raises for all-linear (TypeError in 0.21), and without a task type it would put a LoRA on
    the head and freeze the rest of it (CASES B14). So the targets are named one by one, and the head, which has no frozen
    original to go back to, is simply trainable. Raises `ModelError` for targets that match nothing, or the head.
    """
    config = _make_config(lora, model, "critic.lora.targets")
    modules = dict(model.named_modules())
    if lora.targets == "all-linear":
        names = [name for name, each in modules.items() if isinstance(each, nn.Linear | Conv1D) and name != head]
    elif isinstance(lora.targets, str):
        names = list(config.target_modules or ())
    else:
        names = [name for name in modules if any(f".{name}".endswith(f".{target}") for target in lora.targets)]
    if head in names:
        raise ModelError(f"critic.lora.targets {lora.targets!r} match the value head {head!r}, which is trained whole")
    config.target_modules = names
    config.fan_in_fan_out = all(isinstance(modules[name], Conv1D) for name in names)  # PEFT finds out itself, and warns
    config.task_type = None
    base_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    peft_model = _inject(model, config)
    _check_only_lora_is_new(peft_model, base_names)
    _materialise(peft_model, ADAPTER, config, seed=seed, device=device)
    getattr(model, head).requires_grad_(True)
    return peft_model


def init_adapter(model: nn.Module, adapter: str = ADAPTER, *, seed: int = 0) -> None:
    """Give an adapter that is on meta (its base being on meta) its start values, by PEFT's own initialisation, on the CPU.

    Not collective: every rank makes the same values from the same seed, and sharding cuts each rank's own. For
    `get_peft_model(model_on_meta, config)`, before `lockstep.shard` and `lockstep.fill`. Raises `ModelError` for what PEFT cannot
    initialise on an empty base (DoRA's magnitude, which is the base's norm).
    """
    configs = getattr(model, "peft_config", {})
    if adapter not in configs:
        raise ModelError(f"adapter {adapter!r} does not exist; the model has {sorted(configs)}")
    _materialise(cast(PeftModel, model), adapter, cast(LoraConfig, configs[adapter]), seed=seed)


def inject_empty_lora(model: PreTrainedModel, lora: LoraSection, *, target_parameters: Sequence[str] = ()) -> PeftModel:
    """The same layers on an empty model with the adapter empty too: shapes and dtypes to plan with, at no cost.

    `target_parameters` are endings of parameter names (fused experts: "mlp.experts.gate_up_proj"). Raises `ModelError` for
    a target that matches nothing.
    """
    config = _read_config(lora.init_from) if lora.init_from else _make_config(lora, model)
    params = [name for name, _ in model.named_parameters()]
    for target in target_parameters:
        if not any(f".{name}".endswith(f".{target}") for name in params):
            endings = sorted({".".join(name.split(".")[-3:]) for name in params})
            near = difflib.get_close_matches(target, endings, n=4, cutoff=0.3) or endings[:6]
            raise ModelError(f"target parameter {target!r} matches no parameter of the model; near it there are {near}")
    if target_parameters:
        config.target_parameters = [*(config.target_parameters or []), *target_parameters]
    with torch.device("meta"), while_planning():
        return _inject(model, config)


def largest_rank(folder: Path) -> int:
    """Of the adapter in a PEFT folder; an engine has to be started for it. Raises `ModelError` if it holds none."""
    config = _read_config(str(folder))
    return max([config.r, *(config.rank_pattern or {}).values()])


@contextmanager
def reference_policy(model: PeftModel) -> Iterator[None]:
    """Inside, the model computes the policy that training started from: adapter off, or the frozen "reference" adapter.

    Not collective; use without gradients, on every rank alike. Raises `ModelError` when training tensors outside the
    adapter changed what "off" means (a trained bias of the base).
    """
    bias = str(model.peft_config[ADAPTER].bias)  # type: ignore[union-attr]
    if bias != "none":
        raise ModelError(
            f"the adapter trains the base's biases (bias={bias!r}), so switching it off does not give the reference policy"
        )
    if REFERENCE not in model.peft_config:
        with model.disable_adapter():
            yield
        return
    _activate(model, REFERENCE)
    try:
        yield
    finally:
        _activate(model, ADAPTER)


def is_reference_name(live_name: str) -> bool:
    """Does a live name belong to the frozen copy of the adapter that training started from?"""
    parts = live_name.split(".")
    return any(is_adapter_name(part) and after == REFERENCE for part, after in pairwise(parts))


def adapter_config_json(model: nn.Module, adapter: str = ADAPTER) -> dict[str, Any]:
    """PEFT's configuration of the adapter as plain JSON values: enums as text, sets as sorted lists, nothing left out."""
    values = cast(PeftModel, model).peft_config[adapter].to_dict()  # type: ignore[union-attr]
    return {**{key: _plain(value) for key, value in values.items()}, "inference_mode": True}


def scaling_of(layer: LoraLayer, adapter: str = ADAPTER) -> float:
    """The layer's own scale: never recomputed from the configuration (rsLoRA, rank and alpha patterns: PEFT #3582)."""
    return float(layer.scaling[adapter])


def dropout_of(model: nn.Module, adapter: str = ADAPTER) -> float:
    """Dropout on the adapter's input while training: the configuration's, which `lora.init_from` may have brought."""
    return float(cast(LoraConfig, cast(PeftModel, model).peft_config[adapter]).lora_dropout)


def lora_layers(model: nn.Module, adapter: str = ADAPTER) -> Iterator[tuple[str, LoraLayer]]:
    """(live module name, layer) of every module that carries the adapter, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and adapter in module.scaling:
            yield name, module


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _make_config(lora: LoraSection, model: PreTrainedModel, option: str = "lora.targets") -> LoraConfig:
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    _check_targets(targets, model, option)
    if isinstance(targets, str) and targets != "all-linear":
        # Of a regular expression PEFT 0.21 keeps only the last names on models with fused experts (Qwen3-MoE, Mixtral,
        # Qwen-Omni): layers and towers that it does not match would be adapted too. Whole names it takes as they are.
        targets = [name for name, _ in model.named_modules() if re.fullmatch(targets, name)]
    return LoraConfig(
        r=lora.rank,
        lora_alpha=cast(int, lora.alpha if lora.alpha % 1 else int(lora.alpha)),
        lora_dropout=lora.dropout,
        target_modules=targets,
        use_rslora=lora.use_rslora,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.config.name_or_path or None,
    )


def _check_targets(targets: str | list[str], model: nn.Module, option: str) -> None:
    """Every name given must match a module: a misspelt one among good ones would be silently left untrained."""
    names = [name for name, _ in model.named_modules() if name]
    if targets == "all-linear":
        return
    if isinstance(targets, str):
        missing = [] if any(re.fullmatch(targets, name) for name in names) else [targets]
    else:
        missing = [
            target for target in targets if not any(name == target or name.endswith("." + target) for name in names)
        ]
    if missing:
        endings = sorted({name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()})
        near = difflib.get_close_matches(missing[0], endings, n=3, cutoff=0.4) or endings[:8]
        raise ModelError(
            f"{option}: {missing[0]!r} matches no module of the model; names there are, for example, {near}"
        )


def _inject(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    try:
        # PEFT draws values that are thrown away here; the process's own stream stays as it was.
        with while_injecting(), torch.random.fork_rng(devices=[]):
            return cast(PeftModel, get_peft_model(model, config))
    except (ValueError, TypeError) as error:
        raise ModelError(f"lora: PEFT cannot put this adapter on {type(model).__name__}: {error}") from error


def _check_only_lora_is_new(model: PeftModel, base_names: set[str]) -> None:
    """Whatever else an adapter adds or trains has no start value on an empty base, and no name in an export."""
    for name, param in model.named_parameters(remove_duplicate=False):
        if is_adapter_name(name):
            continue
        if checkpoint_name(name) not in base_names:
            raise ModelError(
                f"lora: the adapter adds {name!r}, which is not a LoRA tensor (modules_to_save, trainable_token_indices and "
                "the like); lockstep trains LoRA tensors only"
            )
        if param.requires_grad:
            raise ModelError(
                f"lora: the adapter trains the base's {checkpoint_name(name)!r} "
                f"(bias={model.peft_config[ADAPTER].bias!r}); lockstep trains LoRA tensors only"  # type: ignore[union-attr]
            )


def _materialise(model: PeftModel, adapter: str, config: LoraConfig, *, seed: int, device: Where = "cpu") -> None:
    """Give the adapter's tensors real CPU values by PEFT's own initialisation: on a meta base PEFT leaves them on meta.

    `device` meta: the same checks and dtypes, no values.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, layer in lora_layers(model, adapter):
            unknown = [
                key
                for key, param in cast(nn.Module, layer).named_parameters()
                if f".{adapter}" in f".{key}" and param.is_meta and key.split(".")[0] not in _CONTAINERS
            ]
            if unknown:
                raise ModelError(
                    f"{name}: the adapter has {unknown[0]!r}, which cannot be initialised on an empty base model yet"
                )
            for container in (getattr(layer, key) for key in _CONTAINERS):
                if adapter in container:
                    _move(container, adapter, device)
            if device == "cpu":
                layer.reset_lora_parameters(adapter, config.init_lora_weights)


def _move(container: nn.Module, adapter: str, device: Where) -> None:
    entry = container[adapter]  # type: ignore[index]
    if isinstance(entry, nn.Module):
        entry.to_empty(device=device).float()
    else:
        made = torch.empty(entry.shape, device=device)
        container[adapter] = nn.Parameter(made, requires_grad=entry.requires_grad)  # type: ignore[index]


def _read_config(folder: str, option: str = "lora.init_from") -> LoraConfig:
    """`option`: whose value the folder is, for errors."""
    try:
        config = PeftConfig.from_pretrained(folder)
    except (ValueError, OSError, TypeError) as error:
        raise ModelError(
            f"{option} {folder!r} is not a PEFT folder (adapter_config.json + adapter_model.safetensors): {error}"
        ) from error
    if not isinstance(config, LoraConfig):
        raise ModelError(f"{option} {folder!r} holds a {config.peft_type} adapter; lockstep trains LoRA")
    if config.bias != "none":
        raise ModelError(
            f"{option} {folder!r} trains the base's biases (bias={config.bias!r}); lockstep trains LoRA tensors only"
        )
    if config.init_lora_weights not in _INITS_THAT_KEEP_THE_BASE or config.layer_replication:
        raise ModelError(
            f"{option} {folder!r} changes the base (init_lora_weights={config.init_lora_weights!r}, "
            f"layer_replication={config.layer_replication}): convert it to a plain LoRA of the unchanged base first "
            "(PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )
    config.inference_mode = False
    return config


def _load_adapter(
    model: PeftModel, folder: str, adapter: str, *, files: ModelFiles | None, option: str = "lora.init_from"
) -> None:
    file = Path(folder) / "adapter_model.safetensors"
    if not file.is_file():
        raise ModelError(f"{option} {folder!r} holds no adapter_model.safetensors")
    tensors = load_file(file)
    shapes = {name: param.shape for name, param in model.named_parameters(remove_duplicate=False)}
    expected = {name: shapes[live] for live, name in adapter_names(model, adapter).items()}
    copies = {name: tensor for name, tensor in tensors.items() if name not in expected and ".base_layer." in name}
    _check_base_copies(model, copies, f"{option} {folder!r}", files=files)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in copies}
    if set(tensors) != set(expected):
        odd = sorted(set(tensors) ^ set(expected))
        raise ModelError(
            f"{option} {folder!r} does not fit the model: {len(odd)} tensors are missing or unknown, first {odd[0]!r}"
        )
    other = next((name for name in sorted(tensors) if tensors[name].shape != expected[name]), None)
    if other is not None:
        raise ModelError(
            f"{option} {folder!r} does not fit the model: {other!r} is {list(tensors[other].shape)} there, and here it has to be "
            f"{list(expected[other])}; give an adapter that was trained on this base"
        )
    if not any(param.is_meta for name, param in model.named_parameters() if is_adapter_name(name)):
        set_peft_model_state_dict(model, tensors, adapter_name=adapter)


def _check_base_copies(
    model: PeftModel, copies: Mapping[str, torch.Tensor], given: str, *, files: ModelFiles | None
) -> None:
    """PEFT saves an embedding or head with its LoRA. Such a copy must be the checkpoint's own, which is what is trained."""
    tied: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(param), []).append(name)
    aliases = {name: names for names in tied.values() for name in names}
    for name, copy in copies.items():
        stored = None
        if files is not None:
            names = [checkpoint_name(alias) for alias in aliases.get(name, [name])]
            stored = next((read_tensor(files, each) for each in names if each in files.weights), None)
        if stored is None or stored.shape != copy.shape or not torch.equal(stored.to(copy.dtype), copy):
            raise ModelError(
                f"{given} holds {name!r}, a base weight that is not the checkpoint's: give the model that "
                "the adapter was trained on as model.path"
            )


def _activate(model: PeftModel, adapter: str) -> None:
    """Make one adapter the active one. PEFT also makes it trainable, so the reference is frozen again right away."""
    model.set_adapter(adapter)
    for _, layer in lora_layers(model, ADAPTER):
        for name, param in cast(nn.Module, layer).named_parameters():
            if f".{REFERENCE}" in f".{name}":
                param.requires_grad_(False)
            elif f".{ADAPTER}" in f".{name}":
                param.requires_grad_(True)
