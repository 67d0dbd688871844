"""The options of a teacher: a frozen model that the policy is drawn to. Checked here alone, and with the rest in sections.py."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from lockstep.sections_base import NonNegativeInt, PositiveFloat, Section


class TeacherConfig(Section):
    """On-policy distillation: the KL to this model, on the policy's own samples, in the loss; null: no teacher."""

    path: str = Field(
        description="folder of a transformers checkpoint with the policy's tokenizer, or package:NAME; may be model.path itself, "
        "with an adapter"
    )
    adapter: str = Field(default="", description="PEFT folder put on it; empty: none")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="of its weights; none: model.dtype"
    )
    coef: PositiveFloat = Field(default=1.0, description="weight of its KL in the loss")
    divergence: Literal["reverse_kl", "sampled"] = Field(
        default="reverse_kl",
        description="reverse_kl: KL(policy || teacher) over the vocabulary, or over top_k and the rest; sampled: estimated from the "
        "sampled token alone (k1), cheaper and noisier",
    )
    top_k: NonNegativeInt = Field(
        default=0,
        description="compare the teacher's k likeliest tokens one by one, and all others as one outcome; 0: the whole vocabulary",
    )

    @field_validator("path")
    @classmethod
    def _not_empty(cls, path: str) -> str:
        if not path:
            raise ValueError("it is empty; give the teacher's checkpoint, or leave the section out for no teacher")
        return path

    @model_validator(mode="after")
    def _check_together(self) -> TeacherConfig:
        if self.top_k and self.divergence == "sampled":
            raise ValueError(
                f"top_k={self.top_k} belongs to divergence: reverse_kl; sampled looks at the sampled token alone: leave top_k out"
            )
        return self
