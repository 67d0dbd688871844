"""A function and a number of ranks in, each rank's return value out: helps for tests of code that spans ranks.

`run_ranks(2, check)` starts fresh processes over gloo and a FileStore (no ports), with one thread each and a wall-clock
limit of its own; a rank that raises or hangs fails the test with that rank's traceback. Ranks are forked from a server that has
imported torch, transformers and peft once and done nothing with them: importing them anew costs each rank seconds.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep import dist as ldist
from lockstep.config import DistConfig

_PRELOAD = ["lockstep.testing", "peft", "torch.distributed.fsdp"]


def run_ranks(
    num_ranks: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 90.0, agree_timeout_s: float = 20.0
) -> list[Any]:
    """Run `fn(world, *args)` on every rank; `fn` must be importable (module level). Return values by rank.

    Raises `AssertionError` with the first failing rank's traceback, or naming the ranks that did not finish in `timeout_s`.
    """
    outcomes = collect_ranks(num_ranks, fn, *args, timeout_s=timeout_s, agree_timeout_s=agree_timeout_s)
    failed = [(rank, text) for rank, (ok, text) in enumerate(outcomes) if not ok]
    if failed:
        raise AssertionError("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in failed))
    return [value for _, value in outcomes]


def collect_ranks(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 90.0,
    agree_timeout_s: float = 20.0,
    world_timeout_s: float = 60.0,
) -> list[tuple[bool, Any]]:
    """Like `run_ranks`, but gives (True, value) or (False, traceback text) for each rank, for tests in which ranks fail.

    `world_timeout_s`: the world's own limit, and that of its process groups.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        limits = DistConfig(timeout_s=world_timeout_s, agree_timeout_s=agree_timeout_s)
        common = (str(Path(folder) / "store"), num_ranks, limits, fn, args, results, environment)
        ranks = [context.Process(target=_rank_main, args=(rank, *common), daemon=True) for rank in range(num_ranks)]
        saved = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        for rank in ranks:
            rank.start()
        if saved is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = saved
        return _collect(ranks, results, timeout_s)


def fork_server() -> Any:
    """The multiprocessing context of ranks: whoever uses it first starts the server, so everybody takes it from here."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _collect(ranks: list[Any], results: Any, timeout_s: float) -> list[tuple[bool, Any]]:
    outcomes: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout_s
    while len(outcomes) < len(ranks) and time.monotonic() < deadline:
        try:
            rank, ok, value = results.get(timeout=0.5)
        except queue.Empty:
            if all(not process.is_alive() for process in ranks) and results.empty():
                break
            continue
        outcomes[rank] = (ok, value)
    for rank, process in enumerate(ranks):
        process.join(timeout=5 if rank in outcomes else 0)
        if process.is_alive():
            process.kill()
            process.join()
        state = (
            f"no result within {timeout_s:.0f} s"
            if process.exitcode is None
            else f"process ended with {process.exitcode}"
        )
        outcomes.setdefault(rank, (False, state))
    return [outcomes[rank] for rank in range(len(ranks))]


def _rank_main(
    rank: int,
    store: str,
    size: int,
    limits: DistConfig,
    fn: Any,
    args: Any,
    results: Any,
    environment: dict[str, str] | None = None,
) -> None:
    if environment is not None:  # the process has the server's, of when the first ranks were started
        os.environ.clear()
        os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCKSTEP_STORE=store)
    torch.set_num_threads(1)
    try:
        world = ldist.start("cpu", limits)
        value = fn(world, *args)
        results.put((rank, True, value))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    results.close()
    results.join_thread()
    # Leaving without the interpreter's teardown: gloo's threads sometimes abort there.
    os._exit(0)


def tiny_llama(*, seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """A random Llama of 64 tokens, width 32, 2 layers, 4 heads, 2 kv heads, fp32, untied unless asked."""
    values: dict[str, Any] = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**values, **overrides})).eval()
