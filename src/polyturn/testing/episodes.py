"""Episodes with a scripted model: its completions are texts of the test; everything else is real.

    context = scripted_context(["<tool_call>…</tool_call>", "#### 4"], tools=[calculator])
    trajectory = await run_episode(context, task("What is 2+2?", ground_truth="4"), id="e0")

Such episodes test tools, interactions, schedulers and rewards without a model and without torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polyturn.core.arrays import Ids
from polyturn.core.generation import GenerateRequest
from polyturn.core.messages import Message
from polyturn.core.protocols import Interaction, Tool
from polyturn.core.task import InteractionRef, Task
from polyturn.engines.scripted import ScriptedEngine
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.limits import Limits
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from polyturn.tokens.parsers import HermesParser
from polyturn.tools.options import ToolOptions
from polyturn.tools.toolbox import Toolbox

Say = str | Exception
"""The model's text in one turn, or the error that its engine raises."""


@functools.cache
def tiny_codec() -> Codec:
    """Return the codec of the tiny tokenizer, created once per process."""
    return Codec(tiny_tokenizer())


def turn_ids(text: str, *, is_closed: bool = True) -> Ids:
    """Return the ids of the completion `text`; if `is_closed`, with the token that ends a turn."""
    codec = tiny_codec()
    ends = codec.stop_token_ids[:1] if is_closed else ()
    return np.array([*codec.encode(text), *ends], np.int32)


def scripted_context(
    says: Sequence[Say] | Callable[[GenerateRequest], Say],
    *,
    tools: Sequence[Tool] = (),
    interactions: Mapping[str, Interaction] | None = None,
    rewards: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    scheduler: MultiTurnScheduler | None = None,
    latency_s: float = 0.0,
    **options: Any,
) -> RolloutContext:
    """Return a context with a scripted model.

    Args:
        says: The model's turns, in order for every episode, the last one repeated; or a function of the request.
        tools: The tools of the run.
        interactions: Name -> interaction.
        rewards: data_source -> reward function, in addition to the built-in ones.
        limits: The limits; None uses the defaults.
        scheduler: The scheduler; None uses the default one.
        latency_s: Seconds per completion.
        options: Further fields of `RolloutContext`, or `tool_timeout_s`.
    """
    spoken: dict[str, int] = {}

    def answer(request: GenerateRequest) -> Any:
        if callable(says):
            texts = says(request)
        else:
            index = spoken[request.session_id] = spoken.get(request.session_id, -1) + 1
            texts = says[min(index, len(says) - 1)]
        return texts if isinstance(texts, Exception) else turn_ids(texts)

    return RolloutContext(
        engine=ScriptedEngine(answer, latency_s=latency_s),
        codec=tiny_codec(),
        parser=HermesParser(),
        tools=Toolbox(list(tools), ToolOptions(timeout_s=options.pop("tool_timeout_s", 5.0))),
        interactions=interactions or {},
        rewarder=RewardRouter(rewards or {}, scheduler=scheduler),
        scheduler=scheduler or MultiTurnScheduler(),
        limits=limits or Limits(),
        **{"sanity_every": 1, **options},
    )


def task(
    prompt: str = "What is 2+2?",
    *,
    id: str = "t0",
    data_source: str | None = "openai/gsm8k",
    ground_truth: Any = "4",
    interaction: str | None = None,
    **fields: Any,
) -> Task:
    """Return a task with one user message; the interaction named `interaction` gets the ground truth."""
    ref = None
    if interaction is not None:
        ref = InteractionRef(name=interaction, kwargs={"name": interaction, "ground_truth": ground_truth})
    return Task(
        id=id,
        prompt=(Message(role="user", content=prompt),),
        data_source=data_source,
        ground_truth=ground_truth,
        interaction=ref,
        **fields,
    )
