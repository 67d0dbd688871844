"""A recipe's engine: which transport, which Python, what is refused before anything is started."""

import pytest

from helpers_loop import make_model_folder, recipe
from lockstep import dist
from lockstep.config import build_config
from lockstep.engines import _Sglang, _Vllm, start_engine
from lockstep.errors import ConfigError, EngineMismatch
from lockstep.model.load import find_model, load_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def parts(model):
    files = find_model(str(model))
    return files, load_tokenizer(files)


def made(model, tmp_path, parts, kind=_Vllm, **sections):
    return kind(build_config(recipe(model, tmp_path / "run", **sections)), *parts)


@pytest.mark.parametrize(
    ("urls", "asked", "transport"),
    [
        ([], "auto", "shm"),
        (["http://127.0.0.1:8000", "http://localhost:8001"], "auto", "shm"),
        (["http://[::1]:8000"], "auto", "shm"),
        (["http://127.0.0.1:8000", "http://10.0.0.7:8000"], "auto", "collective"),
        (["http://gpu-box:8000"], "auto", "collective"),
        (["http://gpu-box:8000"], "disk", "disk"),
    ],
)
def test_shared_memory_only_where_the_server_is_on_this_host(model, tmp_path, parts, urls, asked, transport):
    engine = made(model, tmp_path, parts, engine={"url": urls}, sync={"transport": asked})
    assert engine.transport == transport


def test_a_server_is_started_for_adapters_only_where_they_are_sent(model, tmp_path, parts):
    assert made(model, tmp_path, parts, sync={"mode": "merged"}).lora_rank is None
    for mode in ("adapter", "auto"):
        assert made(model, tmp_path, parts, sync={"mode": mode}, lora={"rank": 5}).lora_rank == 5


def test_a_missing_environment_is_named_with_what_makes_it(model, tmp_path, parts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"\.venv-vllm/bin/python' does not exist.*make vllm-env"):
        _ = made(model, tmp_path, parts).python
    world = dist.start("cpu", build_config(recipe(model, tmp_path / "run")).dist)
    try:
        config = build_config(recipe(model, tmp_path / "run", rollout={"engine": "vllm"}))
        with pytest.raises(ConfigError, match="does not exist"):
            start_engine(config, *parts, world)
    finally:
        dist.stop(world)


@pytest.mark.parametrize(
    ("sections", "error", "said"),
    [
        ({"engine": {"replicas": 2}}, ConfigError, "takes one server"),
        ({"engine": {"on_update": "pause"}}, ConfigError, "on_update pause is vLLM's"),
        ({"sync": {"transport": "shm"}}, ConfigError, "reads updates from files"),
        ({"rollout": {"top_p": 0.9}}, EngineMismatch, "top"),
    ],
)
def test_what_sglang_cannot_do_is_refused_before_it_is_started(model, tmp_path, parts, sections, error, said):
    with pytest.raises(error, match=said):
        made(model, tmp_path, parts, _Sglang, **sections).start()


def test_the_token_comes_from_the_environment_and_an_empty_one_is_none(model, tmp_path, parts, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_ENGINE_TOKEN", "")
    assert made(model, tmp_path, parts).token is None
    monkeypatch.setenv("MY_TOKEN", "secret")
    assert made(model, tmp_path, parts, engine={"token_env": "MY_TOKEN"}).token == "secret"
