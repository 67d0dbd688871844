"""A run's models and a number of ranks in; bytes on the rank that holds most, between steps and in each phase of a step, out.

*phase*: a part of a step. Phases follow each other, so that only the largest counts on top of what is always there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config import Config
from lockstep.engines import DTYPES, make_sampling
from lockstep.export.cost import ExportCost
from lockstep.names import clean_name, is_adapter_name
from lockstep.plan_memory import Layout, ModelUse, model_use
from lockstep.plan_peaks import LogitsUse, measure_logits
from lockstep.plan_run import RunModels
from lockstep.sharding.plan import ShardingPlan, plan_sharding
from lockstep.sharding.sizes import gathered_bytes, held_numels, shard_bytes
from lockstep.train.logprobs import CHUNK_TOKENS, changes_logits
from lockstep.train.teacher import distillation_of


@dataclass(frozen=True, slots=True)
class Phase:
    """What a part of a step has on the device beyond what is always there."""

    name: str
    parts: tuple[tuple[str, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.parts)


@dataclass(frozen=True, slots=True)
class RunUse:
    """A run on the rank that holds most."""

    rank: int
    device: str
    """cpu, or cuda where the recipe leaves it open."""
    models: tuple[ModelUse, ...]
    logits: LogitsUse
    has_many_micro_batches: bool
    """Can a rank's part of an update be more than train.micro_batch_tokens? Gradients are then whole until the last one."""
    phases: tuple[Phase, ...]
    not_counted: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def resident(self) -> int:
        """On the device, between steps."""
        return sum(each.parameters + each.buffers + each.optimizer for each in self.models)

    @property
    def host(self) -> int:
        """In host memory, between steps."""
        return sum(each.optimizer_host for each in self.models)

    @property
    def largest_phase(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.nbytes)

    @property
    def peak(self) -> int:
        return self.resident + self.largest_phase.nbytes


def run_use(run: RunModels, plans: Sequence[ShardingPlan], num_ranks: int, *, exports: Sequence[ExportCost]) -> RunUse:
    """`plans`: of `run.sharded`, in order; `exports`: of the policy. Raises `ModelError` for what an optimizer does not take."""
    config = run.config
    layouts = [
        Layout(plan, num_ranks, each.sharding.backend, each.sharding.reshard_after_forward)
        for each, plan in zip(run.sharded, plans, strict=True)
    ]
    rank = fullest_rank(layouts)
    # On a CPU nothing is moved (`train.choices.decide`).
    offloads = config.train.offload_optimizer and config.run.device != "cpu"
    models = {
        each.role: model_use(each.role, each.path, layout, rank, train=each.train, offloads=offloads)
        for each, layout in zip(run.sharded, layouts, strict=True)
    }
    logits = _logits(config, run.sharded[0].model, num_ranks)
    many = _has_many_micro_batches(config, num_ranks)
    phases = _updates(models, logits.nbytes, many=many, held=_teachers_head(run, layouts))
    phases.append(_export(config, plans[0], exports))
    engine = [] if run.engine is None else [_engine_use(run, plans[0])]
    return RunUse(
        rank=rank,
        device="cpu" if config.run.device == "cpu" else "cuda",
        models=(*models.values(), *engine),
        logits=logits,
        has_many_micro_batches=many,
        phases=tuple(phases),
        not_counted=_not_counted(run),
        warnings=run.warnings,
    )


def fullest_rank(layouts: Sequence[Layout]) -> int:
    """The first: FSDP2 gives it the most rows of everything. FSDP1 deals units evenly, so there whoever trains most elements keeps
    most of an optimizer."""
    if all(layout.backend == "fsdp2" for layout in layouts):
        return 0
    ranks = range(layouts[0].num_ranks)
    return max(ranks, key=lambda rank: sum(_trained_numel(layout, rank) for layout in layouts))


def _trained_numel(layout: Layout, rank: int) -> int:
    total = 0
    for unit in layout.plan.units:
        numels = held_numels(unit, rank, layout.num_ranks, layout.backend)
        total += sum(n for each, n in zip(unit.parameters, numels, strict=True) if each.is_trainable)
    return total


def _updates(models: Mapping[str, ModelUse], logits: int, *, many: bool, held: int) -> list[Phase]:
    """`held`: what a teacher keeps whole until the policy has gone back."""
    policy = models["policy"]
    parts = [*_backward(policy, many=many), ("logits", logits)]
    phases = [Phase("update of the policy", tuple([*parts, ("the teacher's head", held)] if held else parts))]
    if "teacher" in models:
        kept = [("gradients", policy.whole_gradients)] if many else []
        phases.append(Phase("the teacher's answers", (("gathered", models["teacher"].gathered.nbytes), *kept)))
    if "critic" in models:
        phases.append(Phase("update of the critic", _backward(models["critic"], many=many)))
    for each in models.values():
        if each.role != "teacher":
            made = (("gradients", each.gradients), ("made by the step", each.step))
            phases.append(Phase(f"optimizer step of the {each.role}", made))
    return phases


def _backward(model: ModelUse, *, many: bool) -> tuple[tuple[str, int], ...]:
    """Gradients are whole in backward, a unit's at a time; with several micro-batches all of them are, until the last one."""
    gradients = model.whole_gradients if many else model.gradients + model.largest_gradient
    return ("gathered", model.gathered.nbytes), ("gradients", gradients)


def _export(config: Config, plan: ShardingPlan, exports: Sequence[ExportCost]) -> Phase:
    """The engine is sent the new weights; the embedded one keeps the old adapter until the new one is whole."""
    shared, mode = config.rollout.engine != "hf", config.sync.mode
    kinds = ("adapter", "merged") if mode == "auto" else (mode,)
    extra = [cost.extra_bytes for cost in exports if cost.kind in kinds and (cost.to == "all") != shared]
    staged = 0 if shared or mode == "merged" else _adapter_bytes(plan)
    return Phase("weights to the engine", (("export", max(extra, default=0)), ("the new adapter", staged)))


def _engine_use(run: RunModels, policy: ShardingPlan) -> ModelUse:
    """Whole on every rank, and with it the adapter, unless it is merged into it."""
    assert run.engine is not None
    plan = plan_sharding(run.engine)
    adapter = 0 if run.config.sync.mode == "merged" else _adapter_bytes(policy)
    return ModelUse(
        role="engine",
        path=run.config.model.path,
        backend="whole",
        parameters=shard_bytes(plan, 0, 1, "fsdp2") + adapter,
        buffers=sum(tensor.nbytes for tensor in plan.buffers),
    )


def _adapter_bytes(plan: ShardingPlan) -> int:
    return sum(each.nbytes for each in plan.parameters if each.is_trainable and is_adapter_name(each.name))


def _teachers_head(run: RunModels, layouts: Sequence[Layout]) -> int:
    """Bytes of the units that hold it, where the policy is compared over the whole vocabulary; 0 where it is not."""
    teacher = run.config.teacher
    if teacher is None or distillation_of(teacher).kind != "whole":
        return 0
    place = next(place for place, each in enumerate(run.sharded) if each.role == "teacher")
    model, layout = run.sharded[place].model, layouts[place]
    if changes_logits(model):
        return 0
    head = {id(param) for param in model.get_output_embeddings().parameters()}
    names = {clean_name(name) for name, param in model.named_parameters(remove_duplicate=False) if id(param) in head}
    holders = [
        unit
        for unit in layout.plan.units
        if any(not names.isdisjoint((each.name, *each.aliases)) for each in unit.parameters)
    ]
    return sum(gathered_bytes(unit, layout.num_ranks, layout.backend) for unit in holders)


def _logits(config: Config, policy: Any, num_ranks: int) -> LogitsUse:
    head = policy.get_output_embeddings()
    return measure_logits(
        num_tokens=min(config.train.micro_batch_tokens, _most_tokens(config, num_ranks, with_prompts=False)),
        chunk_tokens=CHUNK_TOKENS,
        vocabulary=getattr(head, "base_layer", head).weight.shape[0],
        dtype=DTYPES[config.model.dtype],
        sampling=make_sampling(config, ()),
        entropy_gradient=config.train.entropy_coef > 0,
        distillation=distillation_of(config.teacher) if config.teacher else None,
    )


def _has_many_micro_batches(config: Config, num_ranks: int) -> bool:
    """What environments say is of no known length."""
    most = _most_tokens(config, num_ranks, with_prompts=True)
    return config.environment is not None or most > config.train.micro_batch_tokens


def _most_tokens(config: Config, num_ranks: int, *, with_prompts: bool) -> int:
    """Of a rank's samples in a step."""
    rollout, environment = config.rollout, config.environment
    sampled = rollout.max_new_tokens * (environment.max_turns if environment else 1)
    prompt = config.data.prompt.max_tokens if with_prompts else 0
    return -(-rollout.prompts_per_step // num_ranks) * rollout.group_size * (prompt + sampled)


def _not_counted(run: RunModels) -> tuple[str, ...]:
    config, policy = run.config, run.sharded[0].model
    out = [
        f"activations of a micro-batch (train.micro_batch_tokens={config.train.micro_batch_tokens})",
        "workspaces of kernels and collectives, and freed memory that an allocator keeps",
        "what a start takes: adapters are made on the host on every rank, and an embedded engine's model is read there",
    ]
    if run.engine is None:
        out.append(f"the {config.rollout.engine} servers' own memory")
    else:
        out.append(f"the engine's key-value cache (at most rollout.batch_tokens={config.rollout.batch_tokens} tokens)")
    if changes_logits(policy):
        out.append("logits of a whole micro-batch, which this model changes behind its head")
    if config.critic is not None and config.critic.kind == "head":
        out.append("hidden states of a step's completion tokens, which the critic's head reads")
    return tuple(out)


def as_json(use: RunUse) -> dict[str, Any]:
    """Plain values under fixed keys (docs/plan.md), sizes in bytes."""
    return {
        "rank": use.rank,
        "device": use.device,
        "models": [_model_json(each) for each in use.models],
        "logits": {
            "rows": use.logits.rows,
            "vocabulary": use.logits.vocabulary,
            "chunk_bytes": use.logits.chunk_bytes,
            "num_chunks": use.logits.num_live,
            "nbytes": use.logits.nbytes,
        },
        "has_many_micro_batches": use.has_many_micro_batches,
        "phases": [{"name": each.name, "nbytes": each.nbytes, "parts": dict(each.parts)} for each in use.phases],
        "resident": {"device": use.resident, "host": use.host},
        "largest_phase": use.largest_phase.name,
        "peak": use.peak,
        "not_counted": list(use.not_counted),
        "warnings": list(use.warnings),
    }


def _model_json(use: ModelUse) -> dict[str, Any]:
    gathered = use.gathered
    return {
        "role": use.role,
        "path": use.path,
        "backend": use.backend,
        "parameters": use.parameters,
        "reference": use.reference,
        "buffers": use.buffers,
        "gradients": {"reduced": use.gradients, "whole": use.whole_gradients},
        "optimizer": {"device": use.optimizer, "host": use.optimizer_host, "step": use.step},
        "gathered": {
            "root": gathered.root,
            "unit": gathered.unit,
            "unit_bytes": gathered.unit_bytes,
            "next_bytes": gathered.next_bytes,
            "nbytes": gathered.nbytes,
        },
    }
