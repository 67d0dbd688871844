"""Live parameter names in, checkpoint names out: the only place where a parameter name is rewritten, and by segment.

*live name* what `named_parameters()` of the wrapped module says, e.g.
`base_model.model.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.base_layer.weight`;
*clean name* the same without the segments that wrappers add; *checkpoint name* the name in a hub checkpoint,
`model.layers.0.mlp.up_proj.weight`.
"""

from __future__ import annotations

# Segments that FSDP1, activation checkpointing and torch.compile put between a module and what it wraps.
_WRAPPER_SEGMENTS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
_PEFT_PREFIX = ("base_model", "model")
_ADAPTER_SEGMENTS = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"})


def clean_name(live_name: str) -> str:
    """Drop wrapper segments, wherever they stand; a user's module called `module` stays."""
    return ".".join(part for part in live_name.split(".") if part not in _WRAPPER_SEGMENTS)


def is_adapter_name(live_name: str) -> bool:
    """Does the name belong to a LoRA tensor (and not to the base model)?"""
    return not _ADAPTER_SEGMENTS.isdisjoint(live_name.split("."))


def checkpoint_name(live_name: str) -> str:
    """Name in a hub checkpoint of a base model's parameter or buffer. Raises `ValueError` for a LoRA tensor's name."""
    if is_adapter_name(live_name):
        raise ValueError(f"{live_name!r} is an adapter tensor: it has no name in the base model's checkpoint")
    parts = clean_name(live_name).split(".")
    if tuple(parts[:2]) == _PEFT_PREFIX:
        parts = parts[2:]
    return ".".join(part for part in parts if part != "base_layer")
