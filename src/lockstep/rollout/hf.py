"""Prompts in, samples out, from a transformers model in this process: the embedded engine, on CPU or GPU.

The model is the engine's own, read from the checkpoint; the trainer's weights reach it over `begin`, `receive`,
`commit`. Nothing computed from weights is kept between calls of `generate` (there is no prefix cache), so a commit has
nothing to drop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep.data.room import positions_of
from lockstep.errors import LockstepError, ModelError, StaleWeights, TransportError
from lockstep.rollout.base import Abilities, Engine, check_prompts
from lockstep.rollout.hf_batch import Batch, Budget, plan_batches
from lockstep.rollout.hf_decode import Completions, LastLogits, complete
from lockstep.rollout.hf_names import checkpoint_tensors
from lockstep.rollout.hf_weights import AdapterHost, AdapterUpdate, InPlaceUpdate, Update
from lockstep.sampling import check_sampling, draw_rows, row_uniforms
from lockstep.types import Bucket, Draw, Manifest, Prompt, Sample, Sampling, WeightKind

_FORWARD_TOKENS = {"cpu": 32}
_FORWARD_TOKENS_GPU = 1024
"""What one more forward pass costs, in tokens of a larger one. CPU, measured: 56 ms against 2.4 ms a token
(SmolLM2-135M, one core). GPU, an estimate: launching a pass takes as long as a pass over some hundred tokens."""
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


class Decoder(Protocol):
    """The part of a transformers tokenizer that the engine uses."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> Any: ...


class HFEngine(Engine):
    """An `Engine` (see `lockstep.rollout.base`) around a transformers model.

    A completion ends at any of `eos_ids` or of the call's `sampling.eos_ids`. `cache_tokens` bounds the key-value cache
    of one batch, in tokens; while rows leave a batch one layer of it is there twice. Prompts that share a beginning, or
    are equal, are computed once. What else is in its batch changes a sample's logits by rounding only (about 1e-6 in
    fp32), and hence its tokens only where a random number falls into that gap.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: Decoder,
        eos_ids: Iterable[int],
        device: torch.device | str,
        cache_tokens: int,
        model_max_len: int | None = None,
    ):
        """`model` becomes the engine's own. `model_max_len`: positions the model has; None reads its configuration."""
        _check_servable(model)
        self._device = torch.device(device)
        self._model = model.to(self._device).eval().requires_grad_(False)  # pyright: ignore[reportArgumentType]
        self._tokenizer = tokenizer
        self._eos_ids = tuple(sorted(set(eos_ids)))
        self._cache_tokens = cache_tokens
        self._max_len = model_max_len or positions_of(model.config)
        self._forward = LastLogits(model)
        # Taken before an adapter is injected: PEFT wraps modules, not parameters, so these stay the model's own.
        self._live = dict(model.state_dict(keep_vars=True))
        self._base_is_merged = False
        self._adapter = AdapterHost(model)
        self._update: Update | None = None
        self._stale: str | None = None
        self._version = 0

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | str,
        attention: str,
        device: torch.device | str,
        tokenizer: Any,
        eos_ids: Iterable[int] = (),
        cache_tokens: int,
    ) -> HFEngine:
        """Read the checkpoint in folder `path`. `eos_ids` are added to the tokenizer's and the checkpoint's own.

        Raises `ModelError` if the folder holds no model that transformers can load.
        """
        if not (Path(path) / "config.json").is_file():
            raise ModelError(f"{str(path)!r} is not the folder of a transformers checkpoint: it holds no config.json")
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
        except (OSError, ValueError) as error:
            raise ModelError(f"transformers cannot load a causal language model from {str(path)!r}: {error}") from error
        eos = resolve_eos_ids(tokenizer, model.config, model.generation_config, eos_ids)
        return cls(model, tokenizer=tokenizer, eos_ids=eos, device=device, cache_tokens=cache_tokens)

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end every completion, whatever a call's sampling adds."""
        return self._eos_ids

    @property
    def abilities(self) -> Abilities:
        dtype = str(self._model.dtype).removeprefix("torch.")
        max_len = min(self._max_len or self._cache_tokens, self._cache_tokens)
        return Abilities(frozenset(get_args(WeightKind)), dtype, keeps_prefixes=False, max_len=max_len)

    @property
    def is_shared(self) -> bool:
        """Never: each rank has its own."""
        return False

    def close(self) -> None:
        """Nothing to do: its memory goes with it."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, draw: Draw) -> list[Sample]:
        """See `Engine.generate`. While an adapter update is open, the old version is served."""
        if self._stale is not None:
            raise StaleWeights(self._stale)
        check_sampling(sampling)
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1; {num_samples} came")
        check_prompts(prompts, sampling, self._max_len)
        budget = Budget(
            cache_tokens=self._cache_tokens,
            max_new_tokens=sampling.max_new_tokens,
            forward_tokens=_FORWARD_TOKENS.get(self._device.type, _FORWARD_TOKENS_GPU),
            share_prefix=_attends_everywhere(self._model),
        )
        rows = draw_rows(draw, len(prompts), num_samples)
        plans = plan_batches([prompt.ids for prompt in prompts], rows=rows, budget=budget)
        by_row = {row: prompt for prompt, own in zip(prompts, rows, strict=True) for row in own}
        samples = [sample for batch in plans for sample in self._run(batch, sampling, draw, by_row)]
        return sorted(samples, key=lambda sample: (sample.slot, sample.index))

    def begin(self, manifest: Manifest) -> None:
        """See `Receiver.begin`. Kind adapter: the old version stays served. Others: nothing is, until the commit."""
        if self._update is not None:
            raise TransportError(
                f"version {manifest.version} cannot begin: the update to version {self._update.manifest.version} is "
                "open; commit or abort it first"
            )
        if manifest.kind == "adapter":
            self._check_base_takes_adapters(manifest)
            self._update = AdapterUpdate(self._adapter, manifest, self._device)
            return
        self._update = InPlaceUpdate(checkpoint_tensors(self._model, self._live), manifest)
        self._adapter.serve(None)
        self._base_is_merged = manifest.kind == "merged"
        self._stale = (
            f"the engine's weights are being overwritten with version {manifest.version}, which is not committed; "
            "finish that update, or send a complete one"
        )

    def receive(self, bucket: Bucket) -> None:
        self._open_update("receive").receive(bucket)

    def commit(self, digest: str) -> None:
        """See `Receiver.commit`. A failed commit ends the update as an abort does."""
        update = self._open_update("commit")
        self._update = None
        update.commit(digest)
        self._version, self._stale = update.manifest.version, None

    def abort(self, reason: str) -> None:
        """See `Receiver.abort`. Nothing to do where no update is open, e.g. after a failed commit."""
        if self._update is None:
            return
        if self._stale is not None:
            self._stale = (
                f"the update to version {self._update.manifest.version} was aborted after it had begun to overwrite "
                f"the engine's weights ({reason}); send a complete merged or full update"
            )
        self._update = None

    def _open_update(self, call: str) -> Update:
        if self._update is None:
            raise TransportError(f"{call} came without a begin: no update is open; call begin with its manifest first")
        return self._update

    def _check_base_takes_adapters(self, manifest: Manifest) -> None:
        if self._stale is not None:
            raise TransportError(f"an adapter (version {manifest.version}) needs whole base weights, but {self._stale}")
        if self._base_is_merged:
            raise TransportError(
                f"an adapter (version {manifest.version}) would be applied twice: the engine's base holds the merged "
                f"weights of version {self._version}; keep to merged updates, or send the base with a full one first"
            )

    def _run(
        self, batch: Batch, sampling: Sampling, draw: Draw, prompts: dict[tuple[int, int], Prompt]
    ) -> list[Sample]:
        count = sampling.max_new_tokens
        if sampling.temperature == 0:
            uniforms = torch.zeros(len(batch.rows), count, dtype=torch.float64)
        else:
            uniforms = torch.stack([row_uniforms(draw, row.slot, row.index, count) for row in batch.rows])
        eos_ids = sorted({*self._eos_ids, *sampling.eos_ids})
        eos = torch.tensor(eos_ids, dtype=torch.long, device=self._device)
        done = complete(self._forward, batch, sampling, uniforms_NT=uniforms, eos=eos)
        self._check_finite(done, batch)
        return self._samples(done, batch, prompts, frozenset(eos_ids))

    def _check_finite(self, done: Completions, batch: Batch) -> None:
        drawn = torch.arange(done.ids_NT.shape[1]) < done.lengths_N[:, None]
        broken = (drawn & ~done.logprobs_NT.isfinite()).any(dim=1).nonzero()
        if len(broken):
            row = batch.rows[int(broken[0])]
            raise LockstepError(
                f"the log-probabilities of slot {row.slot}, sample {row.index} are not finite: the weights of version "
                f"{self._version} are damaged or overflow in the engine's dtype"
            )

    def _samples(
        self, done: Completions, batch: Batch, prompts: dict[tuple[int, int], Prompt], eos_ids: frozenset[int]
    ) -> list[Sample]:
        rows = zip(batch.rows, done.ids_NT.tolist(), done.logprobs_NT.tolist(), done.lengths_N.tolist(), strict=True)
        return [
            Sample(
                prompt=prompts[row.slot, row.index],
                slot=row.slot,
                index=row.index,
                ids=tuple(ids[:length]),
                logprobs=tuple(logprobs[:length]),
                text=self._tokenizer.decode(ids[:length], skip_special_tokens=True),
                finish="stop" if ids[length - 1] in eos_ids else "length",
                policy_version=self._version,
            )
            for row, ids, logprobs, length in rows
        ]


def resolve_eos_ids(tokenizer: Any, config: Any, generation_config: Any, extra: Iterable[int]) -> tuple[int, ...]:
    """All ids that end a completion: the tokenizer's, the checkpoint's (an id or a list, in either file) and `extra`.

    `generation_config` may be None. Nothing else of it is used anywhere: temperature, penalties and the rest are what
    the recipe says.
    """
    found = [tokenizer.eos_token_id, getattr(config, "eos_token_id", None)]
    found.append(getattr(generation_config, "eos_token_id", None))
    ids: set[int] = set(extra)
    for value in found:
        if value is not None:
            ids.update(value if isinstance(value, list | tuple) else [value])
    return tuple(sorted(ids))


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _check_servable(model: PreTrainedModel) -> None:
    """Rows of a batch start at different columns, which a recurrent state does not know about."""
    others = sorted(set(getattr(_text_config(model), "layer_types", None) or ()) - _LAYER_TYPES)
    if others or getattr(model, "_is_stateful", False):
        raise ModelError(
            f"the hf engine serves models with attention layers only; {type(model).__name__} has {others or 'a state'}"
        )


def _attends_everywhere(model: PreTrainedModel) -> bool:
    """Whether attention depends on the mask and on positions only, and not on how many columns lie between two tokens."""
    config = _text_config(model)
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return layer_types == {"full_attention"} and not has_window
