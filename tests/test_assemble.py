"""Parts of a run put together: what the sections mean for each other."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from helpers_data import tiny_tokenizer
from helpers_loop import make_model_folder, recipe
from helpers_train import adapt
from lockstep.assemble import assemble, load_data
from lockstep.assemble_critic import check_reads
from lockstep.config import build_config
from lockstep.data.rewards import RewardSet
from lockstep.data.source import load_rows
from lockstep.data.tasks import SAME_PROBLEM
from lockstep.dist import World
from lockstep.errors import ConfigError, LockstepError
from lockstep.model.load import find_model
from lockstep.testing import tiny_llama


def test_a_run_does_not_train_on_what_it_is_scored_on(tmp_path):
    config = build_config(recipe("unused", tmp_path / "run"))
    assert config.data.eval is not None
    rewards = (RewardSet(config.reward), RewardSet([config.eval.correct]), None)
    data = load_data(config, tiny_tokenizer(), rewards)

    held_out = {prompt.row[SAME_PROBLEM] for prompts in data.held_out.values() for prompt in prompts}
    given = [row[SAME_PROBLEM] for row in load_rows(config.data.train, origin="data.train")]
    assert held_out & set(given)  # the recipe's own rows overlap: there is something to remove
    assert [prompt.row[SAME_PROBLEM] for prompt in data.train] == [name for name in given if name not in held_out]
    assert data.order.num_prompts == len(data.train)


def test_flex_attention_is_refused_where_it_cannot_train(tmp_path):
    config = build_config(recipe("unused", tmp_path / "run", model={"attention": "flex_attention"}))
    with pytest.raises(ConfigError, match="flex_attention has no backward; use sdpa"):
        assemble(config, World())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def reward_model(folder: Path, like: str, *, labels: int = 1, tokenizer: Any = None) -> str:
    config = AutoConfig.from_pretrained(like, num_labels=labels)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def with_other_tokens(folder: Path, like: str) -> str:
    tokenizer = tiny_tokenizer()
    text = tokenizer.backend_tokenizer.to_str().replace('"a"', '"zzz"')
    return reward_model(folder, like, tokenizer=PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text)))


def with_few_positions(folder: Path, like: str) -> str:
    config = AutoConfig.from_pretrained(like, num_labels=1, max_position_embeddings=8)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return str(folder)


def adapter_of_another_base(folder: Path, like: str) -> str:
    adapt(tiny_llama(vocab_size=len(tiny_tokenizer()), hidden_size=64), seed=1).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("section", "option", "make", "said"),
    [
        ("critic", "path", lambda folder, like: "nowhere", r"critic\.path 'nowhere' is not a folder"),
        ("critic", "path", lambda folder, like: reward_model(folder, like, labels=2), "has 2 labels, and a value model has one"),
        ("critic", "path", with_other_tokens, r"another tokenizer than the policy, whose token \d+ is 'a' \(there it is None\)"),
        ("critic", "path", with_few_positions, r"may get 6 new ones \(rollout.max_new_tokens\), and the model of critic.path has 8"),
        ("critic", "lora", lambda folder, like: {"targets": ["q_prj"]}, r"critic\.lora\.targets: 'q_prj' matches no module"),
        ("teacher", "path", lambda folder, like: "nowhere", r"teacher\.path 'nowhere' is not a folder"),
        ("teacher", "adapter", lambda folder, like: "nowhere", r"teacher\.adapter 'nowhere' is not a PEFT folder"),
        ("teacher", "adapter", adapter_of_another_base, r"teacher\.adapter .* is .*64.* there, and here it has to be .*32.*"),
    ],
)  # fmt: skip
def test_a_critic_or_teacher_that_cannot_be_is_refused_before_any_model_is_loaded(
    model, tmp_path, monkeypatch, section, option, make, said
):
    def loaded(*args: Any) -> Any:
        raise AssertionError("the policy was loaded first")

    monkeypatch.setattr("lockstep.assemble.make_sharded", loaded)
    given = {"path": model} if section == "teacher" else {}
    algorithm = {"train": {"algorithm": "gae"}} if section == "critic" else {}
    sections = {section: given | {option: make(tmp_path / "made", model)}, **algorithm}
    with pytest.raises(LockstepError, match=said):
        assemble(build_config(recipe(model, tmp_path / "run", **sections)), World())


def test_options_without_effect_are_told_at_the_start(model, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("lockstep.assemble.find_model", lambda path: find_model("nowhere"))
    with pytest.raises(LockstepError, match="nowhere"):
        assemble(build_config(recipe(model, tmp_path / "run", train={"kl_kind": "k2"})), World())
    assert "train.kl_kind=k2: no effect, since train.kl_coef is 0" in caplog.text


def test_a_reward_model_may_know_more_tokens_than_the_policy(model, tmp_path):
    tokenizer = tiny_tokenizer()
    files = find_model(reward_model(tmp_path / "same", model, tokenizer=tokenizer))
    check_reads(files, find_model(model), tokenizer, path="there")
    tokenizer.add_tokens(["[PAD]"])
    tokenizer.save_pretrained(tmp_path / "same")
    check_reads(files, find_model(model), tiny_tokenizer(), path="there")


@pytest.mark.parametrize("section", ["teacher", "critic"])
def test_auto_packs_as_every_model_of_the_run_can(model, tmp_path, caplog, section):
    """A window is lost in the mask of shared prefixes; the policy itself, which has none, could share them."""
    tokenizer = tiny_tokenizer()
    config = MistralConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=8, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path / "windowed")
    tokenizer.save_pretrained(tmp_path / "windowed")
    algorithm = {"train": {"algorithm": "gae"}} if section == "critic" else {}
    sections = {section: {"path": str(tmp_path / "windowed")}, **algorithm}
    parts = assemble(build_config(recipe(model, tmp_path / "run", **sections)), World())
    parts.serving.close()
    assert parts.actor._train.packing == "packed"
    assert f"{section}.path: sliding-window or chunked layers" in caplog.text
