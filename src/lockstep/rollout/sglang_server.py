"""A Python that has SGLang and a model folder in; the process of an SGLang server that is ready for rollouts out."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from lockstep.rollout.http import HttpClient
from lockstep.rollout.process import EngineProcess, check_exposure, engine_env

_ENV_WITHOUT = ("SGLANG_RETURN_ORIGINAL_LOGPROB", "RETURN_ORIGINAL_LOGPROB")
"""Never passed on: with them the logprobs leave the temperature out."""
_HEALTH_S = 30.0


@dataclass(frozen=True, slots=True)
class SglangServer:
    """How to start a server."""

    python: Path
    """Interpreter of an environment with SGLang."""
    model: Path
    """Folder of the checkpoint."""
    run_dir: Path
    """Where its log, its key and staged updates go."""
    dtype: str = "bfloat16"
    max_lora_rank: int | None = None
    """Largest rank of an adapter, for adapter updates only; None starts it for whole weights only."""
    model_max_len: int | None = None
    """Positions that the model has."""
    host: str = "127.0.0.1"
    token: str | None = None
    """Required of every request; needed where `host` is not loopback."""
    start_timeout_s: float = 900.0
    request_timeout_s: float = 600.0
    max_restarts: int = 2
    args: tuple[str, ...] = ()
    """Further arguments for SGLang; they come last, so they win."""

    def command(self, port: int) -> list[str]:
        """The arguments. Deterministic inference makes `sampling_seed` count, which names a row's draws."""
        lora = ["--enable-lora", "--max-lora-rank", str(self.max_lora_rank), "--lora-target-modules", "all"]
        return [
            *(str(self.python), "-m", "sglang.launch_server", "--model-path", str(self.model)),
            *("--host", self.host, "--port", str(port), "--dtype", self.dtype, "--enable-deterministic-inference"),
            *(() if self.max_lora_rank is None else lora),
            *(() if self.token is None else ("--config", str(self._key_file))),
            *self.args,
        ]

    def start(self) -> EngineProcess:
        """Start it and wait until it generates.

        Raises `ConfigError` for a server that others can reach without a token, `EngineDied` with its last words, or
        `EngineUnhealthy` after `start_timeout_s`.
        """
        check_exposure(self.host, self.token)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if self.token is not None:
            self._write_key(self.token)
        env = {name: value for name, value in engine_env().items() if name not in _ENV_WITHOUT}
        process = EngineProcess(
            self.command,
            log_path=self.run_dir / "sglang.log",
            env=env,
            host=self.host,
            max_restarts=self.max_restarts,
        )
        process.start_healthy(lambda: self.check(process), self.start_timeout_s)
        return process

    def restart(self, process: EngineProcess) -> None:
        """Again, with the checkpoint's own weights. Raises `EngineDied` at the limit of restarts."""
        process.restart(lambda: self.check(process), self.start_timeout_s)

    def client(self, process: EngineProcess) -> HttpClient:
        """A client of the server as it runs now."""
        return HttpClient(process.url, token=self.token, timeout_s=self.request_timeout_s, died=process.died)

    def check(self, process: EngineProcess) -> None:
        """Raises `EngineUnhealthy` unless the server generates a token."""
        client = self.client(process)
        try:
            client.get("/health_generate", timeout_s=_HEALTH_S)
        finally:
            client.close()

    @property
    def _key_file(self) -> Path:
        return self.run_dir / "sglang.yaml"

    def _write_key(self, token: str) -> None:
        """The key goes in by a configuration file, since every user of the host can read a command line."""
        with open(os.open(self._key_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(f"api-key: {json.dumps(token)}\n")
