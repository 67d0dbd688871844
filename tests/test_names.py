"""Live names become checkpoint names by segment: wrappers anywhere, PEFT's segments, and nothing else."""

import pytest
from peft import LoraConfig, get_peft_model

from lockstep.names import checkpoint_name, clean_name, is_adapter_name
from lockstep.testing import tiny_llama


@pytest.mark.parametrize(
    ("live", "clean"),
    [
        ("_orig_mod.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0._checkpoint_wrapped_module.mlp._orig_mod.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp.weight", "model.layers.0.mlp.weight"),
        ("module.model.module.weight", "module.model.module.weight"),  # a user's module may be called module
        ("my_orig_mod.weight", "my_orig_mod.weight"),
    ],
)
def test_wrapper_segments_go_wherever_they_stand(live, clean):
    assert clean_name(live) == clean


def test_the_image_of_the_live_names_is_the_checkpoint():
    plain = tiny_llama(attention_bias=True)
    wanted = set(plain.state_dict())
    model = get_peft_model(plain, LoraConfig(target_modules="all-linear", r=2))
    names = [name for name, _ in model.named_parameters()]
    assert {checkpoint_name(name) for name in names if not is_adapter_name(name)} == wanted
    assert sum(map(is_adapter_name, names)) == 2 * 7 * 2
    with pytest.raises(ValueError, match="adapter tensor"):
        checkpoint_name(next(name for name in names if is_adapter_name(name)))
