"""A warning that every rank arrives at alike in; shown once, by rank 0, out: 64 ranks would say it 64 times.

    log.warning("dropped %d prompts", num, extra=ON_EVERY_RANK)

For what follows from the recipe, the data or the model's shape. What a rank alone may have met is not marked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

ON_EVERY_RANK: Mapping[str, object] = {"on_every_rank": True}


def is_own(record: logging.LogRecord) -> bool:
    """For the handlers of all ranks but 0: is it this rank's own affair?"""
    return not getattr(record, "on_every_rank", False)
