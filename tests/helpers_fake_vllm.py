"""A small imitation of vLLM's inside: fused parameters, a padded vocabulary, LoRA slots, and its traps, for the suite without vLLM.

The names and shapes of what is imitated are those of vLLM 0.32; `make test-vllm` holds the same code against the real one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.rollout.vllm_client import Ask, Reply, read_answer
from lockstep.rollout.vllm_receiver import VllmReceiver
from lockstep.transport.shm import ShmInlet

HIDDEN, HEADS, FFN, VOCAB, PADDED = 8, (8, 4, 4), 6, 10, 16
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class _Wrapped(nn.Module):
    """A linear layer as vLLM wraps it for LoRA."""

    def __init__(self, rows: int, columns: int):
        super().__init__()
        self.base_layer = nn.Module()
        self.base_layer.weight = nn.Parameter(torch.randn(rows, columns), requires_grad=False)


class FakeModel(nn.Module):
    """One layer with vLLM's fused and wrapped modules and a tied head."""

    packed_modules_mapping = FUSED

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = _Wrapped(PADDED, HIDDEN)
        self.model.layers = nn.ModuleList([nn.Module()])
        layer = self.model.layers[0]
        layer.self_attn, layer.mlp = nn.Module(), nn.Module()
        layer.self_attn.qkv_proj = _Wrapped(sum(HEADS), HIDDEN)
        layer.self_attn.o_proj = _Wrapped(HIDDEN, HEADS[0])
        layer.mlp.gate_up_proj = _Wrapped(2 * FFN, HIDDEN)
        layer.mlp.down_proj = _Wrapped(HIDDEN, FFN)
        self.model.norm = nn.Module()
        self.model.norm.weight = nn.Parameter(torch.randn(HIDDEN), requires_grad=False)
        self.lm_head = self.model.embed_tokens
        self.forgets: str | None = None
        """Name of a checkpoint tensor that `load_weights` drops without a word."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        live = {name.replace(".base_layer", ""): p for name, p in self.named_parameters(remove_duplicate=False)}
        loaded = set()
        for name, tensor in weights:
            target, first = _target(name)
            if target not in live:
                continue
            if name != self.forgets:
                live[target].data[first : first + tensor.shape[0]].copy_(tensor)
            loaded.add(target)
        return loaded


def _target(name: str) -> tuple[str, int]:
    """vLLM's parameter and first row of a checkpoint tensor."""
    for fused, parts in FUSED.items():
        sizes = HEADS if fused == "qkv_proj" else (FFN, FFN)
        for index, part in enumerate(parts):
            if f".{part}." in name:
                return name.replace(part, fused), sum(sizes[:index])
    return name, 0


def checkpoint(seed: int = 0) -> dict[str, Tensor]:
    """Random weights under their checkpoint names."""
    generator = torch.Generator().manual_seed(seed)
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        f"{layer}.self_attn.q_proj.weight": (HEADS[0], HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (HEADS[1], HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (HEADS[2], HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS[0]),
        f"{layer}.mlp.gate_proj.weight": (FFN, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (FFN, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, FFN),
        "model.norm.weight": (HIDDEN,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def adapter(
    rank: int = 2, modules: Sequence[str] = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"), seed: int = 0
):
    """Random LoRA matrices under PEFT's names, and their configuration."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in modules:
        rows, columns = checkpoint()[f"model.layers.0.{module}.weight"].shape
        prefix = f"base_model.model.model.layers.0.{module}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 6,
        "target_modules": [m.rpartition(".")[2] for m in modules],
    }
    return tensors, config


@dataclass
class FakeHelper:
    """vLLM's PEFTHelper, as far as it is used."""

    config: dict[str, Any]

    def validate_legal(self, lora_config: Any) -> None:
        if self.config["r"] > lora_config.max_lora_rank:
            raise ValueError(f"LoRA rank {self.config['r']} is greater than max_lora_rank {lora_config.max_lora_rank}.")

    def get_rank_and_scaling(self, module_name: str) -> tuple[int, float]:
        rank = self.config["r"]
        return rank, self.config["lora_alpha"] / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


class FakeLoraManager:
    """vLLM's WorkerLoRAManager: slots that it fills with A and B times the scaling, in place as vLLM does."""

    def __init__(self, model: FakeModel, max_rank: int = 4, max_loras: int = 2):
        self.lora_config = SimpleNamespace(max_lora_rank=max_rank, max_loras=max_loras, lora_dtype=torch.float32)
        self.vocab_size = VOCAB
        layer = "model.layers.0"
        sizes = {
            f"{layer}.self_attn.qkv_proj": (HIDDEN, HEADS),
            f"{layer}.self_attn.o_proj": (HEADS[0], (HIDDEN,)),
            f"{layer}.mlp.gate_up_proj": (HIDDEN, (FFN, FFN)),
            f"{layer}.mlp.down_proj": (FFN, (HIDDEN,)),
        }
        modules = {
            name: SimpleNamespace(
                lora_a_stacked=tuple(torch.zeros(max_loras, 1, max_rank, columns) for _ in rows),
                lora_b_stacked=tuple(torch.zeros(max_loras, 1, count, max_rank) for count in rows),
            )
            for name, (columns, rows) in sizes.items()
        }
        packed = {
            f"{layer}.self_attn.qkv_proj": [f"{layer}.self_attn.{part}" for part in FUSED["qkv_proj"]],
            f"{layer}.mlp.gate_up_proj": [f"{layer}.mlp.{part}" for part in FUSED["gate_up_proj"]],
        }
        self._adapter_manager = SimpleNamespace(
            modules=modules, packed_modules=packed, lora_index_to_id=[None] * max_loras, model=model
        )
        self._lora_model_cls = SimpleNamespace(from_lora_tensors=lambda **values: SimpleNamespace(**values))
        self.loses: str | None = None
        """Part of the name of a tensor that never reaches its slot."""

    def _load_adapter(self, request: Any) -> Any:
        raise FileNotFoundError(request.lora_path)

    def add_adapter(self, request: Any) -> None:
        lora = self._load_adapter(request)
        slots = self._adapter_manager.lora_index_to_id
        if None not in slots:  # as vLLM's cache does: the adapter that was loaded first goes
            self._clear(slots.index(min(slots)))
        slot = slots.index(None)
        slots[slot] = lora.lora_model_id
        for name, tensor in lora.tensors.items():
            module, kind = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".", 1)
            stacked, index = self._place(module, kind)
            if kind == "lora_B":
                tensor *= lora.peft_helper.get_rank_and_scaling(module)[1]
            if self.loses is None or self.loses not in name:
                stacked[index][slot, 0, : tensor.shape[0], : tensor.shape[1]] = tensor

    def _place(self, module: str, kind: str) -> tuple[tuple[Tensor, ...], int]:
        attribute = "lora_a_stacked" if kind == "lora_A" else "lora_b_stacked"
        for fused, parts in self._adapter_manager.packed_modules.items():
            if module in parts:
                return getattr(self._adapter_manager.modules[fused], attribute), parts.index(module)
        return getattr(self._adapter_manager.modules[module], attribute), 0

    def remove_adapter(self, lora_id: int) -> None:
        slots = self._adapter_manager.lora_index_to_id
        if lora_id in slots:
            self._clear(slots.index(lora_id))

    def remove_all_adapters(self) -> None:
        for slot in range(len(self._adapter_manager.lora_index_to_id)):
            self._clear(slot)

    def _clear(self, slot: int) -> None:
        self._adapter_manager.lora_index_to_id[slot] = None
        for module in self._adapter_manager.modules.values():
            for stacked in (*module.lora_a_stacked, *module.lora_b_stacked):
                stacked[slot] = 0


def fake_worker(*, with_lora: bool = True, world_size: int = 1) -> Any:
    model = FakeModel()
    manager = FakeLoraManager(model) if with_lora else None
    runner = SimpleNamespace(model=model, lora_manager=manager, device=torch.device("cpu"))
    model_config = SimpleNamespace(logprobs_mode="processed_logprobs", max_model_len=64, dtype=torch.float32)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=world_size), lora_config=with_lora or None, model_config=model_config
    )
    return SimpleNamespace(model_runner=runner, vllm_config=config)


def fake_receiver(worker: Any) -> VllmReceiver:
    return VllmReceiver(worker, read_config=FakeHelper)


@dataclass
class FakeReplica:
    """A `Replica` whose worker is real from the receiver on. Draws the same tokens for the same seed."""

    worker: Any = field(default_factory=fake_worker)
    log: list[str] = field(default_factory=list)
    """What was called, in order, without the calls of a transport."""
    aborts: int = 0
    """How many of the next completions an update is said to abort."""
    logprob: float = -0.5
    is_raw: bool = False
    label: str = "default"
    is_up: bool = True

    def __post_init__(self) -> None:
        self.receiver = fake_receiver(self.worker)
        self._inlet = ShmInlet(self.receiver)
        self._names: dict[str, int] = {}
        self._paused = False

    def call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        try:
            transport, _, name = method.rpartition(".")
            return read_answer({"ok": (self._inlet if transport else self.receiver).handle(name, payload)})
        except Exception as error:
            return read_answer({"error": type(error).__name__, "message": str(error)})

    def ask(self, asks: Sequence[Ask]) -> list[Reply]:
        return [self._ask(ask) for ask in asks]

    def _ask(self, ask: Ask) -> Reply:
        assert ask.model is None or ask.model in self._names, f"the model {ask.model} does not exist"
        if self.aborts:
            self.aborts -= 1
            return Reply((), (), "abort", ())
        count = ask.params["max_tokens"]
        ids = tuple((ask.params["seed"] + step) % VOCAB for step in range(count))
        is_certain = ask.params["top_k"] == 1 and not self.is_raw
        return Reply(ids, (0.0 if is_certain else self.logprob,) * count, "length", (self.label,))

    def pause(self, *, abort: bool) -> None:
        self._paused = True
        self.log.append("abort" if abort else "wait")

    def resume(self) -> None:
        self._paused = False
        self.log.append("resume")

    def is_paused(self) -> bool:
        return self._paused

    def reset_cache(self) -> None:
        self.log.append("reset")

    def load_adapter(self, name: str, path: str) -> None:
        self._names[name] = len(self.log) + 1
        self.worker.model_runner.lora_manager.add_adapter(
            SimpleNamespace(lora_name=name, lora_int_id=self._names[name], lora_path=path)
        )
        self.log.append(f"load {name.rpartition('-')[0]}")

    def unload_adapter(self, name: str) -> None:
        del self._names[name]
        self.log.append(f"unload {name.rpartition('-')[0]}")

    def adapters(self) -> list[str]:
        return list(self._names)

    def set_weights(self, label: str) -> None:
        self.label = label
        self.log.append(f"label {label.rpartition(':')[0] if label.count(':') > 1 else label}")

    def is_healthy(self) -> bool:
        return self.is_up

    def close(self) -> None:
        self.log.append("close")
