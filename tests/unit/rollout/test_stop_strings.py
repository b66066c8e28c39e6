"""Stop strings: a completion ends with the token that completes one, and no id is cut or made up."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np

from polyturn.core.generation import Completion, FinishReason, GenerateRequest, SamplingParams
from polyturn.engines.scripted import ScriptedEngine
from polyturn.rollout.episode import Episode
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.rollout.stop_strings import PIECE, find_stop, generate_until
from polyturn.testing.episodes import scripted_context, task, tiny_codec, turn_ids

CODEC = tiny_codec()
SAID = "I look it up. " * 30 + "Observation: 4 and so on"


def request(max_tokens: int = 500) -> GenerateRequest:
    return GenerateRequest(
        request_id="r", session_id="s", prompt_ids=[1, 2], sampling=SamplingParams(max_tokens=max_tokens, seed=1)
    )


class AbortedEngine(ScriptedEngine):
    """Is told, by the caller's id of the request, to abort the piece of this number."""

    is_aborted_in = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        if self.num_requests + 1 == self.is_aborted_in:
            self._latency_s = 1.0  # without the abort it answers then, and the test fails
            aborting = asyncio.create_task(self.abort("r"))  # runs while the piece below is being waited for
            completion = await super().generate(request)
            await aborting
            return completion
        completion = await super().generate(request)
        return dataclasses.replace(completion, info={"prefilled_tokens": len(request.prompt_ids)})


def engine_that_says(text: str, *, is_aborted_in: int = 0) -> ScriptedEngine:
    """Goes on with the text from wherever the prompt ends, as a model does."""
    ids = turn_ids(text)

    def answer(asked: GenerateRequest) -> np.ndarray:
        return ids[len(asked.prompt_ids) - 2 :]

    engine = AbortedEngine(answer)
    engine.is_aborted_in = is_aborted_in
    return engine


async def test_a_completion_ends_with_the_token_that_completes_the_string():
    ended = await generate_until(engine_that_says(SAID), request(), stops=["Observation:"], codec=CODEC)
    text = CODEC.decode(ended.completion.token_ids)
    assert ended.stop == "Observation:" and "Observation:" in text and "so on" not in text
    assert "Observation:" not in CODEC.decode(ended.completion.token_ids[:-1]), "no id more than it takes"
    assert np.array_equal(ended.completion.token_ids, turn_ids(SAID)[: len(ended.completion.token_ids)])
    assert ended.completion.finish_reason is FinishReason.STOP
    assert ended.completion.logprobs is not None and len(ended.completion.logprobs) == len(ended.completion.token_ids)
    assert ended.completion.policy_versions == ((0, 0),)
    assert ended.completion.info["prefilled_tokens"] > 2 + PIECE, "of each piece, not the first alone"


async def test_a_completion_without_the_string_is_what_the_engine_says_in_one_go():
    ended = await generate_until(engine_that_says(SAID), request(), stops=["###"], codec=CODEC)
    assert np.array_equal(ended.completion.token_ids, turn_ids(SAID)) and ended.stop is None and ended.num_dropped == 0
    cut = await generate_until(engine_that_says(SAID), request(70), stops=["###"], codec=CODEC)
    assert len(cut.completion.token_ids) == 70 and cut.completion.finish_reason is FinishReason.LENGTH


async def test_an_abort_ends_whichever_piece_is_being_sampled():
    engine = engine_that_says(SAID, is_aborted_in=3)
    ended = await generate_until(engine, request(), stops=["###"], codec=CODEC)
    assert engine.num_requests == 3 and len(ended.completion.token_ids) == 2 * PIECE
    assert ended.completion.finish_reason is FinishReason.ABORT and ended.stop is None


def test_of_several_strings_the_first_to_be_complete_ends_it():
    ids = CODEC.encode("so 2+2 is four.").tolist()
    found = find_stop(ids, ["four", "2+2"], CODEC)
    assert found is not None and found[1] == "2+2"
    assert find_stop(ids, ["five"], CODEC) is None


async def test_an_episode_keeps_the_ids_and_counts_what_was_sampled_behind_the_string():
    class Stops(MultiTurnScheduler):
        async def on_trajectory_start(self, episode: Episode) -> None:
            episode.sample_as(episode.sampling, stops=["apples"])

        async def step(self, episode: Episode, turn: OpenTurn) -> str | None:
            assert turn.stopped_by == "apples"
            return "More." if turn.index < 1 else None

    context = scripted_context(["two apples and three pears"] * 2, scheduler=Stops())
    t = await run_episode(context, task(), id="e")
    assert [turn.message.text for turn in t.turns] == ["two apples", "two apples"]
    assert t.metrics["dropped_cut"] > 0
    (segment,) = t.segments
    assert "<|im_end|>" in CODEC.decode(segment.token_ids[segment.turn_ids == 0]), "the template closes the cut turn"
