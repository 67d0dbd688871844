"""Versions of torch, transformers and peft in; one line per combination, saying how the export suite ended, out.

Every pair of versions meets in one combination at least. Each combination gets an environment of its own, which is removed
when it is done. A combination that cannot be installed is a line too: what this index offers decides (a torch built for
CUDA runs on a machine without a GPU, but pulls gigabytes).

    python tests/versions.py [--torch 2.13.0] [--peft 0.19.1] [--transformers newest] [--tests tests/export tests/sharding]
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venv-versions"
NEWEST = "newest"
INSTALL_LIMIT_S = 3600
TESTS_LIMIT_S = 3600

# What follows from the three that vary, and so cannot be held at the tested version.
_UNPINNED = ("torch", "transformers", "peft", "accelerate", "huggingface_hub", "numpy", "safetensors", "tokenizers")


@dataclass(frozen=True, slots=True)
class Combination:
    """Three versions; "newest" is whatever the index gives."""

    torch: str
    transformers: str
    peft: str

    def __str__(self) -> str:
        return f"torch {self.torch:8} transformers {self.transformers:8} peft {self.peft:8}"


# Two for each torch, so that it meets both of the others' two versions; and these two meet in every way.
COMBINATIONS = (
    Combination("2.13.0", "5.0.0", "0.19.1"),
    Combination("2.13.0", NEWEST, NEWEST),
    Combination(NEWEST, NEWEST, "0.19.1"),
    Combination(NEWEST, "5.0.0", NEWEST),
    Combination("2.9.0", NEWEST, "0.19.1"),
    Combination("2.9.0", "5.0.0", NEWEST),
    Combination("2.6.0", "5.0.0", "0.19.1"),
    Combination("2.6.0", NEWEST, NEWEST),
)


def main() -> None:
    args = parse_args()
    chosen = [Combination(args.torch, args.transformers, args.peft)] if args.torch else list(COMBINATIONS)
    print(f"{datetime.date.today()}, Python {platform.python_version()}, {' '.join(args.tests)}", flush=True)
    all_passed = True
    for combination in chosen:
        start = time.monotonic()
        passed, outcome = run(combination, args.tests, keep=args.keep)
        all_passed &= passed
        print(
            f"{combination} {'ok    ' if passed else 'FAILED'} {outcome}, {time.monotonic() - start:.0f} s", flush=True
        )
    sys.exit(not all_passed)


def run(combination: Combination, tests: list[str], *, keep: bool) -> tuple[bool, str]:
    """Install, test, remove. Whether the suite passed, and how it ended in words."""
    folder = VENVS / re.sub(r"\W+", "-", str(combination))
    try:
        problem = install(combination, folder)
        if problem:
            return False, f"not installed: {problem}"
        return run_tests(folder, tests)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def install(combination: Combination, folder: Path) -> str:
    """Make the environment. The installer's own last error, or nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(kept_constraints((ROOT / "constraints.txt").read_text().splitlines())) + "\n")
    wanted = [_requirement(name, getattr(combination, name)) for name in ("torch", "transformers", "peft")]
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
    done = subprocess.run(
        [*pip, *wanted, "--editable", f"{ROOT}[dev]"], capture_output=True, text=True, timeout=INSTALL_LIMIT_S
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return "" if done.returncode == 0 else (errors or done.stderr.splitlines() or ["no message"])[-1]


def run_tests(folder: Path, tests: list[str]) -> tuple[bool, str]:
    """Run pytest in the environment. Its output is left in a file next to it."""
    python = str(folder / "bin" / "python")
    log = folder.with_suffix(".log")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as file:
        done = subprocess.run(
            [python, "-m", "pytest", "-q", "-rfE", *tests],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=TESTS_LIMIT_S,
        )
    lines = log.read_text().splitlines()
    summary = lines[-1].strip("= ") if lines else "no output"
    return done.returncode == 0, f"{summary} ({_versions(python)}; {log.relative_to(ROOT)})"


def kept_constraints(lines: list[str]) -> list[str]:
    """The tested versions of everything that does not follow from the three."""
    names = {name.lower().replace("_", "-") for name in _UNPINNED}
    return [line for line in lines if line.partition("==")[0].strip().lower().replace("_", "-") not in names]


def _requirement(name: str, version: str) -> str:
    return name if version == NEWEST else f"{name}=={version}"


def _versions(python: str) -> str:
    """What was really installed, which "newest" does not say."""
    code = "import peft, torch, transformers; print(*(m.__name__ + ' ' + m.__version__ for m in (torch, transformers, peft)))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="one combination only, with this torch")
    parser.add_argument("--transformers", default=NEWEST, help="of the one combination")
    parser.add_argument("--peft", default=NEWEST, help="of the one combination")
    parser.add_argument("--tests", nargs="+", default=["tests/export", "tests/sharding"])
    parser.add_argument("--keep", action="store_true", help="leave the environments behind")
    return parser.parse_args()


if __name__ == "__main__":
    main()
