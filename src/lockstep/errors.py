"""The errors that a run can end with. Input errors are `ValueError`s; what goes wrong in a run is a `LockstepError`.

Every message says what was expected, what came, and what to do.
"""

from __future__ import annotations


def said_by(error: BaseException) -> str:
    """`ValueError: message`, also where somebody's exception cannot say it: one rank's must not raise while others are told."""
    try:
        message = str(error)
    except Exception as another:
        message = f"(its message cannot be read: {type(another).__name__})"
    return f"{type(error).__name__}: {message}"


class LockstepError(RuntimeError):
    """Base of every error that a run (not its input) ends with."""


class ConfigError(LockstepError, ValueError):
    """A recipe or an override is wrong; the message names the key, what was expected and what came."""


class DataError(LockstepError, ValueError):
    """A data set cannot be read or does not hold what the recipe says (columns, rows, prompt lengths)."""


class ModelError(LockstepError, ValueError):
    """A model folder, a LoRA target or an adapter is not what the recipe says."""


class RewardError(LockstepError):
    """A reward function raised, hung, or returned something that is not one finite number per sample."""


class EpisodeError(LockstepError):
    """An environment raised, hung, or returned something that is no turn; the message shows the episode."""


class RanksDisagree(LockstepError):
    """Ranks came to the same point with different plans. The same message is raised on every rank."""


class RankMissing(LockstepError):
    """A rank did not come to a point where the others wait. Names the rank and the phase."""


class IncompleteExport(LockstepError):
    """An export would not carry exactly the tensors that its plan promises."""


class TransportError(LockstepError):
    """An update was refused by its receiver: unknown, missing, repeated, mis-shaped or damaged tensors."""


class StaleWeights(LockstepError):
    """The engine has no complete set of weights to generate with, or a sample's version is not the trainer's."""


class EngineMismatch(LockstepError):
    """The engine samples from another policy than the trainer updates."""


class CanaryFailed(EngineMismatch):
    """After a commit the engine does not serve what the trainer has; the message says what it seems to serve instead."""


class EngineDied(LockstepError):
    """The engine's process ended; the message has its exit status and its last words."""


class EngineUnhealthy(LockstepError):
    """The engine runs, but does not answer in time, or answers with errors."""


class EngineSilent(EngineUnhealthy):
    """The engine left a call unanswered for the whole of its limit: to ask it again would cost another one."""


class CheckpointError(LockstepError):
    """A checkpoint or run directory cannot be written, read or used."""
