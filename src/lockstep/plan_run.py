"""A config and a number of ranks in; every model that such a run would hold, on meta, and what it would stop at, out.

The builders are the run's own (`assemble`, `assemble_critic`, `assemble_teacher`, `shard_model`), and so are their errors. Two things
are only warned of, since one plans before one has everything: weights (and tokenizers) that are not here yet, whose models have a
configuration all the same; and a teacher's adapter that is still to be trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from lockstep.assemble import build_policy, check_size
from lockstep.assemble_critic import check_reads, empty_critic, value_head_for
from lockstep.assemble_teacher import check_teacher, empty_teacher
from lockstep.config import Config, TeacherConfig, TrainConfig
from lockstep.engines import DTYPES, engine_dtype
from lockstep.errors import ModelError
from lockstep.model.dtype import DtypeFinding, DtypePlan, apply_dtypes, find_mixed_dtypes, keep_in_fp32, plan_dtypes
from lockstep.model.load import ModelFiles, build_empty, find_model, load_tokenizer
from lockstep.shard_model import Sharding, frozen_sharding, head_sharding, trained_sharding
from lockstep.sharding.plan import ShardingPlan, plan_sharding, split_units
from lockstep.train.critic import critic_train


@dataclass(frozen=True, slots=True, eq=False)
class RunModel:
    """One model of a run."""

    role: str
    """policy, critic or teacher."""
    path: str
    model: Any
    """On meta, its adapter too."""
    sharding: Sharding
    train: TrainConfig | None
    """What its optimizer is made with; None: it is frozen."""


@dataclass(frozen=True, slots=True, eq=False)
class RunModels:
    """All that a recipe's run holds on each rank."""

    config: Config
    sharded: tuple[RunModel, ...]
    """The policy first."""
    engine: nn.Module | None
    """The embedded engine's own model, whole on every rank; None where servers generate."""
    warnings: tuple[str, ...]
    """Where a run would stop."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A model's plan, with what its dtypes ask for."""

    plan: ShardingPlan
    findings: tuple[DtypeFinding, ...]
    decisions: DtypePlan


def plan_model(model: nn.Module, how: Sharding) -> Planned:
    """As `shard` decides it. Casts adapters of the model, on meta, where it must. Raises `ModelError`."""
    plan = plan_sharding(model, how.policy)
    findings = find_mixed_dtypes(plan)
    decisions = plan_dtypes(plan, backend=how.backend, rule=how.mixed_dtypes, keep=keep_in_fp32(model))
    if decisions.casts:
        apply_dtypes(model, decisions)
        plan = plan_sharding(model, how.policy)
    return Planned(split_units(plan, decisions.units), findings, decisions)


def build_run(config: Config, num_ranks: int) -> RunModels:
    """Reads configurations, tokenizers and adapters. Raises `ConfigError` or `ModelError` as the run does."""
    check_size(config, num_ranks)
    if config.model.attention not in ("sdpa", "eager"):
        # The kernel need not be installed where one plans, and changes nothing of what is held; activations are those of sdpa.
        config = config.model_copy(update={"model": config.model.model_copy(update={"attention": "sdpa"})})
    search = _Search()
    files = search.find(config.model.path, "model.path")
    tokenizer = search.tokenizer(files)
    policy = build_policy(config, files, device="meta")
    trained = trained_sharding(config, num_ranks)
    models = [
        RunModel("policy", config.model.path, policy, trained, config.train),
        *_critic(config, policy, num_ranks, files=files, tokenizer=tokenizer, search=search),
        *_teacher(config, num_ranks, files=files, tokenizer=tokenizer, search=search),
    ]
    engine = None
    if config.rollout.engine == "hf":
        engine = build_empty(files, dtype=DTYPES[engine_dtype(config)], attention=config.model.attention)
    return RunModels(config, tuple(models), engine, tuple(dict.fromkeys(search.warnings)))


@dataclass(slots=True)
class _Search:
    """Finds models as a run does, and goes on with a warning where only the configuration is needed to plan."""

    warnings: list[str] = field(default_factory=list)

    def find(self, path: str, option: str) -> ModelFiles:
        try:
            return find_model(path, option)
        except ModelError as error:
            # The same error, where there is no configuration either.
            files = find_model(path, option, needs_weights=False)
            self.warn(error)
            return files

    def tokenizer(self, files: ModelFiles) -> PreTrainedTokenizerBase | None:
        try:
            return load_tokenizer(files)
        except ModelError as error:
            self.warn(error)
            return None

    def warn(self, error: ModelError, but: str = "") -> None:
        self.warnings.append(f"a run would stop: {' '.join(str(error).split())}{but}")


def _critic(
    config: Config,
    policy: Any,
    num_ranks: int,
    *,
    files: ModelFiles,
    tokenizer: PreTrainedTokenizerBase | None,
    search: _Search,
) -> list[RunModel]:
    critic = config.critic
    if critic is None:
        return []
    train = critic_train(critic, config.train)
    if critic.kind == "head":
        how = head_sharding(config, num_ranks)
        return [RunModel("critic", "a head on the policy", value_head_for(policy), how, train)]
    own = files
    if critic.path:
        own = search.find(critic.path, "critic.path")
        check_reads(own, files, tokenizer, path=critic.path)
    model = empty_critic(config, critic, own, device="meta").model
    return [RunModel("critic", critic.path or config.model.path, model, trained_sharding(config, num_ranks), train)]


def _teacher(
    config: Config,
    num_ranks: int,
    *,
    files: ModelFiles,
    tokenizer: PreTrainedTokenizerBase | None,
    search: _Search,
) -> list[RunModel]:
    teacher = config.teacher
    if teacher is None:
        return []
    found = search.find(teacher.path, "teacher.path")
    theirs = search.tokenizer(found)
    if tokenizer is not None and theirs is not None:
        check_teacher(teacher, files, tokenizer, found=found, theirs=theirs)
    model = _teacher_model(config, teacher, found, search)
    return [RunModel("teacher", teacher.path, model, frozen_sharding(config, num_ranks), None)]


def _teacher_model(config: Config, teacher: TeacherConfig, found: ModelFiles, search: _Search) -> Any:
    try:
        return empty_teacher(config, teacher, found, device="meta").model
    except ModelError as error:
        plain = teacher.model_copy(update={"adapter": ""})
        model = empty_teacher(config, plain, found, device="meta").model  # the same error, unless it was the adapter's
        search.warn(error, "; the teacher is planned without its adapter")
        return model
