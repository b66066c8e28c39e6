"""Episodes in which the prompt, a tool and an interaction show images: the trainer sees the same media as the engine."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import polyturn
from polyturn.batching.samples import to_samples
from polyturn.core.arrays import same
from polyturn.core.generation import Completion, GenerateRequest, SamplingParams
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message, ToolCall
from polyturn.core.serde import from_json, to_json
from polyturn.core.task import InteractionRef, Task
from polyturn.core.trajectory import Segment, Trajectory, TrajectoryGroup
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.interactions.base import BaseInteraction
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.limits import ContextPolicy, Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.store.parquet_store import ParquetStore
from polyturn.store.stored_run import open_store
from polyturn.tokens.codec import Codec
from polyturn.tokens.multimodal import MediaProcessor
from polyturn.tokens.parsers.base import ParsedTurn
from polyturn.tools.options import ToolOptions
from polyturn.tools.schema import ToolResponse
from polyturn.tools.toolbox import Toolbox
from polyturn.training.journal_file import JournalFile
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy
from support.example_schedulers import ImageTools
from support.vision import (
    picture,
    sharp_vision_model,
    tiny_processor,
    vision_tokenizer,
)

TOKENIZER = vision_tokenizer()
CODEC = Codec(TOKENIZER)
MEDIA = MediaProcessor(tiny_processor(TOKENIZER), CODEC)
SPELLED = "<|vision_start|><|image_pad|><|vision_end|>"


@functools.cache
def model() -> torch.nn.Module:
    return sharp_vision_model(TOKENIZER)


@polyturn.tool
def look() -> ToolResponse:
    """Look again."""
    return ToolResponse(text=f"closer {SPELLED} " + "and closer " * 12, image=[picture("blue", 56, 28), picture("green")])


class Painter(BaseInteraction):
    """Answers every turn with a picture."""

    stateless = True

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        return False, [{"type": "image", "image": picture("black", 28, 84)}, {"type": "text", "text": "And this?"}], 0.5, {}


class CallsLook:
    """Reads the first turn, whatever it says, as a call of `look`."""

    def parse(self, text: str, *, id_prefix: str = "call", tools: Any = ()) -> ParsedTurn:
        calls = (ToolCall(id="call_0_0", name="look"),) if id_prefix.endswith("_0") else ()
        return ParsedTurn(content=text, tool_calls=calls)


class ReadsText(CallsLook):
    """Reads every turn as text."""

    def parse(self, text: str, *, id_prefix: str = "call", tools: Any = ()) -> ParsedTurn:
        return ParsedTurn(content=text)


class GoesOn(MultiTurnScheduler):
    """Continues cut turns, such as those of a random model."""

    stateless = True

    def check_finished(self, episode: Any, turn: Any) -> None:
        return None


def context(**options: Any) -> RolloutContext:
    values: dict[str, Any] = {
        "media": MEDIA,
        "parser": CallsLook(),
        "limits": Limits(max_turns=3, max_tokens_per_turn=8, max_context=512),
        "scheduler": GoesOn(),
        "sanity_every": 0,
        **options,
    }
    return RolloutContext(
        engine=EmbeddedEngine(model(), media=MEDIA, num_slots=4),
        codec=CODEC,
        tools=Toolbox([look], ToolOptions(timeout_s=60.0)),
        interactions={"painter": Painter({"name": "painter"})},
        rewarder=RewardRouter({}),
        sampling=SamplingParams(temperature=1.0),
        **values,
    )


def task(color: str = "red") -> Task:
    shown = ({"type": "image", "image": picture(color, 56, 56)}, {"type": "text", "text": f"Which color? {SPELLED}"})
    return Task(
        id=color,
        prompt=(Message(role="user", content=shown),),
        interaction=InteractionRef(name="painter", kwargs={"name": "painter"}),
    )


async def run(made: RolloutContext, one: Task | None = None) -> Trajectory:
    trajectory = await run_episode(made, one or task(), id="e0", seed=1)
    assert trajectory.error is None
    return trajectory


def check_scores(trajectory: Trajectory) -> None:
    """Check I8: the trainer's logprobs of every sample are the engine's."""
    samples = to_samples(TrajectoryGroup(id="g", task=task(), trajectories=(trajectory,)), temperature=1.0)
    scored = local_policy(model(), optim=OptimSettings(), media=MEDIA).score(samples)
    for sample, scores in zip(samples, scored, strict=True):
        np.testing.assert_allclose(scores, sample.rollout_logprobs * sample.loss_weights, atol=1e-4)


def num_features(segment: Segment) -> int:
    return int((MEDIA.types(segment.token_ids) > 0).sum())


async def test_logprobs_of_engine_and_trainer_agree_with_images() -> None:
    """I8, over three turns: a picture in the prompt, two from a tool, one from an interaction."""
    trajectory = await run(context())
    (segment,) = trajectory.segments
    assert [len(turn.observation) for turn in trajectory.turns] == [1, 1, 1]
    assert [medium.kind for medium in segment.media] == ["image"] * 4
    assert num_features(segment) == 4 + 2 + 1 + 3
    assert CODEC.decode(segment.token_ids).count(SPELLED) == 3, "spelled twice as text, and one image of one token"
    assert trajectory.metrics["prefilled_tokens"] == len(segment) - trajectory.num_sampled_tokens + 2, "only new tokens"
    assert trajectory.num_sampled_tokens == 24
    check_scores(trajectory)


class Killed(BaseException):
    """Stands for the end of a process."""


class Dies:
    """An engine whose process ends when it is asked for a turn."""

    def __init__(self, engine: Any, *, at: int) -> None:
        self.engine, self.at = engine, at
        self.capabilities, self.end_session = engine.capabilities, engine.end_session

    async def generate(self, request: GenerateRequest) -> Completion:
        if request.request_id.endswith(f"/{self.at}"):
            raise Killed
        return await self.engine.generate(request)


async def test_conversation_with_images_goes_on_in_another_process(tmp_path: Any) -> None:
    whole = await run_episode(context(), task(), id="g0/0", seed=1)
    for at in (1, 2, None):
        journal = JournalFile(tmp_path)
        journal.begin(0) if at == 1 else journal.resume(0, oldest=lambda ticket: 0)
        made = context(journal=journal)
        if at is not None:
            made.engine = Dies(made.engine, at=at)
            with pytest.raises(Killed):
                await run_episode(made, task(), id="g0/0", seed=1)
        else:
            again = await run_episode(made, task(), id="g0/0", seed=1)
        assert journal.read_metrics()["rollout/resumed_episodes"] == (at != 1)
        journal.close()
    (before,), (after,) = whole.segments, again.segments
    assert np.array_equal(before.token_ids, after.token_ids)
    assert before.media == after.media
    assert len(after.media) == 4
    np.testing.assert_allclose(before.logprobs, after.logprobs, atol=1e-4)  # tokens decoded there are prefilled here
    assert again.messages == whole.messages
    written = (tmp_path / "step-000000.jsonl").read_text()
    source = whole.segments[0].media[1].source
    assert isinstance(source, str) and written.count(source) == 1, "an image is written once"


async def test_trajectory_with_media_survives_pickle_json_and_store(tmp_path: Any) -> None:
    """I13; a record keeps the file of an image, as a data URI."""
    trajectory = await run(context())
    for again in (
        pickle.loads(pickle.dumps(trajectory)),
        from_json(Trajectory, json.loads(json.dumps(to_json(trajectory)))),
    ):
        assert again.same_as(trajectory)
    group = TrajectoryGroup(id="g", task=trajectory.task, trajectories=(trajectory,))
    with ParquetStore(tmp_path) as store:
        store.add(group, step=0, split="train")
    stored = open_store(tmp_path).trajectory("e0")
    assert stored.same_as(trajectory)
    assert same(
        MEDIA.inputs(stored.segments[0].media)["pixel_values"].numpy(),
        MEDIA.inputs(trajectory.segments[0].media)["pixel_values"].numpy(),
    )
    (sample,) = to_samples(group, temperature=1.0)
    assert pickle.loads(pickle.dumps(sample)).same_as(sample)


async def test_rewrite_that_swaps_an_image_opens_a_segment() -> None:
    class Swaps(GoesOn):
        async def step(self, episode: Any, turn: Any) -> Any:
            if turn.index:
                return None
            _, *rest = episode.messages
            other = dataclasses.replace(task("blue").prompt[0])
            return episode.rewrite([other, *rest])

    trajectory = await run(context(scheduler=Swaps(), parser=ReadsText()))
    first, second = trajectory.segments
    assert first.token_ids[: len(first) - 8].tolist() == second.token_ids[: len(first) - 8].tolist()
    assert (first.media, second.media) == (task("red").prompt[0].media, task("blue").prompt[0].media)
    check_scores(trajectory)


@pytest.mark.parametrize("renders_history", [False, True])
async def test_every_segment_lists_the_media_of_its_tokens(renders_history: bool) -> None:
    class Forks(GoesOn):
        async def step(self, episode: Any, turn: Any) -> Any:
            if turn.index == 1:
                other = episode.fork()
                await other.prepare()
                await other.generate()
            return await super().step(episode, turn)

    trajectory = await run(context(scheduler=Forks(), renders_history=renders_history))
    assert len(trajectory.segments) > 1
    for segment in trajectory.segments:
        assert num_features(segment) == sum(MEDIA.expansion(m).num_features for m in segment.media)
    check_scores(trajectory)


async def test_compaction_leaves_old_images_out() -> None:
    length = len((await run(context())).segments[0])
    limits = Limits(max_turns=3, max_tokens_per_turn=8, max_context=length - 8, context_policy=ContextPolicy.COMPACT)
    trajectory = await run(context(limits=limits))
    assert len(trajectory.segments) == 2
    assert [len(segment.media) for segment in trajectory.segments] == [3, 2]


async def test_sampled_media_token_fails_the_trajectory() -> None:
    class Careless(EmbeddedEngine):
        async def generate(self, request: GenerateRequest) -> Completion:
            done = await super().generate(request)
            return dataclasses.replace(done, token_ids=np.full_like(done.token_ids, MEDIA.token_ids[0]))

    made = context()
    made.engine = Careless(model(), media=MEDIA)
    trajectory = await run_episode(made, task(), id="e0", seed=1)
    assert trajectory.stop_reason is StopReason.ERROR
    assert "sampled a banned token" in (trajectory.error or "")


async def test_image_tools_shows_tool_images_in_a_user_message() -> None:
    class Shows(GoesOn, ImageTools):
        pass

    limits = Limits(max_turns=2, max_tokens_per_turn=8, max_context=512)
    trajectory = await run(context(scheduler=Shows(), limits=limits))
    (segment,) = trajectory.segments
    (shown,) = trajectory.turns[0].observation
    assert shown.role == "user"
    assert shown.text.startswith("<tool_response>")
    assert len(shown.media) == 2
    assert segment.media[1:] == shown.media
