"""Adapter, merged and full exports of FSDP1 and FSDP2 equal PEFT's and transformers' own files to the bit; what cannot be is refused.

Here a subset that covers every pair (model, adapter, dtypes, backend, number of ranks); `make test-matrix` runs all of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_matrix import KINDS, TIED, Cell, all_cells, check_cells, covering, write_reference
from lockstep.testing import run_ranks

CELLS = covering()
_PER_SPAWN = 60


def is_refused(cell: Cell, kind: str) -> str:
    """Words of the refusal that is expected; empty: none is."""
    if cell.adapter in ("embed-and-head", "modules-to-save") and cell.model in TIED and kind == "merged":
        return "tied"
    return ""


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
