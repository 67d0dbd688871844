"""A complete tiny job: a random Llama with a word-level tokenizer, sums, and a reward that a few steps can move."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers_data import tiny_tokenizer
from lockstep.testing import tiny_llama


def make_model_folder(folder: Path) -> str:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def even_numbers(*, completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Share of a completion's words that are even numbers: dense, so that every group has spread."""
    words = [text.split() for text in completions]
    return [sum(word.isdigit() and int(word) % 2 == 0 for word in each) / max(len(each), 1) for each in words]


TIMES = ("seconds.", "tokens_per_second.", "step_seconds", "canary/", "sync/")
"""How metrics begin in which equal runs may differ: clocks, and the canary's, which looks back at what a resumed run has not seen."""


def recipe(model: str, run_dir: Path | str, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """A recipe as nested mappings; keyword arguments update its sections."""
    sums = {"task": "sums", "task_args": {"low": 1, "high": 9}}
    tree: dict[str, Any] = {
        "run": {"dir": str(run_dir), "num_steps": 6, "seed": 3, "device": "cpu"},
        "dist": {"agree_timeout_s": 30},
        "model": {"path": model},
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.1},
        "data": {
            "train": {**sums, "num_rows": 30, "seed": 1},
            "eval": {**sums, "num_rows": 10, "seed": 2},
            "prompt": {"template": "{prompt} = ?"},
        },
        "reward": [{"name": "helpers_loop:even_numbers"}],
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6},
        "train": {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 2},
        "eval": {"max_new_tokens": 6},
        "checkpoint": {"every_steps": 2, "keep": 3},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return tree
