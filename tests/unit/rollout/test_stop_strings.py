"""Stop strings: a completion ends with the token that completes one, and its ids are kept as sampled."""

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


class Speaks(ScriptedEngine):
    """Goes on with a text from wherever the prompt ends, as a model does; the piece `held_piece` waits for an abort."""

    def __init__(self, text: str, *, held_piece: int = 0) -> None:
        ids = turn_ids(text)
        super().__init__(lambda asked: ids[len(asked.prompt_ids) - 2 :])
        self.held_piece = held_piece
        self.is_held, self.aborted = asyncio.Event(), asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Completion:
        if self.num_requests + 1 == self.held_piece:
            self.is_held.set()
            await self.aborted.wait()
            return Completion(token_ids=[], logprobs=[], finish_reason=FinishReason.ABORT)
        completion = await super().generate(request)
        return dataclasses.replace(completion, info={"prefilled_tokens": len(request.prompt_ids)})

    async def abort(self, request_id: str) -> None:
        assert request_id.startswith("r")
        self.aborted.set()


async def test_completion_ends_with_its_stop_string():
    ended = await generate_until(Speaks(SAID), request(), stops=["Observation:"], codec=CODEC)
    text = CODEC.decode(ended.completion.token_ids)
    assert ended.stop == "Observation:"
    assert "Observation:" in text
    assert "so on" not in text
    assert "Observation:" not in CODEC.decode(ended.completion.token_ids[:-1]), "no id more than it takes"
    assert np.array_equal(ended.completion.token_ids, turn_ids(SAID)[: len(ended.completion.token_ids)])
    assert ended.completion.finish_reason is FinishReason.STOP
    assert ended.completion.logprobs is not None and len(ended.completion.logprobs) == len(ended.completion.token_ids)
    assert ended.completion.policy_versions == ((0, 0),)
    assert ended.completion.info["prefilled_tokens"] > 2 + PIECE, "of each piece, not the first alone"


async def test_completion_without_the_string_is_whole():
    ended = await generate_until(Speaks(SAID), request(), stops=["###"], codec=CODEC)
    assert np.array_equal(ended.completion.token_ids, turn_ids(SAID))
    assert ended.stop is None
    assert ended.num_dropped == 0
    cut = await generate_until(Speaks(SAID), request(70), stops=["###"], codec=CODEC)
    assert len(cut.completion.token_ids) == 70 and cut.completion.finish_reason is FinishReason.LENGTH


async def test_abort_ends_the_piece_that_is_sampled() -> None:
    engine = Speaks(SAID, held_piece=3)
    generating = asyncio.create_task(generate_until(engine, request(), stops=["###"], codec=CODEC))
    await engine.is_held.wait()
    await engine.abort("r")
    ended = await generating
    assert len(ended.completion.token_ids) == 2 * PIECE
    assert ended.completion.finish_reason is FinishReason.ABORT
    assert ended.stop is None


def test_first_complete_string_ends_a_completion() -> None:
    ids = CODEC.encode("so 2+2 is four.").tolist()
    found = find_stop(ids, ["four", "2+2"], CODEC)
    assert found[1] == "2+2"
    assert find_stop(ids, ["five"], CODEC) is None


async def test_episode_counts_the_tokens_behind_the_string():
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
