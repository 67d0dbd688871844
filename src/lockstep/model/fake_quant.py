"""A model in, the modules of it that imitate quantised weights (quantisation-aware training) out, and why LoRA is not trained so.

In the forward pass such a module rounds the base weight, and PEFT adds the adapter behind it: base and adapter are rounded
apart, or the adapter not at all. Neither a merged weight nor the adapter on the plain base computes what was trained.
"""

from __future__ import annotations

from torch import nn

from lockstep.names import clean_name, is_adapter_name


def fake_quantizers(model: nn.Module) -> list[str]:
    """Clean names of the modules that round in the forward pass to imitate a quantised weight (torch.ao, torchao)."""
    found = []
    for name, module in model.named_modules():
        kinds = [cls.__name__ for cls in type(module).__mro__]
        children = [child for child in module._modules if "fake_quant" in child]
        if (
            children
            or any(kind.startswith("FakeQuantize") for kind in kinds)
            or hasattr(type(module), "weight_fake_quant")
        ):
            found.append(clean_name(name))
    return found


def why_not_lora(model: nn.Module) -> str:
    """Why this model's adapter can be neither trained nor exported here; "" if it can, or if there is none."""
    adapter = next((name for name, _ in model.named_parameters() if is_adapter_name(name)), None)
    names = fake_quantizers(model) if adapter is not None else []
    if not names:
        return ""
    return (
        f"{names[0] or 'the model'} fake-quantises weights (quantisation-aware training; {len(names)} such modules) and "
        f"{adapter and clean_name(adapter)} is an adapter: the forward rounds the base and not what the adapter adds, so that neither a "
        "merged weight nor the adapter on the plain base is what was trained. Train the adapter without QAT, or QAT without an adapter"
    )
