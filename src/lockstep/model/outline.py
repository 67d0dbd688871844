"""A configuration file in, the model that it describes on the meta device out: every shape and dtype, no weights, no memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTextToWaveform,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from lockstep.errors import ModelError

_COUNTS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
)


def read_model_config(path: Path) -> PreTrainedConfig:
    """The configuration in a folder's config.json, or in a file of that form. Raises `ModelError`."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(
            f"{file} does not exist; expected a folder with config.json, a file like it, or a recipe (.yaml)"
        )
    return read_config(file, file)


def read_config(source: Path, file: Path) -> PreTrainedConfig:
    """transformers' configuration from `source`, the folder or file that is given to it; `file` is named in errors.

    Raises `ModelError` for what transformers refuses, and for a negative number of layers, heads, rows or columns, which it
    takes for none.
    """
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        raise ModelError(f"{file} is not a configuration that transformers knows: {error}") from error
    for part in (config, config.get_text_config()):
        for name in _COUNTS:
            count = getattr(part, name, None)
            if isinstance(count, int) and count < 0:
                raise ModelError(f"{file}: {name} is {count}; expected a number that is not negative")
    return config


def build_outline(config: PreTrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model, all stages of it, parameters and buffers on meta, ties made.

    The class is the causal language model of the configuration, or else the one that the configuration names, or else the bare
    model. Raises `ModelError` where transformers cannot build it.
    """
    try:
        with torch.device("meta"), no_init_weights():
            model = _build(config, dtype)
    except (ValueError, AttributeError, ImportError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        where = getattr(config, "name_or_path", "") or "a configuration"
        raise ModelError(
            f"{where} ({type(config).__name__}): cannot build the model: {type(error).__name__}: {error}"
        ) from error
    model.tie_weights()
    return model.eval()


def _build(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if named is not None:
            return cast(Any, named)._from_config(config, dtype=dtype)
    # A configuration that names no class: those that speak, or see, before the bare model.
    kinds = (AutoModelForTextToWaveform, AutoModelForImageTextToText)
    kind = next((kind for kind in kinds if type(config) in kind._model_mapping), AutoModel)
    return kind.from_config(config, dtype=dtype)
