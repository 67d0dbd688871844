"""Episodes: what becomes of a sample's tokens turn by turn, how they end, what goes wrong by name, and the same on two ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from helpers_data import tiny_tokenizer
from helpers_environments import CLOSED, Scripted, Session, make_episodes, make_prompts, make_stage
from helpers_rollout import plain_logprobs, sharp_llama
from lockstep.data.prompts import Prompt
from lockstep.dist import World
from lockstep.episodes import Episodes
from lockstep.errors import ConfigError, EpisodeError, LockstepError, StaleWeights
from lockstep.rollout.hf import HFEngine
from lockstep.testing import run_ranks
from lockstep.types import Draw, Sample, Sampling

SAMPLING = Sampling(max_new_tokens=4)
DRAW = Draw(seed=3, step=7, first_slot=2)


def words(ids) -> str:
    return tiny_tokenizer().decode(list(ids))


def play(name: str, say=None, *, num: int = 1, num_samples: int = 1, **options: Any) -> tuple[list[Sample], Scripted]:
    policy = Scripted(say or (lambda ids, slot, index, turn: (f"{slot} {index}", "stop")))
    episodes = make_episodes(name, policy, **options)
    return episodes(make_prompts(num), SAMPLING, num_samples=num_samples, draw=DRAW), policy


def test_a_sample_is_replies_and_observations_behind_each_other():
    (sample,), policy = play("Counting", args={"turns": 2})
    assert words(sample.ids) == "2 0 </s> <user> a 2 b </s> <assistant> 2 0 </s>"
    mask = [True] * 3 + [False] * 6 + [True] * 3
    assert list(sample.loss_mask) == mask and sample.num_sampled == 6
    assert sample.logprobs == (-0.1, -0.2, pytest.approx(-0.3), *(0.0,) * 6, -0.1, -0.2, pytest.approx(-0.3))
    assert sample.text == tiny_tokenizer().decode(list(sample.ids), skip_special_tokens=True)
    assert (sample.finish, sample.policy_version, sample.prompt) == ("stop", 5, make_prompts(1)[0])
    episode = sample.episode
    assert [message["role"] for message in episode.messages] == ["assistant", "user", "assistant"]
    assert (episode.rewards, episode.ended, episode.reply) == ((1.0, 1.0), "done", "2 0")
    assert episode.info == ({"numbers": 2}, {"numbers": 2})
    # The second turn goes on from exactly these ids, as (slot, index) of turn 1.
    assert policy.calls == [(1, DRAW), (1, Draw(3, 7, 2, turn=1, rows=((2, 0),)))]


def test_what_the_policy_sampled_is_not_tokenised_again():
    """Ids that no tokenizer would give for their text: two kinds of unknown, and a closing token in the middle."""
    odd = (3, 3, 8, 3, 1)
    seen: list[tuple[int, ...]] = []

    class Odd(Scripted):
        def __call__(self, prompts, sampling, *, num_samples, draw):
            seen.extend(prompt.ids for prompt in prompts)
            made = super().__call__(prompts, sampling, num_samples=num_samples, draw=draw)
            return [
                Sample(s.prompt, s.slot, s.index, odd, (-1.0,) * 5, "? ? 0 ?", "stop", s.policy_version) for s in made
            ]

    episodes = make_episodes("Counting", Odd(lambda *_: ("0", "stop")), args={"turns": 2})
    prompt = make_prompts(1)[0]
    (sample,) = episodes([prompt], SAMPLING, num_samples=1, draw=DRAW)
    assert sample.ids[:5] == odd == sample.ids[-5:]
    assert seen == [prompt.ids, (*prompt.ids, *sample.ids[:-5])]


def test_samples_end_by_themselves_and_the_others_go_on_in_one_call():
    """Slot 2: cut in turn 0. Slot 3: sample 1 is cut in turn 1."""

    def say(ids, slot, index, turn):
        return "4", "length" if (slot, turn) == (2, 0) or (slot, index, turn) == (3, 1, 1) else "stop"

    samples, policy = play("Counting", say, num=2, num_samples=2)
    assert [(each.slot, each.index, each.episode.ended) for each in samples] == [
        (2, 0, "cut"), (2, 1, "cut"), (3, 0, "done"), (3, 1, "cut"),
    ]  # fmt: skip
    assert [each.finish for each in samples] == ["length", "length", "stop", "length"]
    assert [len(each.episode.rewards) for each in samples] == [1, 1, 3, 2]
    assert [(count, draw.turn, draw.rows) for count, draw in policy.calls] == [
        (2, 0, ()), (2, 1, ((3, 0), (3, 1))), (1, 2, ((3, 0),)),
    ]  # fmt: skip
    assert all(each.loss_mask[-1] for each in samples)  # nothing behind the last reply


def test_the_recipe_and_the_room_end_an_episode():
    (sample,), policy = play("Counting", max_turns=2)
    assert (sample.episode.ended, sample.finish, len(policy.calls)) == ("max_turns", "stop", 2)
    prompt, turn, seen = len(make_prompts(1)[0].ids), 3, 6
    for limit, turns in ((prompt + turn + seen + 4, 2), (prompt + turn + seen + 3, 1)):
        for options in ({"max_tokens": limit}, {"max_len": limit}, {"max_tokens": 1000, "max_len": limit}):
            (sample,), policy = play("Counting", **options)
            assert (sample.episode.ended, sample.finish) == ("room", "length")
            assert len(policy.calls) == len(sample.episode.rewards) == turns
            assert len(sample.prompt.ids) + len(sample.ids) <= limit and sample.loss_mask[-1]


def test_an_observation_is_cut_and_the_sample_shows_what_was_read():
    (sample,), _ = play("Counting", args={"turns": 2}, max_observation_tokens=5)
    assert sample.episode.messages[1] == {"role": "user", "content": "a 2..."}
    assert sample.loss_mask.count(False) == 5


def test_any_class_with_a_step_will_do_also_an_asynchronous_one():
    samples, _ = play("Bare", num=2)
    assert [each.episode.rewards for each in samples] == [(0.5,), (0.5,)]


def test_what_reset_made_lives_in_its_loop_until_close():
    Session.ended = 0
    policy = Scripted(lambda *_: ("1", "stop"))
    episodes = make_episodes("Session", policy)
    for step in (1, 2):
        samples = episodes(make_prompts(2), SAMPLING, num_samples=2, draw=Draw(3, step, 0))
        assert [[info["same"] for info in sample.episode.info] for sample in samples] == [[True] * 3] * 4
        assert [info["said"] for info in samples[3].episode.info] == ["0", "1", "2"]
    assert Session.ended == 8
    episodes.close()


def test_what_an_environment_does_to_its_messages_later_is_not_in_the_sample():
    (sample,), _ = play("Rewrites")
    assert [message["content"] for message in sample.episode.messages[1::2]] == ["a 0", "a 1"]
    assert [info["seen"] for info in sample.episode.info] == [[0], [0, 1], [0, 1, 2]]


def test_words_that_are_said_back_cannot_speak_as_the_policy():
    """Ids and mask are those of a naive concatenation, in which only the template's own tokens close a turn."""
    (sample,), _ = play("Echoes", lambda ids, slot, index, turn: ("a 5 b", "stop"))
    said = "<user> a 5 b <unk> <unk> <user> <unk> <unk> <assistant> 7 </s> <assistant>"
    observation = tuple(tiny_tokenizer()(said)["input_ids"])
    reply = (*tiny_tokenizer()("a 5 b")["input_ids"], 1)
    assert words(observation) == said
    assert sample.ids == (*reply, *observation) * 2 + reply
    assert list(sample.loss_mask) == ([True] * 4 + [False] * len(observation)) * 2 + [True] * 4


def test_prompts_without_room_behind_them_are_refused_or_told(caplog):
    """A prompt of 7 tokens; a short reply and an observation take 4 at least, another reply up to 4."""
    prompts = make_prompts(3)
    longer = replace(prompts[0], ids=(*prompts[0].ids, 9, 9))
    assert {len(prompt.ids) for prompt in prompts} == {7}
    key = {"key": "rollout.max_new_tokens", "max_new_tokens": 4}
    make_stage("Counting", max_tokens=9).check_room(prompts, **key)  # its reset might open with less
    with pytest.raises(
        ConfigError, match=r"max_tokens is 8, and whatever a prompt is it takes 9 .*an observation and a reply"
    ):
        make_stage("Counting", max_tokens=8).check_room(prompts, **key)
    make_stage("Bare", max_tokens=15).check_room(prompts, **key)
    with pytest.raises(ConfigError, match=r"max_tokens is 14, and behind the shortest prompt \(7 tokens\) it takes 15"):
        make_stage("Bare", max_tokens=14).check_room([longer, *prompts], **key)
    make_stage("Bare", max_tokens=11, max_turns=1).check_room(prompts, **key)
    with pytest.raises(ConfigError, match=r"it takes 11 to be sure of a reply \(rollout.max_new_tokens 4\): raise it"):
        make_stage("Bare", max_tokens=10, max_turns=1).check_room(prompts, **key)
    assert not caplog.records
    make_stage("Bare", max_tokens=15).check_room([longer, *prompts], **key)
    assert "1 of 4 prompts leave no room in environment.max_tokens 15 for a short reply, an" in caplog.text
    caplog.clear()
    policy = Scripted(lambda *_: ("1", "stop"))
    for limits in ({"max_tokens": 15}, {"max_len": 15}):
        episodes = make_episodes("Counting", policy, **limits)
        for _ in range(2):
            samples = episodes([longer, *prompts], SAMPLING, num_samples=1, draw=DRAW)
        assert samples[0].episode.ended == "room"
        (record,) = caplog.records
        assert record.getMessage().startswith("1 of 4 openings of a step leave no room for 8 tokens behind them")
        assert record.getMessage().endswith("train-0 has 9 tokens")
        caplog.clear()


def test_every_environment_is_closed():
    CLOSED.clear()
    play("Counting", num=2, num_samples=3)
    assert len(CLOSED) == 6 == len(set(map(id, CLOSED)))


def test_reset_may_open_the_conversation_with_a_seed_that_the_group_shares():
    samples, _ = play("Opens", num=2, num_samples=2)
    seeds = [each.episode.info[0]["seed"] for each in samples]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert words(samples[0].prompt.ids) == f"<system> s </s> <user> w {seeds[0] % 7} ? </s> <assistant>"
    assert samples[0].prompt == samples[1].prompt and samples[0].prompt.uid == "train-0"
    policy = Scripted(lambda *_: ("1", "stop"))
    other = make_episodes("Opens", policy)(make_prompts(1), SAMPLING, num_samples=1, draw=Draw(3, 8, 2))
    assert other[0].episode.info[0]["seed"] != seeds[0]


def test_openings_that_differ_within_a_group_or_are_too_long_are_refused():
    with pytest.raises(EpisodeError, match=r"reset gave sample 1 of a group other messages than sample 0"):
        play("Opens", num_samples=2, args={"odd": True})
    stage = make_stage("Opens")
    short = Episodes(
        type(stage)(stage.config, stage.kind, stage.observations, stage.tokenizer, stage.prompt.model_copy(update={"max_tokens": 3})),
        Scripted(lambda *_: ("1", "stop")), world=World(), max_len=None,
    )  # fmt: skip
    with pytest.raises(
        EpisodeError, match=r"reset: its messages are no prompt: train-0: they have 9 tokens, .* is 3; raise"
    ):
        short(make_prompts(1), SAMPLING, num_samples=1, draw=DRAW)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", r"step raised ZeroDivisionError: the tool broke"),
        ("exit", r"step raised SystemExit: 0"),
        ("none", r"step: expected a lockstep.environments.Turn; None came"),
        ("nan", r"step: expected a finite number as the turn's reward; nan came"),
        ("silent", r"step: expected a list of at least one message; \(\) came"),
        ("done", r"step: expected True or False as the turn's done; 'no' came"),
        ("uncopied", r"step: messages of plain values are expected; \[\{'role'.*lock.* came"),
        ("name", r"half of a surrogate pair.*'\\ud83d' came"),
        (
            "cycle",
            r"step: messages of plain values are expected; \[\{'role': 'user', 'content': 'a', 'self': \{\.\.\.\}\}\] came",
        ),
        ("words", r"step raised ValueError: \ud83d"),
        ("unsayable", r"step raised Unsayable: \(its message cannot be read: ZeroDivisionError\)"),
        ("base", "step raised CancelledError"),
        ("long", r"step raised ValueError: x{588}\.\.\. \(999412 more characters\)"),
        ("text", r"step: expected a list of at least one message; 'hello' came"),
        ("huge", r"expected a finite number as the turn's reward; 1000+ came"),
        ("info", "expected a mapping as the turn's info; None came"),
        ("surrogate", r"half of a surrogate pair, which no tokenizer takes .* 'a \\ud83d' came"),
        ("shape", r"a message must be .*; \{'role': 'user', 'text': 'hello'\} came"),
    ],
)
def test_what_goes_wrong_is_told_with_the_episode(how, said):
    with pytest.raises(EpisodeError, match=said) as caught:
        play("Broken", args={"how": how}, num_samples=2)
    told = str(caught.value)
    assert "environment 'helpers_environments:Broken'" in told and "(slot 2, sample 0)" in told
    assert "prompt train-0: '<user> 0 + 1 ? </s> <assistant>'" in told
    assert "\n  assistant: '2 0'\n  user: 'a 1'\n  assistant: '2 0'" in told


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("init", "reset raised OSError: no room"),
        ("reset", "reset raised KeyError: 'question'"),
        ("opening", "reset: expected a list of at least one message; 'hello' came"),
        ("close", "close raised OSError: still busy"),
    ],
)
def test_beginning_and_end_can_go_wrong_too(how, said):
    with pytest.raises(EpisodeError, match=said):
        play("Broken", args={"how": how})


def test_what_an_environment_does_to_its_row_and_arguments_is_its_own():
    given: list[str] = []
    samples, _ = play("Spends", args={"words": given}, num=2, num_samples=2)
    assert [sample.episode.info[0]["words"] for sample in samples] == [["0"], ["0"], ["1"], ["1"]]
    assert all(sample.prompt.row["answer"] for sample in samples) and not given


def test_an_environment_that_hangs_stops_the_run():
    began = time.monotonic()
    with pytest.raises(
        EpisodeError, match=r"step took longer than environment.timeout_s 0.3 s for 1 samples.*\n.*\n.*assistant"
    ):
        play("Broken", args={"how": "hang"}, timeout_s=0.3)
    assert time.monotonic() - began < 5


def test_turns_of_two_versions_are_stale():
    policy = Scripted(lambda *_: ("1", "stop"), version=lambda turn: 5 + turn)
    with pytest.raises(StaleWeights, match=r"slot 2, sample 0: its turns were sampled with versions \[5, 6\]"):
        make_episodes("Counting", policy)(make_prompts(1), SAMPLING, num_samples=1, draw=DRAW)


# With an engine


def make_engine() -> HFEngine:
    """Half of the numbers end a reply, so that a random model's episodes have several turns."""
    tokenizer = tiny_tokenizer()
    model = sharp_llama(vocab_size=len(tokenizer), max_position_embeddings=256)
    return HFEngine(model, tokenizer=tokenizer, eos_ids=[1, *range(8, 58)], device="cpu", cache_tokens=4096)


def play_for_real(world: World) -> dict[str, Any]:
    """This rank's part of six prompts, three samples each; and what a rank says when another one's environment fails."""
    engine = make_engine()
    made = {}
    prompts = make_prompts(6)
    mine = range(6 * world.rank // world.size, 6 * (world.rank + 1) // world.size)
    calls = []

    def generate(prompts: list[Prompt], sampling: Sampling, *, num_samples: int, draw: Draw) -> list[Sample]:
        calls.append(draw.turn)
        return engine.generate(prompts, sampling, num_samples=num_samples, draw=draw) if prompts else []

    episodes = make_episodes("Counting", generate, world=world, max_len=engine.abilities.max_len)
    draw = Draw(3, 1, first_slot=mine.start)
    for sample in episodes([prompts[i] for i in mine], Sampling(max_new_tokens=6), num_samples=3, draw=draw):
        made[sample.slot, sample.index] = sample
    out: dict[str, Any] = {"samples": made, "calls": list(calls)}
    calls.clear()
    few = [prompts[0]] if world.rank == 0 else []
    out["idle"] = len(episodes(few, Sampling(max_new_tokens=6), num_samples=1, draw=Draw(3, 1))), list(calls)
    out["errors"] = {how: fail_on_one(world, generate, how) for how in FAILURES}
    return out


FAILURES = ("raise", "words", "unsayable", "base", "hang", "close")


def fail_on_one(world: World, generate: Any, how: str) -> tuple[str, str]:
    """What this rank says when rank 0's environment goes wrong so."""
    told = {"how": how if world.rank == 0 else "fine"}
    broken = make_episodes("Broken", generate, world=world, args=told, timeout_s=0.3 if how == "hang" else 60)
    try:
        broken(make_prompts(2), Sampling(max_new_tokens=6), num_samples=4, draw=Draw(3, 1, 2 * world.rank))
    except LockstepError as error:
        return type(error).__name__, str(error)
    raise AssertionError(f"{how}: nobody has said anything")


def test_two_ranks_play_what_one_plays_and_the_trainer_scores_what_the_engine_said():
    alone = play_for_real(World())
    ranks = run_ranks(2, play_for_real)
    assert [name for name, _ in alone["errors"].values()] == ["EpisodeError"] * len(FAILURES)
    for how, (name, said) in ranks[0]["errors"].items():
        other, repeated = ranks[1]["errors"][how]
        assert (name, other) == ("EpisodeError", "LockstepError")
        assert f": EpisodeError: {said}".encode(errors="backslashreplace").decode() in repeated
        assert repeated.startswith("rank 0 failed in " + ("closing environments" if how == "close" else "environment"))
    assert ranks[0]["calls"] == ranks[1]["calls"] == alone["calls"] == [0, 1, 2]
    assert ranks[0]["idle"][1] == ranks[1]["idle"][1] and (ranks[0]["idle"][0], ranks[1]["idle"][0]) == (1, 0)
    both = ranks[0]["samples"] | ranks[1]["samples"]
    assert both.keys() == alone["samples"].keys()
    for key, sample in alone["samples"].items():
        other = both[key]
        assert (other.ids, other.loss_mask, other.episode) == (sample.ids, sample.loss_mask, sample.episode)
        assert other.logprobs == pytest.approx(sample.logprobs, abs=1e-5)  # another batch: fp32 rounding
    samples = list(alone["samples"].values())
    turns = [len(sample.episode.rewards) for sample in samples]
    assert max(turns) == 3 and sum(turn > 1 for turn in turns) >= 6
    # Positions, caches and templates are right where one forward over the whole sample gives what the engine said turn by turn.
    model = make_engine()._model
    for sample in samples:
        scored = plain_logprobs(model, sample, Sampling()).tolist()
        gaps = [abs(p - q) for p, q, own in zip(scored, sample.logprobs, sample.loss_mask, strict=True) if own]
        assert max(gaps) < 1e-4
