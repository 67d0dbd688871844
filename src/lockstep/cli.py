"""Command-line words in, a run and an exit code out: `lockstep train`, `lockstep eval`, `lockstep --help`.

A recipe is read here, so that a wrong option is told once and in a moment; the ranks read it again. What this module
imports stays light: the loop, and torch with it, comes in through `launch.import_late` alone.
Exit codes: 0 done, or stopped and saved; 1 the run failed; 2 what was given is wrong; 130 stopped at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from lockstep import __version__
from lockstep.cli_plan import run_plan
from lockstep.config import Config, Option, describe_options, dump_config, load_config
from lockstep.errors import ModelError
from lockstep.failures import EXIT_FAILED, EXIT_INPUT, EXIT_INTERRUPTED, at_work, deliver, describe
from lockstep.launch import Here, StartHere, count_devices, decide, import_late
from lockstep.rundir import newest_adapter
from lockstep.signals import catch_stop_signals, release_signals, stop_requested
from lockstep.supervise import STOPPING, supervise, watch_parent

WIDTH = 80

SUMMARY = """\
lockstep: RL post-training for LoRA adapters on PyTorch FSDP.

  lockstep train RECIPE [key.sub=value ...] [--nproc N] [--resume]
                 [--print-config]
  lockstep eval  RECIPE [key.sub=value ...] [--nproc N]
                 [--adapter DIR | --base] [--template T ...] [--print-config]
  lockstep plan  RECIPE [key.sub=value ...] | MODEL_OR_CONFIG
                 [--world-size N] [--json] [options]
  lockstep train --help, lockstep eval --help, lockstep plan --help,
  lockstep --version

train and eval work the same under torchrun (one or many hosts) and srun.
"""


def main() -> NoReturn:
    """Entry point of the command `lockstep`. Ends the process, with every stream flushed."""
    try:
        code = run(sys.argv[1:])
    except SystemExit as end:  # argparse: --help, or an error in the words
        code = int(end.code or 0)
    logging.shutdown()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    sys.stderr.flush()
    if code or "RANK" in os.environ:
        # Without the interpreter's teardown: a hanging reward function's thread would keep a failed rank alive, and gloo's
        # threads now and then abort there.
        os._exit(code)
    sys.exit(code)


def _drop_output() -> None:
    """Who reads it (`| head`) has seen enough: what is still buffered goes nowhere, without another error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(words: Sequence[str]) -> int:
    """Do what the words say; the exit code. Only an error in the command line itself ends the process (argparse)."""
    watch_parent()
    rank = os.environ.get("RANK", "0")
    try:
        with at_work(os.environ):
            return _dispatch(words)
    except BrokenPipeError:
        _drop_output()
        return EXIT_FAILED
    except KeyboardInterrupt:
        more = "; --resume goes on from the last checkpoint" if words[:1] == ["train"] else ""
        print(f"lockstep: stopped at once{more}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        failure = describe(error, int(rank) if rank.isdecimal() else 0)
        deliver(failure, os.environ)
        return failure.exit_code


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(SUMMARY + "\n" + options_help(describe_options()))
        return 0 if words else EXIT_INPUT
    if words[0] == "--version":
        print(f"lockstep {__version__}")
        return 0
    if words[0] == "plan":
        return run_plan(words[1:])
    parsers = {"train": _train_parser(), "eval": _eval_parser()}
    if words[0] not in parsers:
        print(f"lockstep: unknown command {words[0]!r}; it is one of {', '.join(parsers)}, plan", file=sys.stderr)
        return EXIT_INPUT
    args = parsers[words[0]].parse_intermixed_args(words[1:])
    config = load_config(args.recipe, args.overrides)
    if args.print_config:
        print(dump_config(config), end="")
        return 0
    return _launch(words, args, config)


def _launch(words: Sequence[str], args: argparse.Namespace, config: Config) -> int:
    place = decide(os.environ, nproc=args.nproc, num_devices=lambda: count_devices(config.run.device))
    if isinstance(place, StartHere):
        # -P: the ranks find modules where this process does, and not also in the current folder before all others.
        return supervise([sys.executable, "-P", "-m", "lockstep", *words], place.nproc)
    os.environ.update(place.env)
    if place.warning:
        print(f"lockstep: {place.warning}", file=sys.stderr)
    return args.work(words, args, config, place)


def _train(words: Sequence[str], args: argparse.Namespace, config: Config, place: Here) -> int:
    catch_stop_signals(say=STOPPING if place.size == 1 else "")
    code = _loop().run_training(config, resume=args.resume)
    if code == 0 and place.rank == 0 and (stopped := stop_requested()):
        more = [] if args.resume else ["--resume"]
        print(f"stopped by {stopped}; go on with: lockstep {shlex.join([*words, *more])}", flush=True)
    return code


def _eval(words: Sequence[str], args: argparse.Namespace, config: Config, place: Here) -> int:
    release_signals()
    adapter = (
        None if args.base else Path(args.adapter) if args.adapter else newest_adapter(Path(config.run.dir).expanduser())
    )
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        raise ModelError(f"--adapter {adapter} holds no adapter_config.json; give a folder that PEFT saved")
    return _loop().run_eval(config, adapter=str(adapter) if adapter else None, templates=tuple(args.template))


def _loop() -> Any:
    """The loop's module. Reward functions beside the recipe (`module:function`) are found from the current folder."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return import_late("lockstep.loop")


def _train_parser() -> argparse.ArgumentParser:
    parser = _parser("train", "Train as the recipe says; the run directory holds everything that comes out.", _train)
    parser.add_argument("--resume", action="store_true", help="go on from the run directory's newest whole checkpoint")
    return parser


def _eval_parser() -> argparse.ArgumentParser:
    parser = _parser("eval", "Score the recipe's held-out data greedily.", _eval)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--adapter", metavar="DIR", help="PEFT folder; default: the run directory's newest checkpoint")
    which.add_argument("--base", action="store_true", help="score the model without an adapter")
    parser.add_argument(
        "--template",
        metavar="T",
        action="append",
        default=[],
        help="prompt template to score, {prompt} stands for the question; repeat for several (default: the recipe's)",
    )
    return parser


def _parser(command: str, about: str, work: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"lockstep {command}",
        description=about,
        epilog=options_help(describe_options()),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=WIDTH),
        allow_abbrev=False,
    )
    parser.set_defaults(work=work)
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file")
    parser.add_argument(
        "overrides",
        metavar="key.sub=value",
        nargs="*",
        help="options on top of the recipe, e.g. train.lr=1e-5 reward.0.weight=2",
    )
    parser.add_argument(
        "--nproc", metavar="N", type=_positive, help="ranks to start on this host (default: one per CUDA device, or 1)"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved recipe and end")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, {text!r} came")
    return int(text)


def options_help(options: Sequence[Option]) -> str:
    """Every option by section: type, default and meaning, in 80 columns."""
    lines = ["options of a recipe, and of key.sub=value (type; default):"]
    for section, members in groupby(options, key=lambda option: option.key.rpartition(".")[0]):
        lines += [
            "",
            f"{section.replace('[]', '[N]')}:" + (" (a list; N is 0, 1, ...)" if section.endswith("[]") else ""),
        ]
        for option in members:
            lines += _option_lines(option)
    return "\n".join(lines)


def _option_lines(option: Option) -> list[str]:
    name = option.key.replace("[]", ".N")
    default = "required" if option.default == "required" else f"default {option.default}"
    head = (
        textwrap.wrap(f"{option.type}; {default}", WIDTH - 4)
        if len(name) + len(option.type) + len(default) > 74
        else []
    )
    first = f"  {name}" if head else f"  {name}  ({option.type}; {default})"
    body = [*(f"({line}" if i == 0 else line for i, line in enumerate(head))]
    if body:
        body[-1] += ")"
    return [first, *(f"      {line}" for line in [*body, *textwrap.wrap(option.meaning, WIDTH - 6)])]
