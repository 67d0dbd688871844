"""Stages go by name, what they share stays, wrong names are told; a tiny Qwen3-Omni is stripped, adapted in its language
tower and planned; the text model's numbers are found in nested configurations."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, CLIPVisionConfig, Qwen2_5OmniConfig, Qwen2_5OmniThinkerConfig, Qwen2VLConfig

from helpers_models import OMNI_TARGETS, tiny_qwen3_omni, tiny_qwen3_omni_config
from lockstep.config import LoraSection
from lockstep.errors import ModelError
from lockstep.model.lora import inject_lora
from lockstep.model.strip import StripReport, strip, stripped_from
from lockstep.model.text_config import text_config
from lockstep.sharding.plan import plan_sharding
from lockstep.testing import tiny_llama


class Stages(nn.Module):
    """thinker -> talker -> code2wav; the talker may share the thinker's embedding."""

    def __init__(self, *, is_shared=False):
        super().__init__()
        self.thinker = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5)})
        self.talker = nn.ModuleDict({"embed": nn.Embedding(5, 4), "speak": nn.Linear(4, 3)})
        self.code2wav = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        if is_shared:
            self.talker["embed"] = self.thinker["embed"]

    def forward(self, ids):
        hidden = self.thinker["head"](self.thinker["embed"](ids))
        return hidden if self.talker is None else self.talker["speak"](self.talker["embed"](ids))


def test_stages_are_removed_and_counted():
    model = Stages()
    freed = sum(t.nbytes for part in (model.talker, model.code2wav) for t in part.state_dict().values())
    report = strip(model, ["talker", "code2wav"])
    assert report.removed == ("talker", "code2wav") and report.nbytes == freed and report.kept == ()
    assert report.num_params == 5 * 4 + 4 * 3 + 3 + 3 * 2 + 2 + 2 * 2
    assert "code2wav.1.running_mean" in report.parameters and "talker.speak.weight" in report.parameters
    assert [name for name, _ in model.named_parameters()] == [
        "thinker.embed.weight",
        "thinker.head.weight",
        "thinker.head.bias",
    ]
    assert model(torch.tensor([1, 2])).shape == (2, 5)
    assert report.line().startswith("stripped talker, code2wav: 47 parameters")


def test_a_model_knows_what_was_taken_out_whoever_wraps_it_later():
    model = Stages()
    assert stripped_from(model) == []
    report = strip(model, ["code2wav"])
    assert report.num_saved == 2 + 5  # a linear's, and the norm's two parameters and three buffers
    strip(model, [])
    outer = nn.Sequential(model)
    assert stripped_from(outer) == [report]
    second = strip(model, ["talker"])
    assert stripped_from(outer) == [report, second] and second.num_saved == 3


@pytest.mark.parametrize("share", ["module", "parameter"])
def test_what_the_rest_shares_stays_and_is_reported(share):
    model = Stages(is_shared=share == "module")
    if share == "parameter":
        model.talker["embed"].weight = model.thinker["embed"].weight
    kept = model.thinker["embed"].weight
    report = strip(model, ["talker"])
    assert report.kept == ("talker.embed.weight",) and "1 tensors are shared" in report.line()
    assert report.parameters == ("talker.speak.weight", "talker.speak.bias") and report.num_params == 15
    assert model.thinker["embed"].weight is kept


def test_tied_inside_what_is_removed_counts_once():
    model = nn.ModuleDict({"a": tiny_llama(tie_word_embeddings=True), "b": nn.Linear(2, 2)})
    total = sum(param.numel() for param in model["a"].parameters())
    report = strip(_holding(model), ["held.a"])
    assert report.num_params == total


def _holding(model):
    """A module that has `held.a` and `held.b` as plain attributes."""
    outer, held = nn.Module(), nn.Module()
    for name, child in model.items():
        held.add_module(name, child)
    outer.held = held
    return outer


def test_nested_names_and_names_inside_one_another():
    model = _holding(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    assert strip(model, ["held.a"]).removed == ("held.a",)
    assert model.held.a is None and model.held.b is not None
    model = _holding(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    assert strip(model, ["held.a", "held", "held.a"]).removed == ("held",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("taker", r"no module 'taker'; near it there are \['talker', 'thinker'"),
        ("xyz", r"near it there are \['thinker', 'talker', 'code2wav'\]"),
        ("", r"no module ''"),
        ("thinker.head.weight", r"is a parameter; expected a module, such as 'thinker.head'"),
        ("code2wav.1", r"an entry of a Sequential; give the whole list's name"),
    ],
)
def test_wrong_names_are_told_and_nothing_is_removed(name, message):
    """V18: a misspelt stage was ignored."""
    model = Stages()
    with pytest.raises(ModelError, match=message):
        strip(model, ["talker", name])
    assert model.talker is not None


def test_a_second_time_and_plain_text_are_clear_errors():
    model = Stages()
    strip(model, ["talker"])
    for name in ("talker", "talker.speak"):
        with pytest.raises(ModelError, match=f"'{name}' has been stripped already"):
            strip(model, [name])
    with pytest.raises(ModelError, match=r"give \['code2wav'\]"):
        strip(model, "code2wav")


def test_a_model_declares_its_own_list():
    model = Stages()
    assert strip(model) == StripReport((), (), 0, 0)
    model._lockstep_strip_modules = ("code2wav",)
    assert strip(model).removed == ("code2wav",)

    class Declaring(Stages):
        _lockstep_strip_modules = ("talker", "code2wav")

    assert strip(Declaring()).removed == ("talker", "code2wav")


def test_omni_is_stripped_adapted_in_its_language_tower_and_planned(caplog):
    model = tiny_qwen3_omni()
    whole = sum(param.numel() for param in model.parameters())
    ids = torch.tensor([[3, 4, 5]])
    before = model.thinker(input_ids=ids).logits
    report = strip(model, ["talker", "code2wav"])
    assert report.num_params + sum(param.numel() for param in model.parameters()) == whole
    assert report.kept == () and model.has_talker is False
    assert torch.equal(model.thinker(input_ids=ids).logits, before)
    assert model.generate(ids, thinker_max_new_tokens=2, thinker_do_sample=False, return_audio=False) is not None

    adapted = inject_lora(model, LoraSection(rank=2, targets=OMNI_TARGETS), seed=0)
    trainable = [name for name, param in adapted.named_parameters() if param.requires_grad]
    assert len(trainable) == 2 * 4 * 2 and all(".language_model." in name for name in trainable)

    # The thinker's own list names its towers and their layers: the outer ones are the units, since units do not nest.
    plan = plan_sharding(adapted)
    thinker = "base_model.model.thinker"
    assert [unit.module for unit in plan.units] == [
        f"{thinker}.model.audio_tower",
        f"{thinker}.model.visual",
        f"{thinker}.model.language_model.embed_tokens",
        f"{thinker}.model.language_model.layers.0",
        f"{thinker}.model.language_model.layers.1",
        f"{thinker}.lm_head",
        "",
    ]
    assert "Qwen3OmniMoeTalkerDecoderLayer" in caplog.text and "taking units of" not in caplog.text


def test_a_peft_model_takes_the_base_models_names():
    adapted = get_peft_model(tiny_qwen3_omni(), LoraConfig(r=2, target_modules=OMNI_TARGETS))
    assert strip(adapted, ["talker", "base_model.model.code2wav"]).removed == (
        "base_model.model.talker",
        "base_model.model.code2wav",
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (tiny_llama(tie_word_embeddings=True).config, (32, 64, 2, 4, 2, True)),
        (AutoConfig.for_model("gpt2"), (768, 50257, 12, 12, 12, True)),
        (tiny_qwen3_omni_config(), (32, 64, 2, 4, 2, False)),
        (
            Qwen2VLConfig(
                text_config=dict(hidden_size=64, vocab_size=99, num_hidden_layers=1), tie_word_embeddings=True
            ),
            (64, 99, 1, 64, 8, True),
        ),
        (
            Qwen2_5OmniConfig(thinker_config=dict(text_config=dict(hidden_size=56, vocab_size=99))),
            (56, 99, 28, 28, 4, False),
        ),
    ],
    ids=["llama", "gpt2", "qwen3-omni", "qwen2-vl", "qwen2.5-omni"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_text_models_numbers_are_found_in_any_configuration(config, expected):
    """B100. Qwen2.5-Omni's text configuration says tied by itself; the thinker, which has the head, says untied."""
    found = text_config(config)
    assert (
        found.hidden_size,
        found.vocab_size,
        found.num_layers,
        found.num_heads,
        found.num_kv_heads,
        found.tie_word_embeddings,
    ) == expected


def test_the_flag_is_what_the_model_does():
    model = tiny_qwen3_omni().thinker
    assert (model.lm_head.weight is model.model.language_model.embed_tokens.weight) == text_config(
        model.config
    ).tie_word_embeddings


def test_a_configuration_without_a_text_model_is_refused():
    with pytest.raises(ModelError, match="CLIPVisionConfig has no single text model"):
        text_config(CLIPVisionConfig())
    assert text_config(Qwen2_5OmniThinkerConfig()).hidden_size == 3584
