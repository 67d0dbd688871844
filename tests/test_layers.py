"""A file imports only from lower layers (or its own part), heavy libraries have one home, and loop.py stays short."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "lockstep"

# The longest matching prefix decides. docs/architecture.md explains each.
LAYERS = {
    "errors": 0, "types": 0, "names": 0, "known_warnings": 0, "logs": 0,
    "config": 1, "sections": 1, "sections_base": 1, "sections_critic": 1, "sections_environment": 1, "sections_teacher": 1,
    "sections_train": 1,
    "yaml_text": 1, "host_memory": 1, "dist": 1, "sampling": 1, "files": 1, "signals": 1, "rendezvous": 1, "worlds": 1,
    "model": 2, "data": 2, "environments": 2, "transport": 2, "observe.metrics": 2, "observe.timing": 2, "observe.samples": 2, "rundir": 2,
    "sharding": 3, "rollout": 3,
    "train": 4, "export": 4,
    "verify": 5, "observe": 5, "checkpoint": 5, "checkpoint_parts": 5, "engines": 5, "serving": 5,
    "assemble": 5, "assemble_critic": 5, "assemble_teacher": 5, "shard_model": 5,
    "episodes": 5, "evaluate": 5, "rescue": 5,
    "plan_report": 5, "plan_text": 5, "plan_run": 5, "plan_memory": 5, "plan_phases": 5, "plan_peaks": 5, "plan_activations": 5,
    "plan_run_json": 5,
    "loop": 6,
    "failures": 7, "supervise": 7, "launch": 7, "cli": 7, "cli_plan": 7, "__main__": 7,
    "testing": 9, "testing_engines": 9, "testing_faults": 10,
}  # fmt: skip

# What a part may not import although its layer is lower or equal.
NEVER = {
    "train": ("rollout",), "sharding": ("rollout",), "export": ("rollout",), "checkpoint": ("rollout",), "model": ("rollout",),
    "rollout": ("sharding", "export", "model", "train"),
}  # fmt: skip

# Heavy library: the only modules that import it.
HOMES = {
    "peft": (
        "model.lora", "model.peft_tree", "export.merge", "export.merge_plan", "export.peft_state",
        "sharding.fsdp2", "rollout.hf_weights",
    ),
    "torch.distributed.fsdp": ("sharding.fsdp1", "sharding.fsdp2", "sharding.skeleton", "sharding.attach"),
    "torch.distributed.checkpoint": ("checkpoint", "checkpoint_parts"),
    "math_verify": ("data.reward_functions", "data.extras"),
    "reasoning_gym": ("data.tasks", "data.reward_functions", "data.extras"),
}  # fmt: skip

PATHS = [path for path in sorted(SRC.rglob("*.py")) if path != SRC / "__init__.py"]
MODULES = {".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path for path in PATHS}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def inner(path: Path) -> set[str]:
    """Modules of lockstep that a file imports, without the package's name."""
    names = {name.removeprefix("lockstep.") for name in imports(path) if name.startswith("lockstep.")}
    return {name for name in names if name in MODULES}


def layer(module: str) -> int:
    prefixes = [".".join(module.split(".")[:depth]) for depth in range(module.count(".") + 1, 0, -1)]
    return next(LAYERS[prefix] for prefix in prefixes if prefix in LAYERS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_from_lower_layers(module):
    part = module.split(".")[0]
    for other in inner(MODULES[module]):
        same_part = other.split(".")[0] == part
        assert (
            same_part
            or layer(other) < layer(module)
            or (layer(other) == layer(module) and layer(module) in (0, 1, 2, 5, 7))
        ), f"{module} (layer {layer(module)}) imports {other} (layer {layer(other)})"
        assert other.split(".")[0] not in NEVER.get(part, ()), f"{module} must not know {other}"


def test_no_import_cycles():
    edges = {module: inner(path) - {module} for module, path in MODULES.items()}
    done: set[str] = set()
    while len(done) < len(edges):
        ready = {module for module, needs in edges.items() if module not in done and needs <= done}
        assert ready, f"these import each other: {sorted(set(edges) - done)}"
        done |= ready


def test_heavy_libraries_have_one_home():
    for library, homes in HOMES.items():
        used = {
            module: {name for name in imports(path) if f"{name}.".startswith(f"{library}.")}
            for module, path in MODULES.items()
        }
        users = {module for module, names in used.items() if names}
        assert users <= set(homes), f"{library} is imported by {sorted(users - set(homes))}"


def test_loop_reads_in_one_sitting():
    assert len((SRC / "loop.py").read_text().splitlines()) < 200
