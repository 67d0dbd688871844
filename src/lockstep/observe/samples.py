"""Scored samples of a step in; `samples/step-000012.jsonl`, for people to read, out. For rank 0."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.files import atomic_write_text, explain_os_errors
from lockstep.observe.metrics import finite_or_none
from lockstep.rundir import RunDir
from lockstep.types import Episode, ScoredSample

_PREFIX = "step-"


class SampleWriter:
    """One file per step, put down whole, with the step's first `limit` samples: whole groups, to see what was compared.

    Files beyond `resume_step` are removed: those steps are made again.
    """

    def __init__(self, run_dir: RunDir, *, limit: int, resume_step: int = 0):
        self._folder, self._limit = run_dir.samples, limit
        with explain_os_errors(self._folder):
            self._folder.mkdir(exist_ok=True)
            for path in self._folder.glob(f"{_PREFIX}*.jsonl"):
                number = path.stem.removeprefix(_PREFIX)
                if number.isdecimal() and int(number) > resume_step:
                    path.unlink()

    def write(self, step: int, scored: Sequence[ScoredSample]) -> None:
        """Raises `CheckpointError` when the disk refuses."""
        if self._limit and scored:
            lines = [json.dumps(sample_entry(item), ensure_ascii=False) + "\n" for item in scored[: self._limit]]
            # Half of a surrogate pair, in somebody's info, is no UTF-8; with a backslash it is JSON.
            text = "".join(lines).encode(errors="backslashreplace").decode()
            atomic_write_text(self._folder / f"{_PREFIX}{step:06d}.jsonl", text)


def sample_entry(item: ScoredSample) -> dict[str, Any]:
    """A JSON object of everything that is known of one sample. Log-probabilities of -inf become null.

    An episode also has its `turns`, one message after the other, to be read in place of `completion`; what the environment
    gave and noted for each; and `sampled`, which tells the policy's ids (1) from those that it was shown (0).
    """
    sample = item.sample
    return {
        "uid": sample.prompt.uid,
        "slot": sample.slot,
        "index": sample.index,
        "prompt": sample.prompt.text,
        "answer": sample.prompt.answer,
        "completion": sample.text,
        "finish": sample.finish,
        "reward": finite_or_none(item.reward),
        "rewards": {name: finite_or_none(value) for name, value in item.parts.items()},
        "policy_version": sample.policy_version,
        "ids": list(sample.ids),
        "logprobs": [finite_or_none(value) for value in sample.logprobs],
        **(_episode(sample.episode) if sample.episode is not None else {}),
        **({"sampled": [int(own) for own in sample.loss_mask]} if sample.loss_mask is not None else {}),
    }


def _episode(episode: Episode) -> dict[str, Any]:
    return {
        "turns": [_printable(message) for message in episode.messages],
        "ended": episode.ended,
        "turn_rewards": [finite_or_none(value) for value in episode.rewards],
        "info": [_printable(info) for info in episode.info],
    }


def _printable(info: Mapping[str, Any]) -> Any:
    """What JSON cannot hold is shown as Python shows it."""
    return {str(key): _printable_value(value) for key, value in info.items()}


def _printable_value(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, default=_shown, allow_nan=False))
    except (TypeError, ValueError, RecursionError):  # keys that are no text, NaN, what holds itself
        return _shown(value)


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:  # the step is done, and its log is no reason to end the run
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
