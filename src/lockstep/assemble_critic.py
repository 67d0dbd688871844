"""A config, the policy and its checkpoint in; the critic that the recipe asks for, sharded and filled as the policy is, out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from lockstep.config import Config, CriticConfig
from lockstep.data.packing import Packing, check_packing_supported
from lockstep.dist import World, all_or_none
from lockstep.engines import DTYPES
from lockstep.errors import ConfigError, ModelError
from lockstep.model.load import ModelFiles, find_model, load_tokenizer
from lockstep.model.lora import Where, inject_value_lora
from lockstep.model.value_model import ValueHead, build_empty_value_model
from lockstep.shard_model import head_sharding, shard_and_fill
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.plan import plan_sharding
from lockstep.sharding.shard import shard
from lockstep.train.critic import Critic, critic_train
from lockstep.train.optim import Optimizer
from lockstep.train.values import HeadValuer, ModelValuer, Valuer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True, slots=True, eq=False)
class EmptyCritic:
    """A value model whose base is on meta, and where its weights are."""

    files: ModelFiles
    model: Any
    """A PEFT model, its head trained whole."""
    new: tuple[str, ...]
    """Names of parameters that no file has (`ValueModel.new`)."""


def build_critic(
    config: Config, files: ModelFiles, tokenizer: PreTrainedTokenizerBase | None = None
) -> EmptyCritic | None:
    """Not collective; reads no weights. None where the recipe has no critic with a model of its own.

    `files`, `tokenizer`: the policy's; without one, that of `critic.path` is not looked at. Raises `ConfigError` or `ModelError`
    for a checkpoint or targets that are not fit.
    """
    critic = config.critic
    if critic is None or critic.kind == "head":
        return None
    own = find_model(critic.path, "critic.path") if critic.path else files
    if critic.path:
        check_reads(own, files, tokenizer, path=critic.path)
    return empty_critic(config, critic, own)


def empty_critic(config: Config, critic: CriticConfig, files: ModelFiles, *, device: Where = "cpu") -> EmptyCritic:
    """Not collective. `files`: its own. `device` meta: the adapter without values, to be planned with."""
    empty = build_empty_value_model(files, dtype=DTYPES[config.model.dtype], attention=config.model.attention)
    model = inject_value_lora(empty.model, critic.lora, head=empty.head, seed=config.run.seed, device=device)
    return EmptyCritic(files, model, empty.new)


def check_reads(own: ModelFiles, files: ModelFiles, tokenizer: PreTrainedTokenizerBase | None, *, path: str) -> None:
    """The critic is given the policy's ids: each must mean the same to it. It may know more tokens; a checkpoint without a
    tokenizer is taken at its word. Raises `ConfigError`."""
    num, num_here = (each.config.get_text_config().vocab_size for each in (own, files))
    if num < num_here:
        raise ConfigError(
            f"critic.path {path!r} has a vocabulary of {num} tokens and the policy one of {num_here}: it must read the policy's "
            "tokens; give a checkpoint with that tokenizer"
        )
    if tokenizer is None or not any((own.path / name).is_file() for name in TOKENIZER_FILES):
        return
    theirs = load_tokenizer(own).get_vocab()
    odd = min(((i, token) for token, i in tokenizer.get_vocab().items() if theirs.get(token) != i), default=None)
    if odd is not None:
        raise ConfigError(
            f"critic.path {path!r} has another tokenizer than the policy, whose token {odd[0]} is {odd[1]!r} (there it is "
            f"{theirs.get(odd[1])}): it would read other words; give a checkpoint of the policy's model family"
        )


def make_critic(config: Config, empty: EmptyCritic | None, policy: ShardedModel, *, pad_id: int) -> Critic | None:
    """Collective. None where the recipe has no critic. `empty`: what `build_critic` made; `config.train` is decided
    (`train.choices`).

    Raises `ModelError` for a model that is not fit.
    """
    critic, train, world = config.critic, config.train, policy.world
    if critic is None:
        return None
    if empty is None:
        valuer: Valuer = HeadValuer(policy, make_value_head(config, policy))
    else:
        valuer = ModelValuer(make_value_model(config, empty, world=world))
    optimizer = Optimizer(valuer.sharded.trainable(), train=critic_train(critic, train), num_steps=config.run.num_steps)
    return Critic(valuer, optimizer, critic=critic, train=train, world=world, pad_id=pad_id, seed=config.run.seed)


def make_value_head(config: Config, policy: ShardedModel) -> ShardedModel:
    """Collective. A head for the policy's last hidden states; one unit."""
    own, how = value_head_for(policy.skeleton), head_sharding(config, policy.world.size)
    return shard(
        own,
        plan_sharding(own, how.policy),
        backend=how.backend,
        reshard_after_forward=how.reshard_after_forward,
        mixed_dtypes=how.mixed_dtypes,
        timeout_s=config.dist.agree_timeout_s,
    )


def value_head_for(policy: Any) -> ValueHead:
    """As wide as the policy's hidden states. Raises `ModelError` for a policy without an output embedding."""
    output = policy.get_output_embeddings()
    if output is None:
        raise ModelError(
            "critic.kind: head needs a causal language model with an output embedding; use critic.kind: model"
        )
    return ValueHead(getattr(output, "base_layer", output).weight.shape[1])


def make_value_model(config: Config, empty: EmptyCritic, *, world: World) -> ShardedModel:
    """Collective. As the policy is made: empty, with LoRA, sharded, filled; no rank holds the whole base."""
    with all_or_none(world, "the critic's packing"):
        check_packing_supported(empty.model.config, cast(Packing, config.train.packing))
    return shard_and_fill(empty.model, empty.files, config, world, keep=empty.new)
