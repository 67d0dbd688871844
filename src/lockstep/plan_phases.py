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
from lockstep.plan_activations import Activations, cache_bytes, most_prompts, most_tokens, run_activations
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
    role: str
    """Of the model whose work it is."""
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
    activations: Mapping[str, Activations]
    """By role, of those that are computed in an update."""
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
    many = most_tokens(config, run.sharded[0].model, num_ranks) > config.train.micro_batch_tokens
    activations = run_activations(run, num_ranks)
    phases = _updates(models, _Backward(config, activations, many), logits.nbytes, held=_teachers_head(run, layouts))
    phases.append(_export(config, plans[0], exports))
    engine, cache = [], None
    if run.engine is not None:
        engine, cache = [_engine_use(run, plans[0])], cache_bytes(run, num_ranks)
        phases.append(Phase("samples", "engine", (("key-value cache", cache or 0),)))
    return RunUse(
        rank=rank,
        device="cpu" if config.run.device == "cpu" else "cuda",
        models=(*models.values(), *engine),
        activations=activations,
        logits=logits,
        has_many_micro_batches=many,
        phases=tuple(phases),
        not_counted=_not_counted(run, activations, has_cache=cache is not None),
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


@dataclass(frozen=True, slots=True)
class _Backward:
    """What the updates have in common."""

    config: Config
    activations: Mapping[str, Activations]
    has_many: bool

    def gradients(self, model: ModelUse) -> int:
        """Whole in backward, a unit's at a time; with several micro-batches all of them are, until the last one."""
        return model.whole_gradients if self.has_many else model.gradients + model.largest_gradient

    def saved(self, role: str) -> int:
        """Of activations, on the device."""
        moves = self.config.train.offload_activations and self.config.run.device != "cpu"
        return 0 if moves else self.activations[role].saved

    def most(self, role: str) -> int:
        return self.activations[role].peak - self.activations[role].saved + self.saved(role)


def _updates(models: Mapping[str, ModelUse], backward: _Backward, logits: int, *, held: int) -> list[Phase]:
    """`held`: what a teacher keeps whole until the policy has gone back."""
    policy = models["policy"]
    base = [("gathered", policy.gathered.nbytes), ("gradients", backward.gradients(policy))]
    base += [("the teacher's head", held)] if held else []
    phases = [
        Phase(
            "update of the policy, at its logits",
            "policy",
            (*base, _named(backward.saved("policy")), ("logits", logits)),
        ),
        Phase("update of the policy, in its layers", "policy", (*base, _named(backward.most("policy")))),
    ]
    if "teacher" in models:
        kept = [("gradients", policy.whole_gradients)] if backward.has_many else []
        parts = (("gathered", models["teacher"].gathered.nbytes), *kept, _named(backward.most("teacher")))
        phases.append(Phase("the teacher's answers", "teacher", parts))
    if "critic" in models:
        critic = models["critic"]
        made = [_named(backward.most("critic"))] if "critic" in backward.activations else []
        parts = (("gathered", critic.gathered.nbytes), ("gradients", backward.gradients(critic)), *made)
        phases.append(Phase("update of the critic", "critic", parts))
    for each in models.values():
        if each.role != "teacher":
            parts = (("gradients", each.gradients), ("made by the step", each.step))
            phases.append(Phase(f"optimizer step of the {each.role}", each.role, parts))
    return phases


def _named(nbytes: int) -> tuple[str, int]:
    return "activations", nbytes


def _export(config: Config, plan: ShardingPlan, exports: Sequence[ExportCost]) -> Phase:
    """The engine is sent the new weights; the embedded one keeps the old adapter until the new one is whole."""
    shared, mode = config.rollout.engine != "hf", config.sync.mode
    kinds = ("adapter", "merged") if mode == "auto" else (mode,)
    extra = [cost.extra_bytes for cost in exports if cost.kind in kinds and (cost.to == "all") != shared]
    staged = 0 if shared or mode == "merged" else _adapter_bytes(plan)
    return Phase("weights to the engine", "policy", (("export", max(extra, default=0)), ("the new adapter", staged)))


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
    head, rollout = policy.get_output_embeddings(), config.rollout
    turns = config.environment.max_turns if config.environment else 1
    sampled = most_prompts(config, num_ranks) * rollout.group_size * rollout.max_new_tokens * turns
    return measure_logits(
        num_tokens=min(config.train.micro_batch_tokens, sampled),
        chunk_tokens=CHUNK_TOKENS,
        vocabulary=getattr(head, "base_layer", head).weight.shape[0],
        dtype=DTYPES[config.model.dtype],
        sampling=make_sampling(config, ()),
        entropy_gradient=config.train.entropy_coef > 0,
        distillation=distillation_of(config.teacher) if config.teacher else None,
    )


def _not_counted(run: RunModels, activations: Mapping[str, Activations], *, has_cache: bool) -> tuple[str, ...]:
    config, policy = run.config, run.sharded[0].model
    out = [f"activations of the {role}: {each.refused}" for role, each in activations.items() if each.refused]
    out += [
        "workspaces of kernels and collectives, and freed memory that an allocator keeps",
        "what a start takes on the host of every rank: whole adapters"
        + ("" if run.engine is None else ", and the engine's whole model"),
    ]
    if run.engine is None:
        out.append(f"the {config.rollout.engine} servers' own memory")
    else:
        out.append("activations while the engine samples" + ("" if has_cache else ", and its key-value cache"))
    if config.train.offload_activations and config.run.device != "cpu":
        out.append("activations in host memory (train.offload_activations)")
    if changes_logits(policy):
        out.append("logits of a whole micro-batch, which this model changes behind its head")
    if config.critic is not None and config.critic.kind == "head":
        out.append("hidden states of a step's completion tokens, which the critic's head reads")
    return tuple(out)
