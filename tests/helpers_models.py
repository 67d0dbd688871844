"""Tiny random models of the shapes that lockstep meets: seeded, fp32, each built in well under a second."""

from __future__ import annotations

from typing import Any

import peft
import torch
import transformers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
)

# What older versions of the libraries cannot do themselves, and so cannot be compared with.
PEFT = tuple(int(part) for part in peft.__version__.split(".")[:2])
HAS_GEMMA4 = hasattr(transformers, "Gemma4ForCausalLM")
"""Not in transformers 5.1 to 5.4."""
PEFT_TAKES_PATTERNS = PEFT >= (0, 20)
"""Before, PEFT takes a pattern of target modules apart into letters for models whose checkpoint has other names (Qwen3-Omni)."""
PEFT_UNLOADS_THE_EMPTY = PEFT >= (0, 21)
"""Before, PEFT cannot unload a `modules_to_save` layer whose only adapter was deleted."""

WORDS: dict[str, Any] = dict(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
DECODER: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
# The language tower lies in thinker.model itself in transformers 5.1.
OMNI_TARGETS = r"thinker\.model\.(language_model\.)?layers\.\d+\.self_attn\.(q|k|v|o)_proj"
"""LoRA in the language tower only: the audio and vision towers have modules of the same last names."""


def _build(kind: type[PreTrainedModel], config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return kind(config).eval()


def tiny_gpt2(*, seed: int = 0, **overrides: Any) -> GPT2LMHeadModel:
    """Conv1D layers, learned positions, tied."""
    values = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return _build(GPT2LMHeadModel, GPT2Config(**{**WORDS, **values, **overrides}), seed)


def tiny_qwen2(*, seed: int = 0, **overrides: Any) -> Qwen2ForCausalLM:
    """Biases on q, k and v; random ones, since the constructor's are zero."""
    model = _build(
        Qwen2ForCausalLM, Qwen2Config(**{**WORDS, **DECODER, "tie_word_embeddings": False, **overrides}), seed
    )
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(".bias"):
                param.normal_()
    return model


def tiny_qwen3(*, seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    """Norms on q and k."""
    values = dict(head_dim=8, tie_word_embeddings=False)
    return _build(Qwen3ForCausalLM, Qwen3Config(**{**WORDS, **DECODER, **values, **overrides}), seed)


def tiny_qwen3_moe(*, seed: int = 0, **overrides: Any) -> Qwen3MoeForCausalLM:
    """Fused experts: gate_up_proj [4, 32, 32], down_proj [4, 32, 16]."""
    values = dict(head_dim=8, tie_word_embeddings=False, decoder_sparse_step=1, norm_topk_prob=True)
    return _build(Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**WORDS, **DECODER, **EXPERTS, **values, **overrides}), seed)


def tiny_mixtral(*, seed: int = 0, **overrides: Any) -> MixtralForCausalLM:
    """Fused experts under other names in the checkpoint."""
    values = dict(num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False)
    return _build(MixtralForCausalLM, MixtralConfig(**{**WORDS, **DECODER, **values, **overrides}), seed)


def tiny_gemma3(*, seed: int = 0, **overrides: Any) -> Gemma3ForCausalLM:
    """Text only, tied, one layer with a sliding window and one without."""
    values = dict(head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    return _build(Gemma3ForCausalLM, Gemma3TextConfig(**{**WORDS, **DECODER, **values, **overrides}), seed)


def tiny_gemma4(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Text only, tied, rotary tables of two lengths, and a small per-layer embedding (its default has 262144 rows)."""
    values = dict(
        head_dim=8,
        global_head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=4,
        num_kv_shared_layers=0,
    )
    config = transformers.Gemma4TextConfig(**{**WORDS, **DECODER, **values, **overrides})
    return _build(transformers.Gemma4ForCausalLM, config, seed)


def tiny_qwen2_vl(*, seed: int = 0) -> Qwen2VLForConditionalGeneration:
    """A vision tower of one block, and a text model whose numbers are in a nested configuration."""
    text = {
        **WORDS,
        **DECODER,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    }
    vision = dict(depth=1, embed_dim=16, hidden_size=32, num_heads=2, patch_size=4)
    special = dict(image_token_id=60, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63)
    return _build(
        Qwen2VLForConditionalGeneration, Qwen2VLConfig(text_config=text, vision_config=vision, **special), seed
    )


def tiny_qwen3_omni(*, seed: int = 0) -> Qwen3OmniMoeForConditionalGeneration:
    """All stages: thinker (audio, vision, text with experts), talker and code2wav. Text only works after `strip`."""
    return _build(Qwen3OmniMoeForConditionalGeneration, tiny_qwen3_omni_config(), seed)


def tiny_qwen3_omni_config() -> Qwen3OmniMoeConfig:
    """Its rotary sections are 1, 1 and 2 of a head of 8."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4, "mrope_interleaved": True}
    text = {
        **WORDS,
        **DECODER,
        **EXPERTS,
        "head_dim": 8,
        "rope_parameters": rope,
        "shared_expert_intermediate_size": 16,
    }
    thinker = dict(
        audio_config=dict(d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16, output_dim=32)
        | dict(num_mel_bins=8, downsample_hidden_size=8, max_source_positions=32),
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
        | dict(patch_size=4, deepstack_visual_indexes=[0], num_position_embeddings=16),
        text_config=text,
        **dict(audio_token_id=57, image_token_id=58, video_token_id=59, audio_start_token_id=60, user_token_id=61)
        | dict(vision_start_token_id=62, vision_end_token_id=63, audio_end_token_id=56),
    )
    predictor = {**WORDS, **DECODER, "num_code_groups": 2, "head_dim": 8}
    talker = dict(
        text_config=text,
        code_predictor_config=predictor,
        num_code_groups=2,
        thinker_hidden_size=32,
        accept_hidden_layer=1,
        spatial_merge_size=2,
        **dict(audio_token_id=57, image_token_id=58, video_token_id=59, audio_start_token_id=60)
        | dict(vision_start_token_id=62, codec_nothink_id=3, codec_think_bos_id=4, codec_think_eos_id=5)
        | dict(codec_pad_id=6, codec_bos_id=7, codec_eos_token_id=8, speaker_id={"one": 9}),
    )
    code2wav = dict(codebook_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, decoder_dim=16) | dict(
        num_attention_heads=2, num_key_value_heads=2, num_quantizers=2, upsample_rates=[2], upsampling_ratios=[2]
    )
    special = dict(tts_pad_token_id=50, tts_bos_token_id=51, tts_eos_token_id=52, system_token_id=53) | dict(
        im_start_token_id=54, im_end_token_id=55, user_token_id=61, assistant_token_id=49
    )
    return Qwen3OmniMoeConfig(thinker_config=thinker, talker_config=talker, code2wav_config=code2wav, **special)
