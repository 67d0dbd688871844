"""The matrix of exports: model x adapter x dtypes x backend. A cell in; its live model, and PEFT's and transformers' own files of
the same model from a single process (the reference), out.

The reference is written to a folder by the test's own process: with a process group transformers saves on rank 0 only.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

import lockstep
from helpers_models import HAS_GEMMA4, tiny_gemma3, tiny_gemma4, tiny_gpt2, tiny_mixtral, tiny_qwen2, tiny_qwen3_moe
from lockstep.dist import World
from lockstep.errors import IncompleteExport, ModelError
from lockstep.model.dtype import FSDP2_MIXES_FROZEN
from lockstep.sharding.base import ShardedModel
from lockstep.testing import tiny_llama
from lockstep.transport.base import tensor_line

RAGGED = dict(vocab_size=65, intermediate_size=7, num_key_value_heads=1, head_dim=2, attention_bias=True)
"""Sizes that no number of ranks divides, some below it."""

MODELS: dict[str, Callable[[], Any]] = {
    "llama": tiny_llama,
    "llama-tied": lambda: tiny_llama(tie_word_embeddings=True),
    "llama-ragged": lambda: tiny_llama(**RAGGED),
    "gpt2": tiny_gpt2,
    "qwen2": tiny_qwen2,
    "gemma3": tiny_gemma3,
    **({"gemma4": tiny_gemma4} if HAS_GEMMA4 else {}),
    "mixtral": tiny_mixtral,
    "qwen3-moe": tiny_qwen3_moe,
}
TIED = ("llama-tied", "gpt2", "gemma3", "gemma4")
EXPERTS = ("mixtral", "qwen3-moe")

_GPT2 = dict(target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
_LINEAR = dict(target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
_ATTENTION = dict(target_modules=["q_proj", "v_proj"])

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": dict(use_rslora=True),
    "patterns": dict(rank_pattern={"q_proj": 2, "c_attn": 2}, alpha_pattern={"v_proj": 64, "c_fc": 64}),
    "dora": dict(use_dora=True),
    "lora-bias": dict(lora_bias=True),
    "embed-and-head": dict(more=("embed_tokens", "lm_head")),
    "modules-to-save": dict(modules_to_save=["lm_head"]),
    "tokens": dict(trainable_token_indices=[3, 5, 11]),
    "two": dict(adapters=("default", "second")),
    "named": dict(adapters=("policy",)),
    "experts": dict(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
}
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "mixed": (torch.bfloat16, torch.float32),
}
BACKENDS = ("fsdp2", "fsdp1", "fsdp1-flat")
KINDS = ("adapter", "merged", "full")


@dataclass(frozen=True, slots=True)
class Cell:
    """One live model."""

    model: str
    adapter: str
    dtypes: str
    backend: str

    @property
    def id(self) -> str:
        return f"{self.model}/{self.adapter}/{self.dtypes}"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its adapters; the last one is the active one."""
        return ADAPTERS[self.adapter].get("adapters", ("default",))


def all_cells() -> Iterator[Cell]:
    for model, adapter, dtypes, backend in itertools.product(MODELS, ADAPTERS, DTYPES, BACKENDS):
        if is_possible(model, adapter):
            yield Cell(model, adapter, dtypes, backend)


def is_possible(model: str, adapter: str) -> bool:
    """Can PEFT itself make such a model?"""
    if adapter == "experts":
        return model in EXPERTS
    if adapter == "lora-bias":
        return model in ("gpt2", "qwen2", "llama-ragged")  # PEFT merges a LoRA bias only into a layer that has a bias
    return not (adapter == "embed-and-head" and model == "gpt2")  # its modules have other names


def covering(seed: int = 0) -> list[Cell]:
    """A subset in which every pair of values of any two axes that can be together is."""
    cells = list(all_cells())
    missing = {pair for cell in cells for pair in _pairs(cell)}
    torch.manual_seed(seed)
    chosen: list[Cell] = []
    while missing:
        best = max(cells, key=lambda cell: len(missing & _pairs(cell)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(cell: Cell) -> set[tuple[str, str]]:
    values = [f"{field} {getattr(cell, field)}" for field in ("model", "adapter", "dtypes", "backend")]
    return set(itertools.combinations(values, 2))


def build(cell: Cell) -> PeftModel:
    """The cell's live model, on one process, with random values in everything that an adapter trains. Equal in every process."""
    base_dtype, adapter_dtype = DTYPES[cell.dtypes]
    base = MODELS[cell.model]().to(base_dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of ties, of fan_in_fan_out and of an old attribute of transformers
        torch.manual_seed(1)
        model = None
        for name in cell.names:
            config = LoraConfig(**_config(cell))
            cast = adapter_dtype == torch.float32
            if model is None:
                model = get_peft_model(base, config, adapter_name=name, autocast_adapter_dtype=cast)
            else:
                model.add_adapter(name, config, autocast_adapter_dtype=cast)
        assert model is not None
        model.set_adapter(cell.names[-1])
    generator = torch.Generator().manual_seed(2)
    frozen = {id(param) for param in MODELS[cell.model]().parameters()}
    for name, param in model.named_parameters():
        if ("lora_" in name or "modules_to_save" in name or "trainable_tokens" in name) and id(param) not in frozen:
            param.data.add_((torch.randn(param.shape, generator=generator) * 0.1).to(param.dtype))
    return model


def _config(cell: Cell) -> dict[str, Any]:
    values = dict(ADAPTERS[cell.adapter])
    values.pop("adapters", None)
    more = values.pop("more", ())
    targets = (
        _GPT2
        if cell.model == "gpt2"
        else _ATTENTION
        if cell.model in EXPERTS or cell.adapter == "lora-bias"
        else _LINEAR
    )
    if cell.adapter == "lora-bias" and cell.model == "gpt2":
        targets = _GPT2
    target_modules = [*targets["target_modules"], *more]
    return {"r": 4, "lora_alpha": 6, **targets, "target_modules": target_modules, **values}


def write_reference(cell: Cell, folder: Path) -> Path:
    """What PEFT and transformers write of the cell's model: `adapter-NAME.safetensors`, `merged/` and `full/`."""
    target = folder / cell.id.replace("/", "-")
    if target.exists():
        return target
    target.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(cell)
        for name in cell.names:
            tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
            save_file(
                {key: value.contiguous() for key, value in tensors.items()}, target / f"adapter-{name}.safetensors"
            )
        copy.deepcopy(model).merge_and_unload(adapter_names=[cell.names[-1]]).save_pretrained(target / "merged")
        MODELS[cell.model]().to(DTYPES[cell.dtypes][0]).save_pretrained(target / "full")
    return target


def read_reference(folder: Path, kind: str, adapter: str) -> dict[str, torch.Tensor]:
    if kind == "adapter":
        return load_file(folder / f"adapter-{adapter}.safetensors")
    return load_file(folder / kind / "model.safetensors")


def check_cells(world: World, cells: Sequence[Cell], folder: str) -> list[tuple[Cell, str, str]]:
    """On every rank: (cell, kind of export, "equal" | "refused: why" | "differs: where"), for every cell and kind."""
    outcomes = []
    for cell in cells:
        reference = Path(folder) / cell.id.replace("/", "-")
        try:
            sharded = shard_cell(cell)
        except ModelError as error:
            outcomes += [(cell, kind, f"refused: {error}") for kind in KINDS]
            continue
        before = _local_bytes(sharded)
        for kind in KINDS:
            outcomes.append((cell, kind, _outcome(world, sharded, reference, cell, kind)))
        if _local_bytes(sharded) != before:
            outcomes.append((cell, "live model", "differs: its shards"))
    return outcomes


def shard_cell(cell: Cell) -> ShardedModel:
    """Collective. Adapters keep their dtype: where a unit must have one, they get units of their own."""
    is_split = cell.dtypes == "mixed" and (cell.backend != "fsdp2" or not FSDP2_MIXES_FROZEN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 says for each unit that frozen and trainable parameters share it
        return lockstep.shard(
            build(cell),
            backend="fsdp2" if cell.backend == "fsdp2" else "fsdp1",
            use_orig_params=cell.backend != "fsdp1-flat",
            mixed_dtypes="split" if is_split else None,
        )


def _outcome(world: World, sharded: ShardedModel, reference: Path, cell: Cell, kind: str) -> str:
    wholes = {"adapter": lockstep.AdapterExport, "merged": lockstep.MergedExport}
    try:
        for name in cell.names if kind == "adapter" else cell.names[-1:]:
            what = lockstep.FullExport() if kind == "full" else wholes[kind](adapter=name)
            wanted = read_reference(reference, kind, name)
            found = difference(collect(sharded, what), wanted)
            # A small bucket: many windows; to rank 0, in bf16: one rounding, of the merged value.
            small = collect(sharded, what, bucket_bytes=4096, to=0, dtype=torch.bfloat16)
            rounded = {key: value.bfloat16() if value.is_floating_point() else value for key, value in wanted.items()}
            found = found or (difference(small, rounded) if world.is_main else "" if not small else "rank got tensors")
            if found:
                return f"differs: {found}"
    except IncompleteExport as error:
        return f"refused: {error}"
    return "equal"


def collect(sharded: ShardedModel, what: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Collective. An export as one dict; a name that comes twice is an error."""
    out: dict[str, torch.Tensor] = {}
    with lockstep.export_weights(sharded, what, **options) as stream:
        for bucket in stream:
            for name, tensor in bucket.items():
                assert name not in out, name
                out[name] = tensor
    return out


def difference(came: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> str:
    """The first thing in which two exports differ, in words; empty if they are the same to the bit."""
    if set(came) != set(wanted):
        return (
            f"names: only here {sorted(set(came) - set(wanted))[:3]}, only there {sorted(set(wanted) - set(came))[:3]}"
        )
    for name, tensor in came.items():
        other = wanted[name]
        if tensor.dtype != other.dtype or tensor.shape != other.shape:
            return f"{name}: {tensor.dtype} {list(tensor.shape)} for {other.dtype} {list(other.shape)}"
        if not torch.equal(*(each.reshape(-1).contiguous().view(torch.uint8) for each in (tensor, other))):
            return f"{name}: {int((tensor != other).sum())} of {tensor.numel()} elements"
    return ""


def _local_bytes(sharded: ShardedModel) -> list[str]:
    return [tensor_line(tensor.name, sharded.local_flat(tensor.name)) for tensor in sharded.plan.parameters]
