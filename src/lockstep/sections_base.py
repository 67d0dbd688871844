"""What sections of a recipe are made of: checked numbers, the class of all sections, and the one that several of them hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _number(value: Any) -> Any:
    """Refuse what pydantic would turn into a number silently: true is not 1, and "5" is text."""
    if isinstance(value, bool | str):
        raise ValueError(f"expected a number; {value!r} came")
    return value


Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
PositiveInt = Annotated[Int, Field(ge=1)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
Fraction = Annotated[Float, Field(gt=0, le=1)]
BelowOne = Annotated[Float, Field(ge=0, lt=1)]


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


class Section(BaseModel):
    """One part of the recipe. One that is named but left empty (`train:` and nothing below it) has its defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        sections = {name for name, info in cls.model_fields.items() if is_section(info.annotation)}
        return {name: {} if value is None and name in sections else value for name, value in data.items()}


class LoraSection(Section):
    rank: PositiveInt = Field(default=16, description="rank r of the adapter")
    alpha: PositiveFloat = Field(
        default=32.0, description="scale numerator: the update is alpha/r * B @ A (alpha/sqrt(r) with use_rslora)"
    )
    dropout: BelowOne = Field(default=0.0, description="dropout on the adapter's input while training")
    targets: str | tuple[str, ...] = Field(
        default="all-linear",
        description="all-linear (without the head), a regular expression, or a list of module name endings",
    )
    use_rslora: bool = Field(default=False, description="scale by alpha/sqrt(r)")
    init_from: str = Field(
        default="",
        description="PEFT folder to start from; empty starts a new adapter (random A, zero B)",
    )
