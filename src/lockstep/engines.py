"""A config and this rank's `World` in, the rollout engine that the recipe names, started and healthy, out.

*hf* is in this process, one per rank. *vllm* and *sglang* are shared: rank 0 starts them (or connects to running ones), and the
other ranks connect by its handle.
"""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from lockstep import dist
from lockstep.config import Config
from lockstep.dist import World, all_or_none
from lockstep.errors import ConfigError
from lockstep.model.load import ModelFiles, load_whole
from lockstep.model.lora import largest_rank
from lockstep.rollout.base import Engine, SharedEngine
from lockstep.rollout.hf import HFEngine, resolve_eos_ids
from lockstep.rollout.sglang import SglangEngine
from lockstep.rollout.sglang_api import check_distribution
from lockstep.rollout.sglang_server import SglangServer
from lockstep.rollout.vllm import VllmEngine
from lockstep.rollout.vllm_fleet import Fleet
from lockstep.rollout.vllm_server import VllmServer
from lockstep.types import Sampling

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Connect = Callable[[Mapping[str, Any]], SharedEngine]
"""A shared engine's handle in, this rank's view of it out."""

DEFAULT_PYTHON = {"vllm": ".venv-vllm/bin/python", "sglang": ".venv-sglang/bin/python"}


def start_engine(
    config: Config, files: ModelFiles, tokenizer: PreTrainedTokenizerBase, world: World
) -> tuple[Engine, Connect | None]:
    """Collective. The engine, serving the checkpoint's own weights, and for a shared one how to connect to it again."""
    if config.rollout.engine == "hf":
        with all_or_none(world, "loading the engine"):
            return embedded_engine(config, files, tokenizer, world), None
    make = {"vllm": _Vllm, "sglang": _Sglang}[config.rollout.engine](config, files, tokenizer)
    engine: SharedEngine | None = None
    with all_or_none(world, "starting the engine"):
        if world.is_main:
            engine = make.start()
    try:
        text = json.dumps(engine.handle()) if engine is not None and world.size > 1 else ""
        handle = dist.gather_texts(world, text, phase="engine's handle")[0]
        with all_or_none(world, "connecting to the engine"):
            if engine is None:
                engine = make.connect(json.loads(handle))
    except BaseException:
        if engine is not None:
            engine.close()
        raise
    assert engine is not None
    return engine, make.connect


def embedded_engine(config: Config, files: ModelFiles, tokenizer: PreTrainedTokenizerBase, world: World) -> HFEngine:
    """transformers in this process, with weights of its own: the checkpoint's. Not collective."""
    # flex_attention compiles for every length, and a decode step has one more token than the last.
    attention = "sdpa" if config.model.attention == "flex_attention" else config.model.attention
    model = load_whole(files, dtype=DTYPES[engine_dtype(config)], attention=attention, device=world.device)
    return HFEngine(
        model,
        tokenizer=tokenizer,
        eos_ids=resolve_eos_ids(tokenizer, model.config, model.generation_config, config.rollout.stop_token_ids),
        device=world.device,
        cache_tokens=config.rollout.batch_tokens,
    )


def engine_dtype(config: Config) -> str:
    """What the engine's weights are in, by the recipe."""
    return config.model.dtype if config.engine.dtype == "model" else config.engine.dtype


def make_sampling(config: Config, eos_ids: tuple[int, ...]) -> Sampling:
    """What training samples are drawn from."""
    rollout = config.rollout
    return Sampling(float(rollout.temperature), rollout.top_p, rollout.top_k, rollout.max_new_tokens, eos_ids)


class _Shared:
    """What servers have in common: where they are, how they are reached, what ends a completion."""

    name: Literal["vllm", "sglang"]

    def __init__(self, config: Config, files: ModelFiles, tokenizer: PreTrainedTokenizerBase):
        self.config, self.files, self.tokenizer = config, files, tokenizer
        generation = GenerationConfig.from_pretrained(files.path) if _has_generation_config(files) else None
        self.eos_ids = resolve_eos_ids(tokenizer, files.config, generation, config.rollout.stop_token_ids)
        self.token = os.environ.get(config.engine.token_env) or None
        self.folder = Path(config.run.dir).absolute() / "engine"

    @property
    def python(self) -> Path:
        python = Path(self.config.engine.python or DEFAULT_PYTHON[self.name]).expanduser().absolute()
        if not python.is_file():
            made = ", made by `make vllm-env`" if self.name == "vllm" else ""
            raise ConfigError(
                f"engine.python: {str(python)!r} does not exist; give the Python of an environment that has {self.name}{made}, "
                "or engine.url of a server that runs"
            )
        return python

    @property
    def lora_rank(self) -> int | None:
        """What the server has to take; None: no adapters, which makes it faster."""
        if self.config.sync.mode == "merged":
            return None
        start = self.config.lora.init_from
        return largest_rank(Path(start)) if start else self.config.lora.rank

    @property
    def transport(self) -> Literal["shm", "disk", "collective"]:
        asked = self.config.sync.transport
        if asked != "auto":
            return asked
        return "shm" if all(_is_here(url) for url in self.config.engine.url) else "collective"


class _Vllm(_Shared):
    name = "vllm"

    def start(self) -> VllmEngine:
        engine = self.config.engine
        if engine.url:
            fleet = Fleet.connect(engine.url, model=None, token=self.token, request_timeout_s=engine.request_timeout_s)
        else:
            fleet = Fleet.start(self._server(), engine.replicas)
        return VllmEngine(
            fleet,
            tokenizer=self.tokenizer,
            eos_ids=self.eos_ids,
            on_update=engine.on_update,
            transport=self.transport,
            folder=self.folder / "updates",
            host=self.config.sync.host,
            request_timeout_s=engine.request_timeout_s,
        )

    def _server(self) -> VllmServer:
        engine = self.config.engine
        return VllmServer(
            python=self.python,
            model=self.files.path,
            log_path=self.folder / "vllm.log",
            dtype=engine_dtype(self.config),
            max_lora_rank=self.lora_rank,
            host=engine.host,
            token=self.token,
            start_timeout_s=engine.start_timeout_s,
            request_timeout_s=engine.request_timeout_s,
            max_restarts=engine.max_restarts,
            args=engine.args,
        )

    def connect(self, handle: Mapping[str, Any]) -> VllmEngine:
        return VllmEngine.attach(handle, tokenizer=self.tokenizer)


class _Sglang(_Shared):
    name = "sglang"

    def start(self) -> SglangEngine:
        engine = self.config.engine
        if engine.replicas > 1 or len(engine.url) > 1:
            raise ConfigError(
                "rollout.engine sglang takes one server; set engine.replicas to 1 (or give one engine.url)"
            )
        if engine.on_update == "pause":
            raise ConfigError("engine.on_update pause is vLLM's; with rollout.engine sglang leave it at drain")
        if self.config.sync.transport not in ("auto", "disk"):
            raise ConfigError(
                "rollout.engine sglang reads updates from files: leave sync.transport at auto, or say disk"
            )
        check_distribution(make_sampling(self.config, self.eos_ids))
        # Not `positions_of`: the server, unless told its context length, adds nothing for YaRN.
        max_len = getattr(self.files.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if engine.url:
            return SglangEngine.connect(
                engine.url[0],
                token=self.token,
                tokenizer=self.tokenizer,
                eos_ids=self.eos_ids,
                dtype=engine_dtype(self.config),
                folder=self.folder / "updates",
                model_path=self.files.path,
                request_timeout_s=engine.request_timeout_s,
                model_max_len=max_len,
            )
        server = SglangServer(
            python=self.python,
            model=self.files.path,
            run_dir=self.folder,
            dtype=engine_dtype(self.config),
            max_lora_rank=self.lora_rank,
            model_max_len=max_len,
            host=engine.host,
            token=self.token,
            start_timeout_s=engine.start_timeout_s,
            request_timeout_s=engine.request_timeout_s,
            max_restarts=engine.max_restarts,
            args=engine.args,
        )
        return SglangEngine.start(server, tokenizer=self.tokenizer, eos_ids=self.eos_ids)

    def connect(self, handle: Mapping[str, Any]) -> SglangEngine:
        return SglangEngine.attach(handle, tokenizer=self.tokenizer, eos_ids=self.eos_ids)


def _has_generation_config(files: ModelFiles) -> bool:
    return (files.path / "generation_config.json").is_file()


def _is_here(url: str) -> bool:
    """Is it a server of this host, as far as its address says?"""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
