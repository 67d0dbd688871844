"""Steps and phases in; a live display on a terminal, one plain line per step elsewhere, nothing on other ranks, out.

```
step  12/100  reward 0.412  loss 0.0312  1234 tokens/s  4.1 s/step  left 0:06:01
```
The live display has the phase that runs now as well.
Log records go the same way, with their rank, so that they stand above the live display and not in it.
"""

from __future__ import annotations

import logging
import math
import time
from types import TracebackType

from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.live import Live
from rich.logging import RichHandler
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from lockstep.logs import is_own


def make_console(rank: int) -> Console:
    """Where a rank prints. Ranks other than 0 print nothing."""
    return Console(quiet=rank != 0, highlight=False, soft_wrap=True)


def configure_logging(rank: int, console: Console, *, level: int = logging.INFO) -> None:
    """Log records of this process: rank 0 through its console, the others' warnings and errors to stderr, with the rank,
    but for what rank 0 says as well (`lockstep.logs`)."""
    if rank == 0 and console.is_terminal:
        handler: logging.Handler = RichHandler(
            console=console, show_path=False, markup=False, highlighter=NullHighlighter()
        )
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(levelname)s [rank {rank}] %(name)s: %(message)s"))
    handler.setLevel(level if rank == 0 else max(level, logging.WARNING))
    if rank != 0:
        handler.addFilter(is_own)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("lockstep").setLevel(level)


class Progress:
    """Shows a run's steps. Use it as a context: it puts the terminal back as it was, also after an error.

    `first_step` is the number of steps that a resumed run already has. `enabled_live` asks for the live display; a console
    that is no terminal gets lines anyway.
    """

    def __init__(self, num_steps: int, *, console: Console, enabled_live: bool = True, first_step: int = 0):
        self._num_steps, self._done, self._first = num_steps, first_step, first_step
        self._console = console
        self._phase, self._shown = "", ""
        self._began = time.monotonic()
        self._spinner = Spinner("line")
        is_live = enabled_live and console.is_terminal and not console.is_dumb_terminal and not console.quiet
        self._live = (
            Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=True)
            if is_live
            else None
        )

    def phase(self, name: str) -> None:
        """What runs now; "" for nothing. The live display shows it."""
        self._phase = name

    def step(self, step: int, *, reward: float, loss: float | None, tokens_per_second: float) -> None:
        """A step has been made; `loss` is None where it had no gradient. On no terminal this is the one line that it gets."""
        self._done = step
        seconds = (time.monotonic() - self._began) / max(1, step - self._first)
        numbers = [
            f"reward {reward:.3f}",
            "no gradient" if loss is None else f"loss {loss:.4f}",
            f"{tokens_per_second:.0f} tokens/s",
            f"{seconds:.1f} s/step",
        ]
        self._shown = "  ".join([*numbers, f"left {_clock(seconds * (self._num_steps - step))}"])
        if self._live is None:
            self.note(f"{self._counter()}  {self._shown}")

    def note(self, text: str) -> None:
        """A line of its own, above the live display."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def restart_clock(self) -> None:
        """Count seconds per step from now: what came before was not training."""
        self._began, self._first = time.monotonic(), self._done

    def _counter(self) -> str:
        width = len(str(self._num_steps))
        return f"step {self._done:{width}d}/{self._num_steps}"

    def _render(self) -> Table:
        """Two lines, so that everything fits in 80 columns."""
        display = Table.grid(padding=(0, 1))
        display.add_column(no_wrap=True)
        display.add_column(no_wrap=True, overflow="ellipsis")
        display.add_row(self._spinner, Text(f"{self._counter()}  {self._phase or 'starting'}"))
        display.add_row("", Text(self._shown))
        return display

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
