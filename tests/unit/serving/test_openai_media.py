"""Pictures in an agent's messages reach a model that sees, token for token as in a native run."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from PIL import Image

from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.serving.openai.scheduler import BlackBox
from polyturn.tokens.codec import Codec
from polyturn.tokens.multimodal import MediaProcessor
from polyturn.tokens.parsers import HermesParser
from polyturn.tools.toolbox import Toolbox
from support.vision import tiny_processor, tiny_vision_model, vision_tokenizer

TOKENIZER = vision_tokenizer()
CODEC = Codec(TOKENIZER)
MEDIA = MediaProcessor(tiny_processor(TOKENIZER), CODEC)


def encoded(color: str) -> str:
    out = io.BytesIO()
    Image.new("RGB", (56, 28), color).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


RED, BLUE = encoded("red"), encoded("blue")


def context(scheduler: MultiTurnScheduler) -> RolloutContext:
    return RolloutContext(
        engine=EmbeddedEngine(tiny_vision_model(TOKENIZER), media=MEDIA, num_slots=4, max_context=512),
        codec=CODEC,
        media=MEDIA,
        parser=HermesParser(),
        tools=Toolbox([]),
        interactions={},
        rewarder=RewardRouter({}, scheduler=SimpleNamespace(scores_turns=False, gives_reward=True)),
        scheduler=scheduler,
        limits=Limits(max_turns=3, max_tokens_per_turn=4, max_context=512),
        sanity_mode="off",
    )


async def test_both_apis_show_pictures_as_a_native_run_does():
    async def agent(base_url: str, anthropic_base_url: str, api_key: str) -> float:
        shown: list[Any] = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{RED}"}},
            {"type": "text", "text": "Which color?"},
        ]
        history: list[Any] = [{"role": "user", "content": shown}]
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            answer = await client.chat.completions.create(model="m", messages=history)
            damaged = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
            with pytest.raises(openai.BadRequestError, match="cannot be rendered for this model"):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": [damaged]}])
        image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED}}
        other: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BLUE}}
        said: Any = answer.choices[0].message.content
        messages: list[Any] = [
            {"role": "user", "content": [image, {"type": "text", "text": "Which color?"}]},
            {"role": "assistant", "content": said},
            {"role": "user", "content": [other, {"type": "text", "text": "And this?"}]},
        ]
        async with anthropic.AsyncAnthropic(base_url=anthropic_base_url, api_key=api_key) as theirs:
            await theirs.messages.create(model="m", max_tokens=4, messages=messages)
        return 1.0

    class Shows(MultiTurnScheduler):
        async def check_finished(self, episode: Any, turn: Any) -> None:
            return None

        async def step(self, episode: Any, turn: Any) -> Any:
            return show(BLUE, "And this?") if turn.index == 0 else None

    def show(data: str, text: str) -> Message:
        uri = {"type": "image", "image": f"data:image/png;base64,{data}"}
        return Message(role="user", content=(uri, {"type": "text", "text": text}))

    ours_context, native_context = context(BlackBox(agent=agent)), context(Shows())
    ours = await run_episode(ours_context, Task(id="t", prompt=()), id="e", seed=2)
    native = await run_episode(native_context, Task(id="t", prompt=(show(RED, "Which color?"),)), id="e", seed=2)
    for one in (ours_context, native_context):
        await one.engine.close()
    assert ours.error is None, ours.error
    a, b = ours.segments[0], native.segments[0]
    assert np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.loss_weights, b.loss_weights)
    assert a.media == b.media and len(a.media) == 2
