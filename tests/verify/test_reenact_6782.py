"""verl #6782 once more, at the push to an engine: the run trains, the engine never sees it. The first step's canary must say so.

There, a merged export was read after the merge had been undone, so the engine got the base's weights at every step; kin of it are
an adapter that is announced and never put in place, and one whose alpha is lost on the way. All transactions here are complete and
their digests right: nothing but what the engine says can tell.
"""

from dataclasses import replace

import pytest
import torch

from helpers_rollout import make_engine
from helpers_sharded import save_model
from helpers_train import make_actor
from helpers_verify import SAMPLING, answer, deliver, make_canary, make_trainer, probe_model
from lockstep.errors import CanaryFailed
from lockstep.export.stream import export_weights
from lockstep.export.what import AdapterExport, FullExport, MergedExport
from lockstep.testing import run_ranks
from lockstep.transport.inproc import push
from lockstep.types import TrainItem


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(probe_model(), tmp_path_factory.mktemp("model"))


class Deaf:
    """Takes an update, answers as it should, and serves what it served before."""

    def __init__(self, engine):
        self.engine, self.version = engine, 0

    def begin(self, manifest):
        self.version = manifest.version

    def receive(self, bucket):
        pass

    def commit(self, digest):
        pass

    def abort(self, reason):
        pass

    def generate(self, *args, **kwargs):
        return [replace(sample, policy_version=self.version) for sample in self.engine.generate(*args, **kwargs)]


def read_after_unmerge(sharded, engine, version):
    """The base's weights travel as the merged ones."""
    with export_weights(sharded, FullExport()) as stream:
        push(stream, engine, replace(stream.manifest(version), kind="merged"))


def alpha_lost(sharded, engine, version):
    with export_weights(sharded, AdapterExport()) as stream:
        manifest = stream.manifest(version)
        config = {**manifest.adapter_config, "lora_alpha": manifest.adapter_config["r"]}
        push(stream, engine, replace(manifest, adapter_config=config))


def rslora_lost(sharded, engine, version):
    with export_weights(sharded, AdapterExport()) as stream:
        manifest = stream.manifest(version)
        push(stream, engine, replace(manifest, adapter_config={**manifest.adapter_config, "use_rslora": True}))


def merged(sharded, engine, version):
    deliver(sharded, engine, version, MergedExport())


FAULTS = {
    "weights read after the merge was undone": (read_after_unmerge, "adapter off"),
    "adapter never delivered": (deliver, "adapter off"),
    "alpha lost": (alpha_lost, "alpha lost"),
    "another scale": (rslora_lost, "scaling alpha/sqrt(r) against alpha/r"),
}


def train_one_step(sharded, engine):
    """A real update at lr 1e-4 on the engine's own samples."""
    canary = make_canary(sharded)
    samples = answer(canary, engine)
    items = [TrainItem(each.prompt.ids, each.ids, each.logprobs, (-1.0) ** each.index, each.slot) for each in samples]
    actor = make_actor(sharded, sharded.world, sampling=SAMPLING, lr=1e-4, packing="packed")
    assert actor.update(items, step=0).grad_norm > 0


def check_faults(world, folder):
    said = {}
    for fault, (send, _) in FAULTS.items():
        sharded = make_trainer(world, folder)
        engine = make_engine(probe_model(), eos_ids=())
        healthy = make_engine(probe_model(), eos_ids=())
        if "never" in fault:
            engine = Deaf(engine)
        canary, other = make_canary(sharded), make_canary(sharded)
        first = merged if send is read_after_unmerge else deliver
        for receiver, watch in ((engine, canary), (healthy, other)):
            first(sharded, receiver, 0)
            watch.check(answer(watch, receiver), version=0)
        train_one_step(sharded, healthy)
        send(sharded, engine, 1)
        with pytest.raises(CanaryFailed) as caught:
            canary.check(answer(canary, engine), version=1)
        said[fault] = str(caught.value)
        # The same step, delivered as it should be.
        first(sharded, healthy, 1)
        other.check(answer(other, healthy), version=1)
    return said


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_step_stops_the_run_with_the_right_diagnosis(folder, ranks):
    for said in run_ranks(ranks, check_faults, folder):
        for fault, (_, expected) in FAULTS.items():
            assert said[fault].startswith("canary at version 1: "), said[fault]
            assert f"Best explanation: {expected}" in said[fault], (fault, said[fault])


def check_bf16(world, folder):
    """In 16 bits, with the noise of a merge on top: what the engine lacks is a whole step of 1e-2 here."""
    sharded = make_trainer(world, folder, dtype=torch.bfloat16)
    engine, canary = (
        make_engine(probe_model().to(torch.bfloat16), eos_ids=()),
        make_canary(sharded, dtypes=("bfloat16",) * 2),
    )
    merged(sharded, engine, 0)
    canary.check(answer(canary, engine), version=0)
    actor = make_actor(sharded, world, sampling=SAMPLING, lr=1e-2, packing="packed")
    items = [
        TrainItem(each.prompt.ids, each.ids, each.logprobs, (-1.0) ** each.index, 0) for each in answer(canary, engine)
    ]
    actor.update(items, step=0)
    read_after_unmerge(sharded, engine, 1)
    with pytest.raises(CanaryFailed) as caught:
        canary.check(answer(canary, engine), version=1)
    merged(sharded, engine, 1)
    canary.check(answer(canary, engine), version=1)
    return str(caught.value)


def test_in_bf16_too(folder):
    (said,) = run_ranks(1, check_bf16, folder)
    assert "Best explanation: adapter off" in said
