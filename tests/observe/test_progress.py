"""The display on a terminal, off it, and on other ranks; what it leaves behind after an error."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from rich.console import Console

from lockstep.logs import ON_EVERY_RANK
from lockstep.observe import progress as progress_module
from lockstep.observe.progress import Progress, configure_logging, make_console

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("lockstep")
    handlers, level, own_level = list(root.handlers), root.level, own.level
    yield
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    own.setLevel(own_level)


def make_terminal(*, is_terminal: bool, width: int = 80, quiet: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=width, quiet=quiet, highlight=False, _environ={})
    return console, out


def test_off_a_terminal_each_step_is_one_plain_line(clock: Clock):
    console, out = make_terminal(is_terminal=False, width=40)
    with Progress(100, console=console) as progress:
        progress.phase("generate")
        clock.now += 4.0
        progress.step(1, reward=0.41249, loss=0.03124, tokens_per_second=1234.4)
        progress.note("saved [bold]step 1[/bold]")
        clock.now += 6.0
        progress.step(2, reward=float("nan"), loss=-1.0, tokens_per_second=0.0)
    assert out.getvalue().splitlines() == [
        "step   1/100  reward 0.412  loss 0.0312  1234 tokens/s  4.0 s/step  left 0:06:36",
        "saved [bold]step 1[/bold]",
        "step   2/100  reward nan  loss -1.0000  0 tokens/s  5.0 s/step  left 0:08:10",
    ]


def test_long_times_are_hours_not_days(clock: Clock):
    console, out = make_terminal(is_terminal=False)
    with Progress(1000, console=console) as progress:
        clock.now += 90.0
        progress.step(1, reward=-0.412, loss=-0.0312, tokens_per_second=12345)
    assert out.getvalue() == (
        "step    1/1000  reward -0.412  loss -0.0312  12345 tokens/s  90.0 s/step  left 24:58:30\n"
    )


def test_a_resumed_run_counts_its_own_steps_for_the_time_left(clock: Clock):
    console, out = make_terminal(is_terminal=False)
    with Progress(20, console=console, first_step=10) as progress:
        clock.now += 100.0
        progress.restart_clock()
        clock.now += 3.0
        progress.step(11, reward=0, loss=0, tokens_per_second=0)
    assert "step 11/20" in out.getvalue()
    assert "3.0 s/step  left 0:00:27" in out.getvalue()


def test_the_live_line_shows_step_and_phase_and_is_wiped_at_the_end(clock: Clock):
    console, out = make_terminal(is_terminal=True)
    with Progress(9, console=console) as progress:
        clock.now += 2.0
        progress.step(3, reward=0.5, loss=0.25, tokens_per_second=10)
        progress.phase("generate")
        assert progress._live is not None
        progress._live.refresh()
        progress.note("a note above it")
    text = out.getvalue()
    assert "step 3/9  generate" in text
    assert "reward 0.500  loss 0.2500  10 tokens/s  0.7 s/step  left 0:00:04" in text
    assert "a note above it" in text
    assert text.index(HIDE) < text.rindex(SHOW)
    assert text.rstrip("\n").endswith("\x1b[2K"), "the live line is still there"


def test_the_terminal_is_put_back_after_an_error():
    console, out = make_terminal(is_terminal=True)
    with pytest.raises(KeyboardInterrupt), Progress(9, console=console):
        assert out.getvalue().count(SHOW) == 0
        raise KeyboardInterrupt
    assert out.getvalue().count(HIDE) == out.getvalue().count(SHOW) == 1


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"TERM": "unknown"}])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(environ: dict[str, str]):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, _environ=environ)
    with Progress(9, console=console) as progress:
        progress.step(1, reward=0, loss=0, tokens_per_second=0)
    assert out.getvalue().count("step 1/9") == 1
    assert HIDE not in out.getvalue()


def test_live_can_be_declined():
    console, out = make_terminal(is_terminal=True)
    with Progress(9, console=console, enabled_live=False):
        pass
    assert out.getvalue() == ""


def test_other_ranks_are_quiet(capsys: pytest.CaptureFixture[str]):
    with Progress(9, console=make_console(1)) as progress:
        progress.step(1, reward=0, loss=0, tokens_per_second=0)
        progress.note("x")
    assert capsys.readouterr() == ("", "")
    with Progress(9, console=make_console(0)) as progress:
        progress.step(1, reward=0, loss=0, tokens_per_second=0)
    assert capsys.readouterr().out.startswith("step 1/9  reward")


@pytest.mark.usefixtures("logging_as_it_was")
def test_log_records_carry_their_rank_off_a_terminal(capsys: pytest.CaptureFixture[str]):
    log = logging.getLogger("lockstep.part")
    for rank in (0, 3):
        configure_logging(rank, make_console(rank))
        log.info("for rank 0 only")
        log.warning("from everyone")
        logging.getLogger("another.library").info("never")
    assert capsys.readouterr() == (
        "",
        "INFO [rank 0] lockstep.part: for rank 0 only\n"
        "WARNING [rank 0] lockstep.part: from everyone\n"
        "WARNING [rank 3] lockstep.part: from everyone\n",
    )


@pytest.mark.usefixtures("logging_as_it_was")
def test_what_every_rank_says_is_shown_once(capsys: pytest.CaptureFixture[str]):
    log = logging.getLogger("lockstep.part")
    for rank in range(3):
        configure_logging(rank, make_console(rank))
        log.warning("dropped 3 prompts", extra=ON_EVERY_RANK)
    assert capsys.readouterr().err == "WARNING [rank 0] lockstep.part: dropped 3 prompts\n"


@pytest.mark.usefixtures("logging_as_it_was")
def test_log_records_stand_above_the_live_line():
    console, out = make_terminal(is_terminal=True, width=100)
    configure_logging(0, console)
    with Progress(9, console=console):
        logging.getLogger("lockstep.part").warning("a [warning]")
    lines = [line for line in out.getvalue().splitlines() if "a [warning]" in line]
    assert len(lines) == 1
    assert "step" not in lines[0].rpartition("\x1b[2K")[2]
