"""What an update of the rollout engine costs in a real run: engine x transport x adapter or merged weights.

Each row trains SmolLM2 on sums for a few steps through `lockstep train` and reads the run's own metrics: seconds of a push (export,
transport, commit with its digests), of the canary, their share of a step, and the bytes. Medians over the steps but the first.

    python benchmarks/bench_sync.py                                  # the embedded engine and a real vLLM (make vllm-env)
    python benchmarks/bench_sync.py --engines hf --steps 4
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "smollm2-sums-vllm.yaml"
TRANSPORTS = {"hf": ("auto",), "vllm": ("shm", "disk")}
LIMIT_S = 1800


@dataclass(frozen=True, slots=True)
class Row:
    engine: str
    transport: str
    mode: str
    nbytes: float
    push: float
    """Seconds, median."""
    fastest: float
    canary: float
    """Seconds: what the engine generates and what the trainer scores."""
    step: float


def measure(engine: str, transport: str, mode: str, *, steps: int, python: str, ranks: int) -> Row:
    """One short run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "lockstep", "train", str(RECIPE), "--nproc", str(ranks)),
            *(f"run.dir={folder}/run", f"run.num_steps={steps}", "eval.before=false", "eval.after=false"),
            *(
                f"rollout.engine={engine}",
                f"sync.transport={transport}",
                f"sync.mode={mode}",
                "observe.tensorboard=false",
            ),
            *([f"engine.python={python}"] if engine == "vllm" else []),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    pushes = [line["sync/push_seconds"] for line in lines]
    return Row(
        engine,
        "inproc" if engine == "hf" else transport,
        mode,
        lines[-1]["sync_bytes"],
        statistics.median(pushes),
        min(pushes),
        statistics.median(line["canary/seconds"] + line["canary/generate_seconds"] for line in lines),
        statistics.median(line["step_seconds"] for line in lines),
    )


def show(rows: list[Row]) -> None:
    table = Table(title="update of the rollout engine, SmolLM2-135M in fp32, LoRA of rank 16", title_justify="left")
    for name in ("engine", "transport", "update", "MB", "push s", "fastest", "of a step", "canary s", "of a step"):
        table.add_column(name, justify="right" if name not in ("engine", "transport", "update") else "left")
    for row in rows:
        table.add_row(
            row.engine,
            row.transport,
            row.mode,
            f"{row.nbytes / 1e6:.1f}",
            f"{row.push:.3f}",
            f"{row.fastest:.3f}",
            f"{row.push / row.step:.1%}",
            f"{row.canary:.2f}",
            f"{row.canary / row.step:.1%}",
        )
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="hf,vllm", help="comma-separated: hf, vllm")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--python", default=str(ROOT / ".venv-vllm" / "bin" / "python"), help="that vLLM is installed for"
    )
    arguments = parser.parse_args()
    rows = []
    for engine in arguments.engines.split(","):
        for transport in TRANSPORTS[engine]:
            for mode in ("adapter", "merged"):
                how = {"steps": arguments.steps, "python": arguments.python, "ranks": arguments.ranks}
                rows.append(measure(engine, transport, mode, **how))
                print(f"{engine} {transport} {mode}: {rows[-1].push:.3f} s", flush=True)
    show(rows)


if __name__ == "__main__":
    main()
