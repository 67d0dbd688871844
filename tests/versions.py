"""Versions of torch, transformers and peft in; one line per combination, saying how the export suite ended, out.

Every pair of versions meets in one combination at least. Each torch gets an environment, in which peft and transformers
change between its combinations; it is removed after the last (`--keep`: it stays, and the next run goes on from it). A
combination that cannot be installed is a line too: what this index offers decides (a torch built for CUDA runs on a machine
without a GPU, but pulls about 3 GB).

    python tests/versions.py [--keep] [--torch 2.13.0] [--peft 0.19.1] [--transformers newest] [--tests tests/export]
"""

from __future__ import annotations

import argparse
import datetime
import itertools
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
OLDEST_TRANSFORMERS = "5.1.0"
"""5.0.0 has no `EmbeddingParallel`, which peft 0.19 imports whenever it loads an adapter (peft 0.20 on: only under tensor
parallelism)."""
TESTS = (
    "tests/export/test_matrix.py::test_pairs[2]",
    "tests/export/test_hub.py",
    "tests/export/test_merge.py",
)
"""Exports and what they know of the three, in about 2 minutes. Nothing here runs a forward pass under FSDP2, which torch 2.6
cannot do on a CPU."""
INSTALL_LIMIT_S = 3600
TESTS_LIMIT_S = 3600

# What follows from the three that vary, and so cannot be held at the tested version.
_UNPINNED = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "huggingface_hub",
    "numpy",
    "safetensors",
    "tokenizers",
    "sympy",
)


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
    Combination("2.13.0", OLDEST_TRANSFORMERS, "0.19.1"),
    Combination("2.13.0", NEWEST, NEWEST),
    Combination(NEWEST, NEWEST, "0.19.1"),
    Combination(NEWEST, OLDEST_TRANSFORMERS, NEWEST),
    Combination("2.9.0", NEWEST, "0.19.1"),
    Combination("2.9.0", OLDEST_TRANSFORMERS, NEWEST),
    Combination("2.6.0", OLDEST_TRANSFORMERS, "0.19.1"),
    Combination("2.6.0", NEWEST, NEWEST),
)


def main() -> None:
    args = parse_args()
    chosen = [Combination(args.torch, args.transformers, args.peft)] if args.torch else list(COMBINATIONS)
    print(f"{datetime.date.today()}, Python {platform.python_version()}, {' '.join(args.tests)}", flush=True)
    all_passed = True
    for torch_version, group in itertools.groupby(chosen, key=lambda combination: combination.torch):
        folder = environment(torch_version)
        for combination in group:
            start = time.monotonic()
            problem = install(combination, folder)
            passed, outcome = (False, f"not installed: {problem}") if problem else run_tests(folder, args.tests)
            all_passed &= passed
            seconds = time.monotonic() - start
            print(f"{combination} {'ok    ' if passed else 'FAILED'} {outcome}, {seconds:.0f} s", flush=True)
        if not args.keep:
            shutil.rmtree(folder)
    sys.exit(not all_passed)


def environment(torch_version: str) -> Path:
    folder = VENVS / f"torch-{torch_version}"
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


def install(combination: Combination, folder: Path) -> str:
    """Bring an environment to these versions. The installer's own last error, or nothing."""
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(kept_constraints((ROOT / "constraints.txt").read_text().splitlines())) + "\n")
    wanted = [_requirement(name, getattr(combination, name)) for name in ("torch", "transformers", "peft")]
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--upgrade"]
    command = [*pip, "--constraint", str(constraints), *wanted, "--editable", f"{ROOT}[dev]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return "" if done.returncode == 0 else (errors or done.stderr.splitlines() or ["no message"])[-1]


def run_tests(folder: Path, tests: list[str]) -> tuple[bool, str]:
    """Run pytest in the environment. Its output is left in a file next to it."""
    python = str(folder / "bin" / "python")
    versions = _versions(python)
    log = VENVS / f"{re.sub(r'[^A-Za-z0-9.]+', '-', versions)}.log"
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
    return done.returncode == 0, f"{summary} ({versions}; {log.relative_to(ROOT)})"


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
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    parser.add_argument("--keep", action="store_true", help="leave the environments behind, for the next run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
