"""The options of the update: how rewards become advantages, which loss, how often, how fast. sections.py ties them to the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from lockstep.sections_base import BelowOne, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

CORRECTION_BOUNDS: Mapping[str, tuple[float, float]] = {
    "token_tis": (0.0, 2.0),
    "sequence_tis": (0.0, 2.0),
    "sequence_mask": (0.0, 3.0),
    "icepop": (0.5, 5.0),
    "geometric_reject": (0.999, 1.001),
}
"""Of p(trainer) / p(engine), where a recipe names none: verl's, TRL's (sequence_mask is its default) and Ring-1T's usual ones."""


class TrainConfig(Section):
    algorithm: Literal[
        "grpo",
        "grpo_batch_std",
        "dr_grpo",
        "rloo",
        "rloo_std",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gae",
        "distill",
    ] = Field(
        default="grpo",
        description="how rewards become advantages; gae takes a critic's values (section critic); distill: none, only a teacher "
        "is learned from (section teacher), and rewards are watched",
    )
    loss: Literal["ppo", "gspo", "cispo"] = Field(
        default="ppo",
        description="ppo clips a token's ratio, gspo a sample's; cispo clips the weight and keeps every token's gradient",
    )
    aggregation: Literal["auto", "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length"] = Field(
        default="auto",
        description="how token losses add up; auto: constant_length for dr_grpo, seq_mean_token_mean for gspo, else token_mean",
    )
    epochs: PositiveInt = Field(default=1, description="times that a step's samples are trained on")
    mini_batches: PositiveInt = Field(
        default=1,
        description="optimizer steps per epoch: prompts are shuffled (by run.seed) and dealt out, with all their samples",
    )
    stop_kl: NonNegativeFloat = Field(
        default=0.0,
        description="leave a step's other mini-batches out once one's KL to the policy before the step is above this; 0: never",
    )
    lr: PositiveFloat = Field(default=1e-4, description="AdamW learning rate")
    betas: tuple[BelowOne, BelowOne] = Field(default=(0.9, 0.999), description="AdamW moment decay rates")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="AdamW decoupled weight decay")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="learning rate after warm-up, down to 0 at run.num_steps"
    )
    warmup_steps: NonNegativeInt = Field(default=0, description="steps of linear warm-up")
    max_grad_norm: PositiveFloat = Field(default=1.0, description="clip the global gradient norm to this")
    clip_low: NonNegativeFloat | None = Field(
        default=None,
        description="ratio clipped below 1 - clip_low; none: ppo 0.2, gspo 0.0003, cispo 1; no effect with a single update per step",
    )
    clip_high: NonNegativeFloat | None = Field(
        default=None,
        description="ratio clipped above 1 + clip_high; none: ppo 0.28, gspo 0.0004, cispo 4; no effect with a single update",
    )
    clip_dual: NonNegativeFloat | None = Field(
        default=None,
        description="ppo: for a negative advantage the loss stops growing at this ratio; none: 3 (if above the clip range); 0: never",
    )
    entropy_coef: NonNegativeFloat = Field(default=0.0, description="weight of the entropy bonus in the loss")
    kl_coef: NonNegativeFloat = Field(
        default=0.0, description="weight of the KL to the reference policy; 0 skips the reference pass"
    )
    reference: Literal["start", "base"] = Field(
        default="start",
        description="the reference policy: start is what training starts from (with lora.init_from a frozen copy of that adapter, "
        "else the base); base is the model without any adapter",
    )
    kl_kind: Literal["k1", "k2", "k3", "k3_k2", "k3_weighted"] = Field(
        default="k3",
        description="its estimate (docs/algorithms.md says what each does); k1 is the right one in the reward",
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="where it goes: into the loss, or off the rewards before advantages are computed"
    )
    correction: Literal["none", "token_tis", "sequence_tis", "sequence_mask", "icepop", "geometric_reject"] = Field(
        default="none",
        description="weights or masks against the engine's mismatch: p(trainer) / p(engine) of the sampled tokens, kept in bounds",
    )
    correction_low: NonNegativeFloat | None = Field(
        default=None, description="its lower bound; none: icepop 0.5, geometric_reject 0.999, others 0"
    )
    correction_high: PositiveFloat | None = Field(
        default=None,
        description="its upper bound; none: token_tis and sequence_tis 2, sequence_mask 3, icepop 5, geometric_reject 1.001",
    )
    drop_zero_std: bool = Field(
        default=True,
        description="leave groups whose rewards are all equal out of the update (only KL and entropy would give them a gradient)",
    )
    mask_truncated: bool = Field(default=False, description="leave completions cut at max_new_tokens out of the loss")
    packing: Literal["auto", "padded", "packed", "shared_prefix"] = Field(
        default="auto",
        description="padded: a row per sample; packed: samples in a row; shared_prefix: a group's prompt computed once; auto: the "
        "last of these that the model can do, with a warning where it is not the last",
    )
    micro_batch_tokens: PositiveInt = Field(
        default=8192,
        description="tokens of one forward and backward pass, per rank",
    )
    offload_optimizer: bool = Field(
        default=False, description="keep the optimizer's state in host memory between steps (no effect on a CPU)"
    )
    offload_activations: bool = Field(
        default=False,
        description="keep what forward saves for backward in host memory until backward (no effect on a CPU)",
    )

    @model_validator(mode="after")
    def _check_together(self) -> TrainConfig:
        clip = 0.28 if self.clip_high is None else self.clip_high
        if self.clip_dual and self.loss != "ppo":
            raise ValueError(f"clip_dual={self.clip_dual} belongs to loss: ppo, and loss is {self.loss}; leave it out")
        if self.clip_dual and self.clip_dual <= 1 + clip:
            raise ValueError(f"clip_dual={self.clip_dual} must be above the clip range, which ends at {1 + clip:g}")
        if self.kl_in == "reward" and self.kl_kind not in ("k1", "k2", "k3"):
            raise ValueError(f"kl_kind={self.kl_kind} shapes a gradient, and a reward has none; use k1, k2 or k3")
        if self.correction == "none" and (self.correction_low is not None or self.correction_high is not None):
            raise ValueError("correction_low and correction_high bound a correction, and correction is none; name one")
        if self.correction != "none":
            _check_bounds(self.correction, *correction_bounds(self))
        if self.stop_kl and self.epochs * self.mini_batches == 1:
            raise ValueError(
                "stop_kl has no effect with a single update per step; raise epochs or mini_batches, or leave it out"
            )
        return self


def correction_bounds(train: TrainConfig) -> tuple[float, float]:
    """Low and high: what the recipe says, and where it says nothing what is usual."""
    low, high = CORRECTION_BOUNDS[train.correction]
    return (
        low if train.correction_low is None else train.correction_low,
        high if train.correction_high is None else train.correction_high,
    )


def _check_bounds(correction: str, low: float, high: float) -> None:
    if low > high:
        raise ValueError(f"correction_low={low:g} is above correction_high={high:g} (correction: {correction})")
    if not low <= 1 <= high:
        raise ValueError(
            f"correction_low={low:g} and correction_high={high:g} leave out the ratio 1 (correction: {correction}): tokens on which "
            "engine and trainer agree would be cut or left out too; use bounds around 1"
        )


def without_effect(train: TrainConfig, *, num_steps: int, has_teacher: bool) -> list[str]:
    """What a recipe asks for and does not get, a sentence each: said at the start of a run, since switching one option off (a KL's
    weight, say) should not need others to be taken out."""
    said = []
    about_kl = {"kl_in": "loss", "kl_kind": "k3", "reference": "start"}
    given = [f"{name}={getattr(train, name)}" for name, usual in about_kl.items() if getattr(train, name) != usual]
    if given and train.kl_coef == 0:
        said.append(f"train.{' and train.'.join(given)}: no effect, since train.kl_coef is 0 and there is no KL")
    if train.warmup_steps > num_steps:
        peak = train.lr * num_steps / train.warmup_steps
        said.append(
            f"train.warmup_steps={train.warmup_steps}: the run ends after run.num_steps={num_steps}, so the learning rate gets to "
            f"{peak:g} and never to train.lr={train.lr:g}"
        )
    unused = ("clip_low", "clip_high", "clip_dual") if train.algorithm == "distill" else ()
    given = [f"{name}={getattr(train, name):g}" for name in unused if getattr(train, name) is not None]
    if train.algorithm == "distill" and train.correction.endswith("_tis"):
        given.append(f"correction={train.correction}")
    if given:
        said.append(
            f"train.{' and train.'.join(given)}: no effect, since algorithm: distill has no advantages to weigh"
        )
    if (
        has_teacher
        and train.drop_zero_std
        and train.algorithm not in ("reinforce_pp", "reinforce_pp_baseline", "gae", "distill")
    ):
        said.append(
            "train.drop_zero_std: groups whose rewards are all equal are left out, and nothing is learned from the teacher on them; "
            "set it to false to learn from all"
        )
    return said
