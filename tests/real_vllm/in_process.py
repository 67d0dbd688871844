"""Run by the Python that has vLLM: a folder with updates in, what the engine in this process samples after each out (JSON)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from safetensors.torch import load_file

from lockstep.rollout.vllm import VllmEngine
from lockstep.rollout.vllm_fleet import Fleet
from lockstep.rollout.vllm_local import LocalReplica
from lockstep.transport.inproc import push
from lockstep.types import Bucket, Draw, Manifest, Prompt, Sampling, TensorSpec


def main(model: Path, folder: Path) -> None:
    order = json.loads((folder / "order.json").read_text())
    prompts = [Prompt(str(index), tuple(ids), "", "") for index, ids in enumerate(order["prompts"])]
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "")
    engine = VllmEngine(Fleet([LocalReplica(model, max_model_len=512)]), tokenizer=tokenizer, eos_ids=())
    results = []
    for version, kind in enumerate(("adapter", "merged"), start=1):
        tensors = load_file(folder / f"{kind}.safetensors")
        specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
        manifest = Manifest(version, kind, specs, order["config"] if kind == "adapter" else None)
        push([Bucket(tuple(tensors.items()))], engine, manifest)
        samples = engine.generate(prompts, Sampling(max_new_tokens=8), num_samples=2, draw=Draw(1, 1))
        results.append([[sample.slot, sample.ids, sample.logprobs, sample.policy_version] for sample in samples])
    engine.close()
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
