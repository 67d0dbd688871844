"""Adapter, merged and full exports of FSDP1 and FSDP2 equal PEFT's and transformers' own files to the bit; what cannot be is refused.

Here a subset that covers every pair (model, adapter, dtypes, backend, number of ranks); `make test-matrix` runs all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers_matrix import (
    BACKENDS,
    DTYPES,
    KINDS,
    MODELS,
    TIED,
    Cell,
    all_cells,
    check_cells,
    covering,
    write_reference,
)
from lockstep.model.dtype import FSDP2_MIXES_FROZEN
from lockstep.testing import run_ranks

CELLS = covering()
_PER_SPAWN = 60


@dataclass(frozen=True, slots=True)
class Refusal:
    """Cells that are refused alike."""

    words: str
    """Part of the error."""
    adapters: tuple[str, ...]
    backends: tuple[str, ...] = BACKENDS
    models: tuple[str, ...] = tuple(MODELS)
    dtypes: tuple[str, ...] = tuple(DTYPES)
    kinds: tuple[str, ...] = KINDS

    def includes(self, cell: Cell, kind: str) -> bool:
        pairs = (
            (cell.adapter, self.adapters),
            (cell.backend, self.backends),
            (cell.model, self.models),
            (cell.dtypes, self.dtypes),
            (kind, self.kinds),
        )
        return all(value in values for value, values in pairs)


FSDP1 = ("fsdp1", "fsdp1-flat")
# Before torch 2.9 FSDP2 takes one dtype in a unit too.
ONE_DTYPE = FSDP1 if FSDP2_MIXES_FROZEN else BACKENDS

REFUSALS = (
    Refusal("target_parameters", ("experts",), FSDP1),
    Refusal("reads its parts' weights without calling them", ("experts",), ONE_DTYPE, dtypes=("mixed",)),
    Refusal("parameters of one dtype in a unit", ("embed-and-head", "tokens"), ONE_DTYPE, dtypes=("mixed",)),
    Refusal("reads its parts' weights without calling them", ("tokens",), ("fsdp1-flat",)),
    Refusal("no module of its own to be a unit", ("embed-and-head",), ("fsdp1-flat",), TIED),
    Refusal("are tied in the base model", ("embed-and-head", "modules-to-save"), models=TIED, kinds=("merged",)),
    # PEFT ties the head's token adapter to the embedding's only where transformers' class says the two are one.
    Refusal("are tied in the base model", ("tokens",), models=("gemma3", "gemma4"), kinds=("merged",)),
)
"""The first that includes a cell says what its error must say; docs/matrix.md says why. Everything else must be equal."""


def is_refused(cell: Cell, kind: str) -> str:
    """Words of the refusal that is expected; empty: none is."""
    return next((refusal.words for refusal in REFUSALS if refusal.includes(cell, kind)), "")


def check(cells: list[Cell], num_ranks: int, folder: Path) -> None:
    for cell in cells:
        write_reference(cell, folder)
    for outcomes in run_ranks(num_ranks, check_cells, cells, str(folder), timeout_s=60 + 10 * len(cells)):
        wrong = []
        for cell, kind, outcome in outcomes:
            expected = is_refused(cell, kind)
            is_right = outcome == "equal" if not expected else outcome.startswith("refused") and expected in outcome
            if not is_right:
                wrong.append(f"{cell.backend} {cell.id} {kind}: {outcome}, expected {expected or 'equal'}")
        assert not wrong, "\n".join(wrong)
        assert len(outcomes) >= len(KINDS) * len(cells)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_pairs(num_ranks, tmp_path):
    """Every pair of values comes on 2 ranks, and a third of the cells also on 1 and on 4."""
    cells = CELLS if num_ranks == 2 else CELLS[num_ranks % 3 :: 3]
    check(cells, num_ranks, tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_everything(num_ranks, tmp_path):
    cells = list(all_cells())
    for start in range(0, len(cells), _PER_SPAWN):
        check(cells[start : start + _PER_SPAWN], num_ranks, tmp_path)
