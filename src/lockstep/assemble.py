"""A config and this rank's `World` in, every part of a run (data, rewards, engine, sharded model, actor) out.

Cheap checks come first: data, rewards and their errors before any model is loaded, the empty model's before its weights.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from lockstep.assemble_critic import build_critic, make_critic
from lockstep.assemble_teacher import build_teacher, make_teacher
from lockstep.checkpoint import CriticState, TrainState
from lockstep.config import Config, DataConfig, without_effect
from lockstep.data.order import PromptOrder
from lockstep.data.packing import check_packing_supported
from lockstep.data.prompts import encode_prompts
from lockstep.data.rewards import RewardSet
from lockstep.data.room import check_room, least, positions_of
from lockstep.data.source import load_rows
from lockstep.data.tasks import split_rows
from lockstep.dist import World, all_or_none
from lockstep.engines import DTYPES, engine_dtype, make_sampling, start_engine
from lockstep.environments.stage import Stage
from lockstep.episodes import Episodes
from lockstep.errors import ConfigError, DataError
from lockstep.export.what import AdapterExport, Export, MergedExport
from lockstep.logs import ON_EVERY_RANK
from lockstep.model.load import ModelFiles, build_empty, find_model, load_tokenizer
from lockstep.model.lora import Where, dropout_of, inject_lora
from lockstep.rollout.base import Engine, Generate
from lockstep.serving import Serving
from lockstep.shard_model import shard_and_fill
from lockstep.sharding.base import ShardedModel
from lockstep.train.choices import decide
from lockstep.train.critic import Critic
from lockstep.train.mini_batches import packing_of
from lockstep.train.optim import Optimizer
from lockstep.train.step import Actor
from lockstep.types import Prompt, Sampling
from lockstep.verify.canary import Canary, probe_prompts
from lockstep.verify.merge_loss import choose_mode, measure_merge_loss

log = logging.getLogger(__name__)

SHORT_PROBE = 32
"""Tokens of the canary's prompts where the engine keeps nothing of them between calls."""


@dataclass(frozen=True, slots=True)
class Data:
    """Prompts and rewards of a run."""

    train: tuple[Prompt, ...]
    held_out: dict[str, tuple[Prompt, ...]]
    """Held-out prompts by template, the training template first; empty if the recipe has no data.eval."""
    order: PromptOrder
    rewards: RewardSet
    correct: RewardSet
    format: RewardSet | None


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop turns."""

    data: Data
    sampling: Sampling
    serving: Serving
    sharded: ShardedModel
    actor: Actor
    critic: Critic | None
    state: TrainState
    dropout: float
    """The adapter's own: that of `lora.init_from`, where there is one."""
    episodes: Episodes | None = None
    """Where the recipe has an environment."""

    @property
    def generate(self) -> Generate:
        """Collective. What samples are made with: replies of the engine, or whole episodes."""
        return self.serving.generate if self.episodes is None else self.episodes

    def close(self) -> None:
        """Let go of the engine, and of what environments run in."""
        if self.episodes is not None:
            self.episodes.close()
        self.serving.close()


def check_world(config: Config, world: World) -> None:
    """Raises `ConfigError` when a rank would have no prompt, or a kernel that cannot train on its device."""
    if config.model.attention == "flex_attention" and world.device.type == "cpu":
        raise ConfigError(
            "model.attention is flex_attention, and this run is on a CPU, where torch's flex_attention has no backward; use sdpa"
        )
    check_size(config, world.size)


def check_size(config: Config, num_ranks: int) -> None:
    """Raises `ConfigError` when a rank would have no prompt."""
    if num_ranks > config.rollout.prompts_per_step:
        raise ConfigError(
            f"{num_ranks} ranks share rollout.prompts_per_step={config.rollout.prompts_per_step} prompts: every rank needs "
            f"at least one. Use rollout.prompts_per_step={num_ranks} or more, or fewer ranks (--nproc)"
        )


def assemble(config: Config, world: World) -> Parts:
    """Collective. Everything that a training run needs, the adapter at its start values and the engine at the base's."""
    check_world(config, world)
    for said in without_effect(config.train, num_steps=config.run.num_steps, has_teacher=config.teacher is not None):
        log.warning(said, extra=ON_EVERY_RANK)
    with all_or_none(world, "reading data and model"):
        rewards = RewardSet(config.reward), *eval_rewards(config)
        files = find_model(config.model.path)
        tokenizer = load_tokenizer(files)
        data = load_data(config, tokenizer, rewards)
        stage = Stage.of(config.environment, tokenizer=tokenizer, prompt=config.data.prompt)
        empty_teacher = build_teacher(config, files, tokenizer)
        empty_critic = build_critic(config, files, tokenizer)
        readers = {"teacher.path": empty_teacher, "critic.path": empty_critic}
        others = {name: each.model.config for name, each in readers.items() if each is not None}
        limits = {name: positions_of(each) for name, each in {"model.path": files.config, **others}.items()}
        check_data_fits(config, data, stage, limits)
    sharded = make_sharded(config, files, world)
    engine, connect = start_engine(config, files, tokenizer, world)
    try:
        sampling = make_sampling(config, engine.eos_ids)
        pad_id = int(tokenizer.pad_token_id)  # type: ignore[arg-type]
        train = decide(config.train, sharded.module, world, sampling=sampling, pad_id=pad_id, others=others)
        config = config.model_copy(update={"train": train})
        sharded.settle()
        optimizer = Optimizer(sharded.trainable(), train=config.train, num_steps=config.run.num_steps)
        teacher = make_teacher(config, empty_teacher, files, world, sampling=sampling, pad_id=pad_id)
        actor = Actor(
            sharded,
            optimizer,
            train=config.train,
            sampling=sampling,
            world=world,
            pad_id=pad_id,
            max_new_tokens=config.rollout.max_new_tokens * (config.environment.max_turns if config.environment else 1),
            seed=config.run.seed,
            teacher=teacher,
        )
        critic = make_critic(config, empty_critic, sharded, pad_id=pad_id)
        canary = make_canary(config, engine, sharded, data.train, sampling=sampling, world=world, pad_id=pad_id)
        export = choose_export(config, engine, sharded)
        serving = Serving(
            engine,
            sharded,
            export=export,
            world=world,
            bucket_bytes=int(config.sync.bucket_mb * 2**20),
            dtype=wire_dtype(config, engine, export),
            canary=canary,
            canary_every=config.canary.every_steps,
            connect=connect,
        )
        episodes = make_episodes(stage, serving, world, limits=limits.values())
    except BaseException:
        engine.close()
        raise
    own = CriticState(critic.valuer.sharded, critic.optimizer.torch) if critic else None
    state = TrainState(sharded, optimizer.torch, actor.scaler, own)
    return Parts(data, sampling, serving, sharded, actor, critic, state, dropout_of(sharded.module), episodes)


def choose_export(config: Config, engine: Engine, sharded: ShardedModel) -> Export:
    """Collective. What travels after each step. Raises `ConfigError` for what the engine does not take."""
    abilities = engine.abilities
    mode = config.sync.mode
    is_rounded = mode == "merged" and abilities.dtype != config.model.dtype
    loss = None
    if "merged" in abilities.kinds and (mode == "auto" or is_rounded):
        served = getattr(torch, abilities.dtype)
        loss = measure_merge_loss(sharded, served=served, first_step_lr=config.train.lr)
    if is_rounded and loss is not None:
        log.warning(
            "merged updates are rounded from %s to the engine's dtype: %s",
            config.model.dtype,
            loss.said,
            extra=ON_EVERY_RANK,
        )
    if mode == "auto":
        choice = choose_mode(loss, abilities)
        log.info("sync.mode auto: %s (%s)", choice.mode, choice.why)
        mode = choice.mode
    if mode not in abilities.kinds:
        raise ConfigError(
            f"sync.mode is {mode}, and this engine takes {', '.join(sorted(abilities.kinds))} updates; choose one of these, or auto"
        )
    return AdapterExport() if mode == "adapter" else MergedExport()


def wire_dtype(config: Config, engine: Engine, export: Export) -> torch.dtype | None:
    """What an update's floats are rounded to, once, before they travel; None: nothing is. See `engine.dtype`.

    Raises `ConfigError` for an engine whose weights are not in what the recipe says: nothing is rounded that nobody asked for.
    """
    abilities = engine.abilities
    if abilities.dtype != engine_dtype(config):
        raise ConfigError(
            f"the engine's weights are {abilities.dtype}, and by the recipe they are {engine_dtype(config)}: set engine.dtype to "
            f"{abilities.dtype}, so that updates are rounded to it, or start the engine in the other dtype"
        )
    if isinstance(export, MergedExport):
        return None if abilities.dtype == config.model.dtype else getattr(torch, abilities.dtype)
    if abilities.adapter_dtype is None:
        return None
    if abilities.adapter_dtype != "float32":
        log.info("adapters are rounded to %s, which is what the engine keeps them in", abilities.adapter_dtype)
    return getattr(torch, abilities.adapter_dtype)


def check_data_fits(config: Config, data: Data, stage: Stage | None, limits: Mapping[str, int | None]) -> None:
    """Before anything is loaded: is there room behind every prompt? What is trained on is read by all models (`limits`)."""
    key, max_new_tokens = "rollout.max_new_tokens", config.rollout.max_new_tokens
    _check_room_behind(data.train, stage, key=key, max_new_tokens=max_new_tokens, limits=limits)
    check_held_out_fits(config, data.held_out, stage, positions=limits["model.path"])


def check_held_out_fits(
    config: Config, held_out: Mapping[str, tuple[Prompt, ...]], stage: Stage | None, *, positions: int | None
) -> None:
    """The same for what is only scored, under every template: the policy alone reads it (`positions`)."""
    key, max_new_tokens = "eval.max_new_tokens", config.eval.max_new_tokens
    for prompts in held_out.values():
        _check_room_behind(prompts, stage, key=key, max_new_tokens=max_new_tokens, limits={"model.path": positions})


def _check_room_behind(
    prompts: Sequence[Prompt], stage: Stage | None, *, key: str, max_new_tokens: int, limits: Mapping[str, int | None]
) -> None:
    if stage is None or not stage.kind.may_open:  # else it may put something shorter in a prompt's place
        check_room(prompts, key=key, max_new_tokens=max_new_tokens, limits=limits)
    if stage is not None:
        stage.check_room(prompts, key=key, max_new_tokens=max_new_tokens)


def make_episodes(
    stage: Stage | None, serving: Serving, world: World, *, limits: Iterable[int | None]
) -> Episodes | None:
    """No sample gets longer than the engine and the models that read it (`limits`) can take."""
    if stage is None:
        return None
    return Episodes(stage, serving.generate, world=world, max_len=least([serving.engine.abilities.max_len, *limits]))


def make_canary(
    config: Config,
    engine: Engine,
    sharded: ShardedModel,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    world: World,
    pad_id: int,
) -> Canary | None:
    """What checks the engine after each update; None where the recipe wants none, or cannot have one."""
    canary = config.canary
    if not canary.enabled:
        return None
    how_long = {} if engine.abilities.keeps_prefixes else {"length": SHORT_PROBE}
    made = Canary(
        sharded,
        sampling=sampling,
        world=world,
        pad_id=pad_id,
        prompts=probe_prompts(
            prompts,
            num_prompts=canary.num_prompts,
            max_len=positions_of(cast(Any, sharded.skeleton).config) or sys.maxsize,
            num_tokens=canary.num_tokens,
            **how_long,
        ),
        dtypes=(config.model.dtype, engine.abilities.dtype),
        packing=packing_of(config.train),
        num_samples=canary.num_samples,
        num_tokens=canary.num_tokens,
        tolerance=canary.tolerance,
    )
    made.remember(0)  # before a checkpoint is loaded: what an engine serves that no update of a resumed run reaches
    return made


def make_sharded(config: Config, files: ModelFiles, world: World) -> ShardedModel:
    """Collective. Empty model, LoRA, plan, shard, fill: no rank holds the whole base."""
    return shard_and_fill(build_policy(config, files), files, config, world)


def build_policy(config: Config, files: ModelFiles, *, device: Where = "cpu") -> Any:
    """Not collective. The base on meta, the adapter on `device` (meta: to be planned with). Reads no weights but an adapter's."""
    empty = build_empty(files, dtype=DTYPES[config.model.dtype], attention=config.model.attention)
    if config.train.packing != "auto":
        check_packing_supported(empty.config, config.train.packing)  # before any weights are read
    return inject_lora(
        empty, config.lora, seed=config.run.seed, files=files, reference=config.train.reference, device=device
    )


def eval_rewards(config: Config) -> tuple[RewardSet, RewardSet | None]:
    """What says whether a held-out answer is right, and (if asked for) whether its form is."""
    correct = RewardSet([config.eval.correct])
    return correct, RewardSet([config.eval.format]) if config.eval.format else None


def load_data(
    config: Config, tokenizer: PreTrainedTokenizerBase, rewards: tuple[RewardSet, RewardSet, RewardSet | None]
) -> Data:
    """Training prompts without the held-out questions, and the held-out prompts under every template that is tried."""
    train_rows, eval_rows = load_rows(config.data.train, origin="data.train"), []
    if config.data.eval is not None:
        eval_rows = load_rows(config.data.eval, origin="data.eval")
        train_rows = split_rows(
            train_rows, eval_rows, config.data.train.prompt_column, eval_column=config.data.eval.prompt_column
        )
    if not train_rows:
        raise DataError(
            "data.train has no row left once the held-out questions are taken out; give more rows or other data.eval"
        )
    prompts = encode_prompts(
        train_rows, source=config.data.train, prompt=config.data.prompt, tokenizer=tokenizer, name="train"
    ).prompts
    if len(prompts) < config.rollout.prompts_per_step:
        log.warning(
            "data.train has %d prompts, fewer than the %d of a step: prompts repeat",
            len(prompts),
            config.rollout.prompts_per_step,
            extra=ON_EVERY_RANK,
        )
    held_out = encode_held_out(config.data, eval_rows, tokenizer, config.eval.before_templates) if eval_rows else {}
    return Data(prompts, held_out, PromptOrder(len(prompts), config.run.seed, config.data.shuffle), *rewards)


def encode_held_out(
    data: DataConfig, rows: list, tokenizer: PreTrainedTokenizerBase, templates: tuple[str, ...]
) -> dict[str, tuple[Prompt, ...]]:
    """Held-out prompts by template, the training template first."""
    assert data.eval is not None
    return {
        template: encode_prompts(
            rows, source=data.eval, prompt=data.prompt, tokenizer=tokenizer, name="eval", template=template
        ).prompts
        for template in dict.fromkeys((data.prompt.template, *templates))
    }
