"""The options of a critic: what predicts the reward to come, and how it is trained. What ties it to other sections is in sections.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lockstep.sections_base import (
    Float,
    Fraction,
    LoraSection,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

ZeroToOne = Annotated[Float, Field(ge=0, le=1)]


class CriticConfig(Section):
    """The value model of PPO (train.algorithm: gae); null where the algorithm has none."""

    kind: Literal["model", "head"] = Field(
        default="model",
        description="model: a value model of its own (frozen base, LoRA and a head); head: a linear head on the policy's own last "
        "hidden states, which get no gradient from it",
    )
    path: str = Field(
        default="",
        description="kind model: checkpoint it starts from, with a one-label head (a reward model) or without; empty: model.path",
    )
    lora: LoraSection = Field(default=LoraSection(), description="kind model: its adapter")
    lr: PositiveFloat | None = Field(default=None, description="AdamW learning rate; none: 10 times train.lr")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="AdamW decoupled weight decay")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="learning rate, down to 0 at run.num_steps"
    )
    warmup_steps: NonNegativeInt = Field(
        default=0, description="first train steps, in which only the critic is trained; the policy stays as it is"
    )
    epochs: PositiveInt | None = Field(
        default=None, description="times that a step's samples are trained on; none: train.epochs"
    )
    mini_batches: PositiveInt | None = Field(
        default=None, description="optimizer steps per epoch; none: train.mini_batches"
    )
    max_grad_norm: PositiveFloat = Field(default=1.0, description="clip the global gradient norm to this")
    value_clip: NonNegativeFloat = Field(
        default=0.5, description="the loss lets a value move this far from what it was before the step; 0: any distance"
    )
    gamma: Fraction = Field(default=1.0, description="discount per token")
    lam: ZeroToOne = Field(
        default=1.0,
        description="GAE's lambda: 1 takes the reward that came (no bias), 0 the critic's word for it (least variance)",
    )

    @model_validator(mode="after")
    def _check_together(self) -> CriticConfig:
        if self.kind == "head" and self.path:
            raise ValueError(
                f"path={self.path!r} belongs to kind: model; a head reads the policy's own hidden states: leave path out"
            )
        if self.kind == "head" and self.lora != LoraSection():
            raise ValueError("lora belongs to kind: model; a head has no adapter of its own: leave lora out")
        if self.lora.init_from:
            raise ValueError(
                f"lora.init_from={self.lora.init_from!r}: a critic's adapter starts anew; merge an earlier one into a checkpoint "
                "and give that as path"
            )
        return self


def check_critic(
    critic: CriticConfig | None, *, algorithm: str, dtype: str, num_steps: int, prompts_per_step: int
) -> None:
    """What a critic and other sections mean for each other. Raises `ValueError`."""
    if critic is None:
        if algorithm == "gae":
            raise ValueError(
                "train.algorithm: gae needs a critic; give the section critic, as in `critic: {kind: model}`"
            )
        return
    if algorithm != "gae":
        raise ValueError(
            f"a critic is given, and train.algorithm: {algorithm} has no use for one; use gae, or leave the section critic out"
        )
    if critic.kind == "model" and dtype == "float16":
        raise ValueError(
            "critic.kind: model over float16 would need a loss scale of its own, which it has not; use model.dtype bfloat16 or "
            "float32, or critic.kind: head, which is trained in float32 alone"
        )
    if critic.warmup_steps >= num_steps:
        raise ValueError(
            f"critic.warmup_steps={critic.warmup_steps} leaves none of run.num_steps={num_steps} for the policy; use fewer"
        )
    if critic.mini_batches is not None and critic.mini_batches > prompts_per_step:
        raise ValueError(
            f"critic.mini_batches={critic.mini_batches} cannot share rollout.prompts_per_step={prompts_per_step} prompts: a "
            "prompt's samples stay together; use at most as many"
        )
