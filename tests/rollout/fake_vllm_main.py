"""Run as `python fake_vllm_main.py -m vllm.entrypoints.openai.api_server --port N ...`: a fake vLLM as a process."""

import argparse
import os
import signal
import sys
import threading

from fake_vllm import FakeVllm

from helpers_engines import sharp
from lockstep.testing_engines.model import ServedModel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--enable-lora", action="store_true")
    args, others = parser.parse_known_args()
    server = FakeVllm(ServedModel(sharp()), token=os.environ.get("VLLM_API_KEY"), port=args.port)
    server.flags.has_lora = args.enable_lora
    server.flags.has_dev_mode = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    server.flags.has_scale_out = "--enable-scale-out" in others
    server.flags.has_extension = "lockstep.rollout.vllm_worker.LockstepWorker" in others
    server.model.traps.raw_logprobs = "processed_logprobs" not in others
    print("ready to serve", file=sys.stderr, flush=True)
    with server:
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
        ended.wait()


if __name__ == "__main__":
    main()
