"""Token ids in, token ids and logprobs out, from a tiny model with the parts in which real engines go wrong.

Those are a prefix cache that outlives the weights it was computed with, adapters that get lost when the base is loaded, a
tied head that goes stale, logprobs of another distribution, and weights that change in the middle of a completion.
"""

from __future__ import annotations

import copy
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from transformers import DynamicCache, PreTrainedModel

from lockstep.rollout.hf_names import checkpoint_tensors
from lockstep.rollout.hf_weights import Adapter, AdapterHost, engine_config
from lockstep.sampling import draw_tokens, row_uniforms, sampling_logprobs
from lockstep.types import Draw, Manifest, Sampling

WAIT_LIMIT_S = 60.0
"""No wait of a fake is longer, so that a broken test ends."""

_INJECTING = threading.RLock()
"""PEFT puts an adapter in while functions of torch are patched for the whole process; several fakes in one take turns."""


@dataclass(slots=True)
class Traps:
    """How the engine behind the server goes wrong. The defaults are what real engines do; a client must cope."""

    forgets_adapters: bool = True
    """Loading base weights drops every adapter."""
    stale_head: bool = False
    """A tied output head keeps the weights it had when the embedding under it is replaced."""
    raw_logprobs: bool = False
    """Logprobs are those of the unprocessed logits, whatever temperature, top-k and top-p are."""
    ignores_adapter: bool = False
    """Requests that name an adapter are answered by the base."""


class TokenGate:
    """Holds every generation back once `after` tokens are drawn, until `release` is set."""

    def __init__(self, after: int):
        self.after = after
        self.reached = threading.Event()
        self.release = threading.Event()

    def pass_through(self, drawn: int) -> None:
        if drawn == self.after:
            self.reached.set()
            assert self.release.wait(WAIT_LIMIT_S), "the test never released the gate"


@dataclass(frozen=True, slots=True)
class Generated:
    """One completion of `ServedModel.generate`."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length", "abort"]
    cached: int
    """Leading prompt tokens that were taken from the prefix cache."""
    labels: tuple[str, ...]
    """`ServedModel.label` at each token, without repetitions of the one before."""


class ServedModel:
    """Token by token, so that weights can change in the middle of a completion as they can in a real engine.

    Prompts share a prefix cache of blocks of `block_size` tokens. It is keyed by tokens and `cache_key` only: whoever
    changes weights and does not call `reset_cache` gets answers that are part old, part new.
    """

    def __init__(self, model: PreTrainedModel, *, eos_ids: Sequence[int] = (2,), block_size: int = 16):
        self.model = model.eval().requires_grad_(False)
        self.eos_ids = tuple(eos_ids)
        self.block_size = block_size
        self.traps = Traps()
        self.gate: TokenGate | None = None
        self.adapters: dict[str, Adapter] = {}
        self.label = "default"
        """What the engine calls its weights; it is recorded with each token."""
        # transformers renamed `past_key_values` to `cache` in 5.24.
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._live = dict(model.state_dict(keep_vars=True))
        self._host = AdapterHost(model)
        self._cache: dict[tuple[str, tuple[int, ...]], DynamicCache] = {}
        self._turn = threading.Condition()
        self._running = 0
        self._is_closed = False
        self._holds = False
        self._aborts = 0

    @property
    def num_running(self) -> int:
        """Completions that are being made, held back ones included."""
        return self._running

    @property
    def num_cached(self) -> int:
        """Entries of the prefix cache."""
        return len(self._cache)

    def generate(
        self, ids: Sequence[int], sampling: Sampling, *, seed: int, adapter: str | None = None, cache_key: str = ""
    ) -> Generated:
        """One completion with the weights that are there at each token. `seed` alone names what it draws."""
        with self._turn:
            self._await(lambda: not self._is_closed)
            self._running += 1
            aborts = self._aborts
        try:
            return self._complete(tuple(ids), sampling, seed, adapter, cache_key, aborts)
        finally:
            with self._turn:
                self._running -= 1
                self._turn.notify_all()

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite base weights, by checkpoint name, while requests may run. Raises `KeyError` for unknown names."""
        with self._turn, torch.no_grad():
            with _INJECTING:
                self._host.serve(None)
            head: Any = self.model.get_output_embeddings()
            is_tied = head.weight is self.model.get_input_embeddings().weight
            if self.traps.stale_head and is_tied:
                head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
            base = checkpoint_tensors(self.model, self._live)
            for name, tensor in tensors.items():
                base[name].copy_(tensor)
            if self.traps.forgets_adapters:
                self.adapters.clear()

    def load_folder(self, folder: Path) -> None:
        """`load` of every safetensors file of a checkpoint folder."""
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder} holds no safetensors file")
        self.load({name: tensor for path in files for name, tensor in load_file(path).items()})

    def weights(self) -> dict[str, torch.Tensor]:
        """The live base weights by checkpoint name."""
        return dict(checkpoint_tensors(self.model, self._live))

    def add_adapter(self, name: str, folder: Path) -> None:
        """`put_adapter` of files in PEFT's format. Raises `OSError` where they are not."""
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        self.put_adapter(name, config, load_file(folder / "adapter_model.safetensors"))

    def put_adapter(self, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Make an adapter known. One that stands under the same name is replaced. Raises `ValueError` if it does not fit."""
        with self._turn:
            manifest = Manifest(version=0, kind="adapter", specs=(), adapter_config=config)
            adapter = Adapter(engine_config(manifest), tensors)
            with _INJECTING:
                shapes = self._host.shapes(adapter.config)
            if shapes != {key: tuple(tensor.shape) for key, tensor in tensors.items()}:
                raise ValueError(f"the tensors of adapter {name!r} do not fit the model")
            self.adapters[name] = adapter

    def reset_cache(self) -> bool:
        """Empty the prefix cache; False (and nothing done) while completions are being made, as real engines do."""
        with self._turn:
            if self._running:
                return False
            self._cache.clear()
            return True

    def pause(self, mode: Literal["keep", "wait", "abort"]) -> None:
        """keep: hold running requests where they are; wait: let them end first; abort: end them with what they have."""
        with self._turn:
            self._is_closed, self._holds = True, mode == "keep"
            if mode == "abort":
                self._aborts += 1
                self._turn.notify_all()
            if mode != "keep":
                self._await(lambda: not self._running)

    def wait_aborted(self, count: int) -> None:
        """Until `count` pauses with mode "abort" have come."""
        with self._turn:
            self._await(lambda: self._aborts >= count)

    def resume(self) -> None:
        """End a pause: held requests go on with the weights that are there now."""
        with self._turn:
            self._is_closed = self._holds = False
            self._turn.notify_all()

    def _await(self, condition: Callable[[], bool]) -> None:
        assert self._turn.wait_for(condition, WAIT_LIMIT_S), "the fake engine waited for too long"

    @torch.no_grad()
    def _complete(
        self, prompt: tuple[int, ...], sampling: Sampling, seed: int, adapter: str | None, key: str, aborts: int
    ) -> Generated:
        uniforms = row_uniforms(Draw(seed, 0), 0, 0, sampling.max_new_tokens)
        past, cached = self._cached(prompt, key)
        ids: list[int] = []
        logprobs: list[float] = []
        labels: list[str] = []

        def done(finish: Literal["stop", "length", "abort"]) -> Generated:
            return Generated(tuple(ids), tuple(logprobs), finish, cached, tuple(labels))

        fresh = prompt[cached:]
        for place in range(sampling.max_new_tokens):
            if self.gate is not None:
                self.gate.pass_through(place)
            with self._turn:
                self._await(lambda: not self._holds or self._aborts > aborts)
                if self._aborts > aborts:
                    return done("abort")
                logits_1V = self._forward(fresh, past, adapter)
                if place == 0:
                    self._keep(prompt, key, past)
                if labels[-1:] != [self.label]:
                    labels.append(self.label)
            token, logprob = self._draw(logits_1V, sampling, uniforms[place : place + 1])
            ids.append(token)
            logprobs.append(logprob)
            if token in self.eos_ids or token in sampling.eos_ids:
                return done("stop")
            fresh = (token,)
        return done("length")

    def _forward(self, fresh: tuple[int, ...], past: DynamicCache, adapter: str | None) -> torch.Tensor:
        served = None if adapter is None or self.traps.ignores_adapter else self.adapters[adapter]
        with _INJECTING:
            self._host.serve(served)
        output = self.model(input_ids=torch.tensor([fresh]), use_cache=True, **{self._cache_name: past})
        return output.logits[:, -1]

    def _draw(self, logits_1V: torch.Tensor, sampling: Sampling, uniform_1: torch.Tensor) -> tuple[int, float]:
        logprobs_1V = sampling_logprobs(logits_1V, sampling)
        drawn = logits_1V.argmax(dim=-1) if sampling.temperature == 0 else draw_tokens(logprobs_1V, uniform_1)
        token = int(drawn[0])
        told_1V = torch.log_softmax(logits_1V.float(), dim=-1) if self.traps.raw_logprobs else logprobs_1V
        return token, float(told_1V[0, token])

    def _cached(self, prompt: tuple[int, ...], key: str) -> tuple[DynamicCache, int]:
        """Keys and values of the longest cached beginning that leaves at least one token to compute."""
        for length in range((len(prompt) - 1) // self.block_size * self.block_size, 0, -self.block_size):
            entry = self._cache.get((key, prompt[:length]))
            if entry is not None:
                return copy.deepcopy(entry), length
        return DynamicCache(config=self.model.config), 0

    def _keep(self, prompt: tuple[int, ...], key: str, past: DynamicCache) -> None:
        length = len(prompt) // self.block_size * self.block_size
        if length and (key, prompt[:length]) not in self._cache:
            entry = copy.deepcopy(past)
            if length < len(prompt):
                entry.crop(length - len(prompt))
            self._cache[key, prompt[:length]] = entry
