"""Recipes and overrides, good and bad, in; configs, or errors with the key, what was expected and what came, out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lockstep.config import Config, build_config, describe_options, dump_config, load_config
from lockstep.errors import ConfigError
from lockstep.yaml_text import read_yaml, write_yaml

RECIPE = """
model: {path: /models/tiny}
data:
  train: {task: sums, task_args: {low: 1}}
reward:
  - {name: last_number}
  - {name: format_number, weight: 0.2}
"""


def write(folder: Path, text: str = RECIPE) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def failure(folder: Path, *overrides: str, text: str = RECIPE) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text), overrides)
    return str(caught.value)


def test_defaults_and_run_dir_come_from_the_recipe_s_name(tmp_path: Path):
    config = load_config(write(tmp_path))
    assert config.run.dir == str(Path("runs") / "tiny")
    assert config.train.lr == 1e-4
    assert [reward.weight for reward in config.reward] == [1.0, 0.2]


def test_config_is_frozen(tmp_path: Path):
    config = load_config(write(tmp_path))
    with pytest.raises(ValidationError, match="frozen"):
        config.train.lr = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_recipe_with_every_option_round_trips_through_its_dump(tmp_path: Path):
    overrides = (
        "run.dir=on",
        "run.max_train_seconds=1e-3",
        "lora.targets=[q_proj, v_proj]",
        "data.eval.path=x.jsonl",
        "data.eval.task=",
        "data.prompt.template=Q: {prompt} =\\n é",
        "data.prompt.system=null",
        'data.train.task_args={low: 1, high: "1e4", ratio: 1e-5}',
        "rollout.stop_token_ids=[7]",
        "eval.before_templates=['{prompt}', 'a {prompt}']",
        "reward.1.args={pattern: '^\\d+$'}",
    )
    config = load_config(write(tmp_path), overrides)
    again = load_config(write(tmp_path, dump_config(config)))
    assert again == config
    assert config.run.dir == "on"
    assert config.data.train.task_args == {"low": 1, "high": "1e4", "ratio": 1e-5}
    assert config.lora.targets == ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.lr=1e-5", "train.lr", 1e-5),
        ("train.lr=1", "train.lr", 1.0),
        ("train.betas=[0.8, 0.9]", "train.betas", (0.8, 0.9)),
        ("lora.use_rslora=on", "lora.use_rslora", True),
        ("data.shuffle=no", "data.shuffle", False),
        ("data.train.answer_column=no", "data.train.answer_column", "no"),
        ("data.train.answer_column=", "data.train.answer_column", ""),
        ("run.dir=007", "run.dir", "007"),
        ("run.dir='a b'", "run.dir", "a b"),
        ("data.prompt.template={prompt} =", "data.prompt.template", "{prompt} ="),
        ("data.prompt.template={prompt}", "data.prompt.template", "{prompt}"),
        ("data.prompt.system=null", "data.prompt.system", None),
        ("data.prompt.system=Be brief: answer", "data.prompt.system", "Be brief: answer"),
        ("lora.targets=.*_proj", "lora.targets", ".*_proj"),
        ("lora.targets=[q_proj]", "lora.targets", ("q_proj",)),
        ("reward.1.weight=2", "reward.1.weight", 2.0),
        ("run.max_train_seconds=null", "run.max_train_seconds", None),
        ("data.train.task_args.high=9", "data.train.task_args.high", 9),
    ],
)
def test_overrides(tmp_path: Path, override: str, key: str, value: object):
    node = load_config(write(tmp_path), [override])
    for part in key.split("."):
        found = node[int(part)] if isinstance(node, tuple) else node[part] if isinstance(node, dict) else None
        node = getattr(node, part) if found is None else found
    assert node == value
    assert type(node) is type(value)


def test_the_last_of_two_overrides_wins(tmp_path: Path):
    assert load_config(write(tmp_path), ["run.seed=1", "run.seed=2"]).run.seed == 2


def test_override_of_an_entry_replaces_the_whole_entry(tmp_path: Path):
    config = load_config(write(tmp_path), ["reward.1={name: exact_match}"])
    assert [reward.name for reward in config.reward] == ["last_number", "exact_match"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trian.lr=1", "unknown key 'trian'; did you mean 'train'?"),
        ("train.l_r=1", "unknown key 'train.l_r'; did you mean 'train.lr'?"),
        ("train.group_size=4", "unknown key 'train.group_size'; did you mean 'rollout.group_size'?"),
        ("data.train.colum=x", "unknown key 'data.train.colum'"),
        ("reward.0.wieght=2", "unknown key 'reward.0.wieght'; did you mean 'reward[].weight'?"),
        ("train.zzzzqqq=2", "unknown key 'train.zzzzqqq'; the nearest known key is 'train.lr'"),
        ("q=2", "unknown key 'q'; known here: canary, checkpoint, critic, data, dist, engine, environment"),
        ("train.lr=fast", "train.lr: expected a number; 'fast' came"),
        ("train.lr=", "train.lr: expected a number; '' came"),
        ("train.lr=true", "train.lr: expected a number; True came"),
        ("train.lr=[1]", "train.lr: expected float; [1] came"),
        ("train.lr=.nan", "train.lr: input should be a finite number; nan came"),
        ("train.lr=0", "train.lr: input should be greater than 0; 0 came"),
        (
            "run.num_steps=2.5",
            "got a number with a fractional part; 2.5 came",
        ),
        ("run.num_steps='5'", "run.num_steps: expected a number; '5' came"),
        ("run.num_steps=null", "run.num_steps: expected int; None came"),
        ("run.num_steps=0", "run.num_steps: input should be greater than or equal to 1; 0 came"),
        ("rollout.stop_token_ids=[a]", "rollout.stop_token_ids.0: expected a number; 'a' came"),
        ("rollout.stop_token_ids=5", "rollout.stop_token_ids: expected list of int; 5 came"),
        ("lora.targets=5", "lora.targets: expected text or list of text; 5 came"),
        ("lora.use_rslora=maybe", "lora.use_rslora: expected true or false; 'maybe' came"),
        ("data.prompt.format=html", "data.prompt.format: input should be 'chat' or 'text'; 'html' came"),
        ("train.betas=[0.9]", "train.betas"),
        ("train.betas=[0.9, 1.5]", "train.betas.1: input should be less than 1; 1.5 came"),
        ("train=5", "train: expected a section with keys below it; 5 came"),
        ("reward={name: x}", "reward: expected a list of sections"),
        ("reward=[]", "reward: expected at least 1 entry"),
        ("reward.2.weight=1", "'2' must be an index of a list with 2 entries"),
        ("reward.-1.weight=1", "'-1' must be an index of a list"),
        ("reward.name=x", "'name' must be an index of a list"),
        ("model.path.sub=1", "'path' is the value '/models/tiny' in the recipe, not a section"),
        ("train.lr", "'train.lr' is not of the form key.sub=value"),
        ("=3", "is not of the form key.sub=value"),
        ("train..lr=3", "is not of the form key.sub=value"),
        ("train.lr=[1", "'[1' is not a YAML value"),
        ("data.train.path=x.jsonl", "data.train: give either `task` or `path`; both came"),
        ("data.train.task=", "data.train: give either `task` or `path`; neither came"),
        ("data.prompt.template=hello", "data.prompt.template must contain {prompt}"),
        ("eval.before_templates=[hello]", "eval.before_templates.0 must contain {prompt}"),
        ("rollout.temperature=0", "rollout.temperature is 0"),
        ("rollout.group_size=1", "rollout.group_size is 1"),
        ("eval.every_steps=5", "eval.every_steps is 5, and there is no held-out data"),
    ],
)
def test_bad_overrides_name_the_key_and_what_came(tmp_path: Path, override: str, expected: str):
    assert expected in failure(tmp_path, override)


def test_every_fault_is_listed(tmp_path: Path):
    said = failure(tmp_path, "train.lr=fast", "run.num_steps=0", "nonsense=1")
    assert "train.lr" in said
    assert "run.num_steps" in said
    assert "'nonsense'" in said
    assert len(said.splitlines()) == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "it holds nothing"),
        ("# only a comment\n", "it holds nothing"),
        ("- a\n- b\n", "it holds a list"),
        ("just text", "it holds a str"),
        ("model: {path: x}\n", "'data' is required and missing"),
        ("model: [", "is not a YAML recipe"),
        ("model: {path: a, path: b}\n", "the key 'path' is given twice"),
        ("model: {path: a}\nmodel: {path: b}\n", "the key 'model' is given twice"),
        ("model: !!python/object/apply:os.getcwd []\n", "is not a YAML recipe"),
        ("a: 1\n---\nb: 2\n", "is not a YAML recipe"),
        ("1: x\n" + RECIPE, "1: keys should be strings; 1 came"),
        ("model: &m {path: *m}\n" + RECIPE.replace("model: {path: /models/tiny}", ""), "model.path"),
        (RECIPE.replace("{path: /models/tiny}", ""), "'model.path' is required and missing"),
    ],
)
def test_bad_recipes(tmp_path: Path, text: str, expected: str):
    assert expected in failure(tmp_path, text=text)


def test_recipe_that_is_missing_a_folder_binary_or_unreadable(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"model: \xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config(binary)
    with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
        load_config(binary / "below.yaml")


def test_sections_left_empty_have_their_defaults(tmp_path: Path):
    text = RECIPE + "run:\ntrain:\nobserve:\n"
    config = load_config(write(tmp_path, text))
    assert config.train.lr == 1e-4
    assert config.run.dir == str(Path("runs") / "tiny")


def test_empty_optional_section_means_none(tmp_path: Path):
    config = load_config(write(tmp_path, RECIPE.replace("data:", "data:\n  eval:")))
    assert config.data.eval is None


def test_scientific_notation_is_a_number_wherever_it_stands(tmp_path: Path):
    text = RECIPE.replace("{low: 1}", "{low: 1e-4, name: on, port: 010}")
    config = load_config(write(tmp_path, text))
    assert config.data.train.task_args == {"low": 1e-4, "name": "on", "port": 10}


def test_every_option_is_described():
    options = describe_options()
    assert len({option.key for option in options}) == len(options) > 60
    for option in options:
        assert option.meaning, f"{option.key} has no description"
        assert option.type, option.key
        assert option.default, option.key
        assert "[" not in option.type, f"{option} shows Python's spelling of a type"
    by_key = {option.key: option for option in options}
    assert by_key["model.path"].default == "required"
    assert by_key["lora.targets"].type == "text or list of text"
    assert by_key["run.max_train_seconds"].type == "float or null"
    assert by_key["data.prompt.format"].type == "one of chat, text"
    assert by_key["reward[].weight"].default == "1.0"
    assert by_key["data.eval.path"].type == "text"


def test_described_defaults_are_the_real_ones():
    config = build_config(read_yaml(RECIPE))
    for option in describe_options():
        if option.default == "required" or option.key.startswith(
            ("data.eval", "data.train.", "reward", "critic", "teacher", "environment", "eval.correct", "eval.format")
        ):
            continue
        node: object = config
        for part in option.key.split("."):
            node = getattr(node, part)
        assert read_yaml(option.default) == (list(node) if isinstance(node, tuple) else node), option


LINE_BREAKS = ["a\x85b", "a\u2028", "\u2029", "a\r\nb", "a\tb\n\n", " a "]
SCALARS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(LINE_BREAKS),
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
)


@settings(deadline=None, max_examples=60)
@given(st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner)))
def test_yaml_round_trip(value: object):
    assert read_yaml(write_yaml(value)) == value
    assert read_yaml(write_yaml(value, inline=True)) == value


@pytest.mark.parametrize(
    "text", ["1e-4", "on", "no", "010", "0o17", "1:30", "2024-01-01", "~", "null", "true", "", "<<", "="]
)
def test_text_that_looks_like_something_else_stays_text(text: str):
    assert read_yaml(write_yaml({"key": text})) == {"key": text}


def test_dump_is_a_recipe_for_any_seed_and_rate():
    tree = read_yaml(RECIPE)
    for rate in (1e-5, 3e-4, 1e-300, 1.0):
        config = build_config({**tree, "train": {"lr": rate}})
        assert build_config(read_yaml(dump_config(config))) == config
        assert isinstance(config, Config)


def test_an_eval_reward_is_a_name_or_its_options():
    tree = read_yaml(RECIPE)
    assert build_config(tree).eval.correct.name == "last_number"
    named = build_config(
        {**tree, "eval": {"correct": "exact_match", "format": {"name": "format_regex", "args": {"pattern": "x"}}}}
    )
    assert named.eval.correct.name == "exact_match" and named.eval.format is not None
    assert build_config(read_yaml(dump_config(named))) == named
    shown = {option.key: option.default for option in describe_options()}
    assert (shown["eval.correct"], shown["eval.format"]) == ("last_number", "null")
    with pytest.raises(ConfigError, match=r"eval\.format\.patern"):
        build_config({**tree, "eval": {"format": {"name": "format_regex", "patern": "x"}}})


def test_a_wrong_entry_of_a_list_is_told_once():
    tree = {"model": {"path": "m"}, "data": {"train": {"task": "sums"}}}
    with pytest.raises(ConfigError, match=r"^config: reward\.0\.timeout_s: [^\n]*$"):
        build_config({**tree, "reward": [{"name": "last_number", "timeout_s": -1}]})
    with pytest.raises(ConfigError, match=r"^config: reward: expected at least 1 entry; \[\] came$"):
        build_config({**tree, "reward": []})
