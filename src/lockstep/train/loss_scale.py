"""Whether a step's gradients were finite in, the factor that the next loss is multiplied by out: training over a float16 base.

float16 ends at 65504 and has nothing below 6e-8: gradients of activations vanish there. So the loss is multiplied by a large power
of two before backward, and the gradients are divided by it after (arXiv 1710.03740). Where they overflow, the step is left out and
the factor halved; after many good steps it doubles.

The rules and numbers are those of `torch.amp.GradScaler`. It is not used itself, since who decides is different here: the global
gradient norm, which every rank has anyway and which is not finite if anything on any rank is not. torch's keeps a flag per rank;
its `ShardedGradScaler` adds these up in a collective of its own for every step, and wants a process group even for one rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import LockstepError


class LossScaler:
    """Alike on every rank, as long as every rank tells it the same. Host numbers only: reading it waits for no device."""

    growth, backoff = 2.0, 0.5

    def __init__(self, *, scale: float = 2.0**16, good_steps_to_grow: int = 2000):
        self.scale = scale
        self.good_steps = 0
        """Since the factor last changed."""
        self._to_grow = good_steps_to_grow

    def stepped(self) -> None:
        """Gradients were finite, and the optimizer stepped."""
        self.good_steps += 1
        if self.good_steps == self._to_grow:
            self.scale *= self.growth
            self.good_steps = 0

    def overflowed(self, *, step: int) -> None:
        """Gradients were not finite, and the optimizer did not step.

        Raises `LockstepError` once they are not finite although the factor enlarges nothing any more (from 2**16 on, that is the
        17th time in a row).
        """
        if self.scale <= 1.0:
            raise LockstepError(
                f"step {step}: the gradient overflows float16 although the loss is not enlarged any more (loss scale "
                f"{self.scale:g}); no optimizer step was taken. Use model.dtype bfloat16 or float32; or look for very large "
                "advantages and rewards"
            )
        self.scale *= self.backoff
        self.good_steps = 0

    def state(self) -> dict[str, float]:
        """For a checkpoint; JSON keeps it to the last bit."""
        return {"scale": self.scale, "good_steps": float(self.good_steps)}

    def load(self, state: Mapping[str, float]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
