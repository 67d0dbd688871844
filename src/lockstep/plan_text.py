"""A `PlanReport` in, the lines that `lockstep plan` prints, 100 columns wide, out."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

from lockstep.export.cost import ExportCost
from lockstep.model.dtype import DtypeFinding
from lockstep.plan_memory import Gathered, ModelUse
from lockstep.plan_phases import Phase, RunUse
from lockstep.plan_report import BUCKET_BYTES, PlanReport, backend_of
from lockstep.sharding.plan import ShardUnit
from lockstep.sharding.sizes import unit_shard_bytes

WIDTH = 100
_INDENT = 16


def as_text(report: PlanReport) -> str:
    """Units of equal size and numbered names stand in one line; nothing else is left out."""
    head = [line for note in _head(report) for line in _wrap(note)]
    notes = [line for note in _notes(report) for line in _wrap(note)]
    run = ["", *_run(report.run)] if report.run else []
    return "\n".join([*head, "", *_units(report), "", *_exports(report), "", *notes, *run])


def size_text(nbytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1; three digits or more of it."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:,.2f} {unit}"


def _wrap(note: str) -> list[str]:
    """Long names are cut only where they must be."""
    return textwrap.wrap(note, WIDTH, subsequent_indent=" " * _INDENT, break_on_hyphens=False, replace_whitespace=False)


def _head(report: PlanReport) -> list[str]:
    request, plan = report.request, report.plan
    total = sum(tensor.numel for tensor in plan.parameters)
    trainable = sum(tensor.numel for tensor in plan.parameters if tensor.is_trainable)
    shards = [report.shard_bytes(rank) for rank in range(request.world_size)]
    spread = "" if min(shards) == max(shards) else f" at most, {size_text(min(shards))} at least"
    return [
        f"{report.model_class} from {request.source}, {request.backend}, {request.world_size} rank{'s' * (request.world_size > 1)}",
        f"parameters  {total:,}, {trainable:,} of them trainable; {size_text(sum(unit.nbytes for unit in plan.units))}",
        f"each rank   {size_text(max(shards))} of parameters{spread}"
        f", and every buffer: {size_text(sum(tensor.nbytes for tensor in plan.buffers))}",
    ]


def _units(report: PlanReport) -> list[str]:
    lines = [f"{'unit':45}{'tensors':>8}{'size':>14}{'on a rank':>14}  dtypes"]
    for group in _alike(report.plan.units):
        unit = group[0]
        share = unit_shard_bytes(unit, 0, report.request.world_size, backend_of(report.request))
        dtypes = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in unit.parameters}))
        name = _fit(_numbered([each.module for each in group]), 45)
        lines.append(f"{name:45}{len(unit.parameters):8}{size_text(unit.nbytes):>14}{size_text(share):>14}  {dtypes}")
    return lines


def _alike(units: Sequence[ShardUnit]) -> list[list[ShardUnit]]:
    def kind(unit: ShardUnit) -> tuple[object, ...]:
        tensors = [(re.sub(r"\d+", "#", t.name), t.shape, str(t.dtype), t.is_trainable) for t in unit.parameters]
        return re.sub(r"\d+", "#", unit.module), tensors

    return [list(group) for _, group in groupby(units, key=kind)]


def _numbered(names: Sequence[str]) -> str:
    """`layers.0 .. layers.79` as `layers.0-79 (each of 80)`."""
    first = names[0] or "(root)"
    if len(names) == 1:
        return first
    number = re.search(r"(\d+)(?=\D*$)", first)
    last = re.search(r"(\d+)(?=\D*$)", names[-1])
    if number is None or last is None:
        return f"{first} and {len(names) - 1} alike"
    return f"{first[: number.end()]}-{last.group(1)}{first[number.end() :]} (each of {len(names)})"


def _fit(text: str, width: int) -> str:
    """The end of a name tells more than its beginning."""
    return text if len(text) < width else ".." + text[len(text) - width + 3 :]


def _exports(report: PlanReport) -> list[str]:
    request = report.request
    dtype = request.wire_dtype or "each tensor's own dtype"
    lines = [
        f"exports, in buckets of {size_text(request.bucket_bytes or BUCKET_BYTES)}, {dtype}:",
        f"{'kind':9}{'to':8}{'size':>14}{'most received':>18}{'received by all':>18}{'exchanges':>13}{'extra memory':>16}",
    ]
    return lines + [_export_line(cost) for cost in report.exports]


def _export_line(cost: ExportCost) -> str:
    if cost.refused:
        return "\n".join(_wrap(f"{cost.kind:9}{cost.to:8}refused: {cost.refused}"))
    return (
        f"{cost.kind:9}{cost.to:8}{size_text(cost.nbytes):>14}{size_text(cost.received_max):>18}"
        f"{size_text(cost.received_total):>18}{cost.num_exchanges:>13}{size_text(cost.extra_bytes):>16}"
    )


def _run(use: RunUse) -> list[str]:
    """What the run holds, on top of what comes and goes; the largest of that counts."""
    where = "on the CPU" if use.device == "cpu" else "on its device"
    lines = [
        f"the run, {where}, on rank {use.rank} (none holds more):",
        f"{'model':9}{'parameters':>15}{'buffers':>13}{'optimizer':>15}{'in host memory':>17}{'gradients':>15}{'whole':>15}",
        *(_model_line(each) for each in use.models),
        "",
    ]
    frozen = sum(each.reference for each in use.models)
    notes = [
        f"always there    {size_text(use.resident)}, and {size_text(use.host)} in host memory",
        *([f"                of it {size_text(frozen)} the reference's adapter"] if frozen else []),
        "on top          the largest of these:",
        *(f"  {each.name}: {size_text(each.nbytes)}{_parts(each, use)}" for each in use.phases),
        f"at most         {size_text(use.peak)}",
        f"not counted     {'; '.join(use.not_counted)}",
        *(f"warning         {each}" for each in use.warnings),
    ]
    return [*lines, *(line for note in notes for line in _wrap(note))]


def _model_line(use: ModelUse) -> str:
    sizes = (use.parameters, use.buffers, use.optimizer, use.optimizer_host, use.gradients, use.whole_gradients)
    return f"{use.role:9}" + "".join(
        f"{size_text(nbytes):>{width}}" for nbytes, width in zip(sizes, (15, 13, 15, 17, 15, 15), strict=True)
    )


def _parts(phase: Phase, use: RunUse) -> str:
    """Of a phase that is more than one thing."""
    said = []
    for name, nbytes in phase.parts:
        more = ""
        if name == "logits":
            more = f" ({use.logits.num_live:g} x [{use.logits.rows}, {use.logits.vocabulary}] fp32)"
        if name == "activations":
            more = f" ({use.activations[phase.role].num_tokens} tokens)"
        if name == "gathered":
            more = f" ({_gathered(next(each for each in use.models if each.role == phase.role).gathered)})"
        said += [f"{size_text(nbytes)} {name}{more}"] if nbytes else []
    return f" = {' + '.join(said)}"


def _gathered(gathered: Gathered) -> str:
    if not gathered.unit:
        return "every unit"
    return f"the root, {gathered.unit}" + (", and the next unit" if gathered.next_bytes else "")


def _notes(report: PlanReport) -> list[str]:
    tensor, unit = report.largest_tensor, report.largest_unit
    shape = "x".join(map(str, tensor.shape))
    lines = [
        f"largest tensor  {tensor.name} [{shape}], {size_text(tensor.nbytes)}",
        f"largest unit    {unit.module or '(root)'}, {size_text(unit.nbytes)}",
        *(f"tied            {' = '.join(names)}" for names in report.plan.tied),
    ]
    if report.stripped.removed:
        lines.append(report.stripped.line())
    if report.missing:
        lines.append(f"not in the model: the layer classes {', '.join(report.missing)}")
    return [*lines, *_dtype_notes(report)]


def _dtype_notes(report: PlanReport) -> list[str]:
    lines = [f"mixed dtypes    {line}" for line in _findings(report.findings)]
    decisions = report.decisions
    if decisions.casts:
        cast = decisions.casts[0]
        lines.append(f"cast            {len(decisions.casts)} adapter tensors from {cast.before} to {cast.after}")
    if decisions.units:
        lines.append(f"own units       {len(decisions.units)} modules of another dtype, the first {decisions.units[0]}")
    if decisions.ignored:
        lines.append(f"whole on ranks  {len(decisions.ignored)} payloads, the first {decisions.ignored[0]}")
    if report.findings and not (decisions.casts or decisions.units or decisions.ignored):
        lines.append(f"                {report.request.backend} takes them as they are")
    return lines


def _findings(findings: Iterable[DtypeFinding]) -> list[str]:
    """One line per kind of finding; numbered units alike are counted."""
    kinds: dict[str, list[DtypeFinding]] = {}
    for finding in findings:
        odd = [(re.sub(r"\d+", "#", each.name), each.dtype) for each in finding.odd]
        kinds.setdefault(repr((re.sub(r"\d+", "#", finding.unit), odd)), []).append(finding)
    lines = []
    for alike in kinds.values():
        first = alike[0]
        dtypes = ", ".join(sorted({str(each.dtype).removeprefix("torch.") for each in first.odd}))
        lines.append(
            f"{_numbered([each.unit for each in alike])}: {str(first.majority).removeprefix('torch.')}, but "
            f"{len(first.odd)} tensors in {dtypes}, the first {first.odd[0].name.removeprefix(first.unit + '.')}"
        )
    return lines
