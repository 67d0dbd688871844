"""Run as `python fake_sglang_main.py -m sglang.launch_server --port N ...`: a fake SGLang as a process of its own."""

import argparse
import signal
import sys
import threading
from pathlib import Path

import yaml
from fake_sglang import FakeSglang

from lockstep.testing import tiny_llama
from lockstep.testing_engines.model import ServedModel


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("-m", "--model-path", "--host", "--dtype", "--max-lora-rank", "--lora-target-modules", "--config"):
        parser.add_argument(name)
    parser.add_argument("--port", type=int)
    for name in ("--enable-deterministic-inference", "--enable-lora"):
        parser.add_argument(name, action="store_true")
    args = parser.parse_args()
    token = yaml.safe_load(Path(args.config).read_text())["api-key"] if args.config else None
    server = FakeSglang(ServedModel(tiny_llama()), token=token, port=args.port)
    server.server_info["enable_deterministic_inference"] = args.enable_deterministic_inference
    server.server_info["enable_lora"] = args.enable_lora
    print("ready to serve", file=sys.stderr, flush=True)
    with server:
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
        ended.wait()


if __name__ == "__main__":
    main()
