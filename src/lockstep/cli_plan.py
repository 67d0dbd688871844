"""The words after `lockstep plan` in, the plan on standard output and an exit code out. Needs no weights, ranks or devices."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from lockstep.errors import ConfigError
from lockstep.launch import import_late

_ABOUT = """\
Show what each rank of a recipe's run would hold: policy, critic, teacher, engine, and the largest
temporary; or, of a model's configuration, how it would be sharded and what its exports would cost.
No weights, no ranks, seconds; docs/plan.md says what is exact and what is not counted."""


def run_plan(words: Sequence[str]) -> int:
    """Print the plan. Raises `ConfigError` or `ModelError` for what was given wrongly."""
    args = _parser().parse_intermixed_args(words)
    report_module = import_late("lockstep.plan_report")
    request = report_module.PlanRequest(
        source=args.source,
        world_size=args.world_size,
        backend=args.backend,
        policy=_policy(args),
        lora=_lora(args),
        target_parameters=_list(args.target_parameters),
        strip=_list(args.strip) or None,
        dtype=args.dtype,
        adapter_dtype=args.adapter_dtype,
        dtype_rule=args.dtype_rule,
        bucket_bytes=args.bucket_mib and args.bucket_mib << 20,
        wire_dtype=args.wire_dtype,
        overrides=tuple(args.overrides),
    )
    report = report_module.make_report(request)
    print(
        json.dumps(report_module.as_json(report), indent=1)
        if args.json
        else import_late("lockstep.plan_text").as_text(report)
    )
    return 0


def _policy(args: argparse.Namespace) -> Any:
    """The policy's value, or None: the recipe's, or the model's own layers."""
    policies = import_late("lockstep.sharding.policy")
    kind, _, value = args.policy.partition(":")
    classes = _list(args.layer_classes)
    if classes and kind != "layers":
        raise ConfigError(f"--layer-classes goes with --policy layers; {args.policy!r} came")
    if kind == "layers" and not value:
        return policies.LayerClasses(classes) if classes else None
    if kind == "min-params" and value.isdecimal() and int(value):
        return policies.MinParams(int(value))
    if kind == "modules" and value:
        return policies.Modules(_list(value))
    raise ConfigError(f"--policy: expected layers, min-params:NUMBER or modules:GLOB,GLOB; {args.policy!r} came")


def _lora(args: argparse.Namespace) -> dict[str, Any] | None:
    given = {"rank": args.lora_rank, "alpha": args.lora_alpha, "targets": _targets(args.targets)}
    fields = {key: value for key, value in given.items() if value is not None}
    return fields or None


def _targets(text: str | None) -> str | tuple[str, ...] | None:
    """A list where there are commas outside a regular expression's braces and brackets; else the text as it is."""
    if text is None or "," not in text or any(mark in text for mark in "{[("):
        return text
    return _list(text)


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lockstep plan", description=_ABOUT, allow_abbrev=False)
    parser.add_argument(
        "source", metavar="RECIPE_OR_MODEL", help="a recipe (.yaml), a folder with config.json, or a file like that"
    )
    parser.add_argument(
        "overrides",
        metavar="key.sub=value",
        nargs="*",
        help="options on top of a recipe, e.g. train.offload_optimizer=true",
    )
    parser.add_argument("--world-size", metavar="N", type=_positive, default=1, help="ranks to shard over (1)")
    parser.add_argument("--backend", choices=("fsdp2", "fsdp1"), help="default: the recipe's, or fsdp2")
    parser.add_argument(
        "--policy",
        metavar="P",
        default="layers",
        help="layers (default), min-params:N, or modules:GLOB,... (* stays within a name's part, ** does not)",
    )
    parser.add_argument("--layer-classes", metavar="A,B", default="", help="classes that become units")
    parser.add_argument("--lora-rank", metavar="R", type=_positive, help="rank of the adapter (16)")
    parser.add_argument("--lora-alpha", metavar="A", type=float, help="alpha of the adapter (32)")
    parser.add_argument("--targets", metavar="T", help="as lora.targets: all-linear, a regular expression, or a,b")
    parser.add_argument("--target-parameters", metavar="A,B", default="", help="endings of fused experts' parameters")
    parser.add_argument("--strip", metavar="A,B", default="", help="modules to take out first, e.g. talker,code2wav")
    _add_dtypes(parser)
    parser.add_argument(
        "--bucket-mib", metavar="N", type=_positive, help="size of an export's bucket (default: the recipe's, or 64)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON; docs/plan.md describes it")
    return parser


def _add_dtypes(parser: argparse.ArgumentParser) -> None:
    names = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=names, help="of the base (default: the recipe's or configuration's)")
    parser.add_argument("--adapter-dtype", choices=names, help="of the adapter (float32)")
    parser.add_argument("--wire-dtype", choices=names, help="that floats are exported in (default: each tensor's own)")
    parser.add_argument(
        "--dtype-rule",
        choices=("align", "split", "refuse"),
        help="for mixed dtypes in a unit (default: what the backend needs)",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, {text!r} came")
    return int(text)
