"""A parity batch in; what TRL's own trainers, unmodified and from the released package, make of it, out.

TRL's advantages and losses are methods of its trainers. They are called here on an object that holds the settings they
read, and whose model answers with the batch's log-probabilities: no line of the methods is replaced.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from parity_batch import GROUPS, LENGTHS, MAX_TOKENS, REWARDS, Batch, Result, with_gradients
from torch import Tensor, nn
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss

GROUP_SIZE = 3


class Settings(SimpleNamespace):
    """What the methods read of a trainer, by TRL's names and at its defaults unless given."""

    def __init__(self, answer: Any, **given: Any):
        args = {
            "delta": None,
            "use_bias_correction_kl": False,
            "steps_per_generation": 1,
            "gradient_accumulation_steps": 1,
            "gradient_checkpointing_kwargs": None,
            "per_device_train_batch_size": len(LENGTHS),
            "per_device_eval_batch_size": len(LENGTHS),
        }
        args |= {name: given.pop(name) for name in list(given) if name in args}
        super().__init__(args=SimpleNamespace(**args), **(DEFAULTS | {"model": _model()} | given))
        self._get_per_token_logps_and_entropies = answer
        self._metrics = {"train": defaultdict(list)}
        self._logs = defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)}
        self._pending_extra_logs, self._pending_metrics = {}, {}
        self._tokenizer = SimpleNamespace(pad_token_id=0)


DEFAULTS = {
    "accelerator": Accelerator(cpu=True),
    "aux_loss_enabled": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "importance_sampling_level": "token",
    "beta": 0.0,
    "loss_type": "dapo",
    "epsilon_low": 0.2,
    "epsilon_high": 0.28,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "current_gradient_accumulation_steps": 1,
    "max_completion_length": MAX_TOKENS,
    "_entropy_bonus_enabled": False,
    "use_adaptive_entropy": False,
    "entropy_coef": 0.0,
    "num_generations": GROUP_SIZE,
    "num_iterations": 1,
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "reward_weights": torch.ones(1),
    "reward_func_names": ["given"],
    "reward_funcs": [None],
    "environment_factories": None,
    "environments": None,
    "tools": None,
    "pad_to_multiple_of": None,
    "mask_truncated_completions": False,
    "normalize_advantages": False,
    "reward_clip_range": None,
    "ref_model": None,
    "rollout_func": None,
    "_is_vlm": False,
    "log_multimodal": False,
    "eos_token_ids": [1],
}


def _model() -> nn.Module:
    model = nn.Linear(1, 1)
    model.is_gradient_checkpointing = False
    return model.train()


def _tokens(batch: Batch) -> dict[str, Tensor]:
    ones = torch.ones(len(LENGTHS), 1, dtype=torch.int64)
    mask = batch.mask.long()
    return {"prompt_ids": ones, "prompt_mask": ones, "completion_ids": mask, "completion_mask": mask}


def grpo_loss(batch: Batch, *, weights: Tensor | None = None, entropy_coef: float = 0.0, **settings: Any) -> Result:
    """The loss of one micro-batch that is the whole batch. `weights` stands for the vLLM correction."""
    flat = batch.flat

    def answer(*_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return batch.padded(flat["logprobs"]), batch.padded(flat["entropy"]), None

    per_sample = batch.padded(flat["advantages"])[:, 0]
    inputs = _tokens(batch) | {
        "advantages": per_sample,
        "old_per_token_logps": batch.padded(flat["old"]),
        "ref_per_token_logps": batch.padded(flat["ref"]),
        "num_items_in_batch": batch.mask.sum(),
        "importance_sampling_ratio": weights,
    }
    trainer = Settings(
        answer,
        use_vllm=weights is not None,
        _entropy_bonus_enabled=entropy_coef != 0,
        entropy_coef=entropy_coef,
        **settings,
    )
    return with_gradients(batch, GRPOTrainer._compute_loss(trainer, trainer.model, inputs))


def rloo_loss(batch: Batch, *, on_policy: bool) -> Result:
    logprobs = batch.padded(batch.flat["logprobs"])
    old = logprobs.detach() if on_policy else batch.padded(batch.flat["old"])
    trainer = Settings(lambda *_, **__: (logprobs, batch.padded(batch.flat["entropy"]), None))
    per_sample = batch.padded(batch.flat["advantages"])[:, 0]
    inputs = _tokens(batch) | {"advantages": per_sample, "old_logps": (old * batch.mask).sum(1)}
    return with_gradients(batch, RLOOTrainer._compute_loss(trainer, trainer.model, inputs))


def scored(batch: Batch, trainer_class: type, **settings: Any) -> dict[str, Tensor]:
    """What the trainer's `_generate_and_score_completions` returns for completions of the batch's lengths and rewards."""
    completions = [[2] * (length - 1) + [1] for length in LENGTHS]
    trainer = Settings(
        lambda *_, **__: (batch.padded(batch.flat["old"]).detach()[:, : max(LENGTHS)], None, None),
        _calculate_rewards=lambda *_: torch.tensor(REWARDS, dtype=torch.float64)[:, None],
        **settings,
    )
    texts = [""] * len(LENGTHS)
    rollout = batch.padded(batch.flat["rollout"]).detach()
    sampled = [rollout[i, :length].tolist() for i, length in enumerate(LENGTHS)]
    generated = {
        GRPOTrainer: ([[3]] * len(LENGTHS), completions, None, texts, sampled, {}, None, None),
        RLOOTrainer: ([[3]] * len(LENGTHS), completions, texts),
    }[trainer_class]
    trainer._generate = lambda *_: generated
    return trainer_class._generate_and_score_completions(trainer, [{"prompt": ""} for _ in GROUPS])


def advantages(batch: Batch, trainer_class: type = GRPOTrainer, **settings: Any) -> Result:
    """[B]"""
    return Result(scored(batch, trainer_class, **settings)["advantages"])


def weights(batch: Batch, mode: str, *, low: float | None, high: float) -> Result:
    """[N]"""
    found = scored(
        batch,
        GRPOTrainer,
        use_vllm=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    return Result(batch.unpadded(found["importance_sampling_ratio"]))


def reverse_kl(student: Tensor, teacher: Tensor) -> Result:
    """Mean over tokens of TRL's distillation loss at its default, beta=1. [N, V] logits stand for hidden states, with an
    identity for the head; TRL computes in float32."""
    states = student.clone().requires_grad_()
    eye, mask = torch.eye(student.shape[1]), torch.ones(1, student.shape[0], dtype=torch.int64)
    loss, *_ = _chunked_divergence_loss(states[None], teacher[None], eye, eye, mask, 1.0)
    return Result(loss.detach(), torch.autograd.grad(loss, [states]))
