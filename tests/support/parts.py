"""Small tools, interactions and schedulers that many tests share, the checks of a trajectory's tokens, and virtual time.

context = scripted_context([call("add", a=2, b=2), "#### 4"], tools=[add], interactions={"user": Says("Go on.")})

@virtual
async def test_late_call_is_cancelled(): ...       an hour of waiting takes no time, and no machine is too slow for it
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec

import polyturn
from polyturn.core.generation import GenerateRequest
from polyturn.core.trajectory import Trajectory
from polyturn.interactions.base import BaseInteraction
from polyturn.rollout.scheduler import MultiTurnScheduler
from support.invariants import check_invariants
from support.virtual_time import run_virtual

Args = ParamSpec("Args")


def virtual(test: Callable[Args, Coroutine[Any, Any, None]]) -> Callable[Args, None]:
    """Run an async test on a loop whose clock jumps to the next timer. Code in threads waits in real time."""

    @functools.wraps(test)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> None:
        run_virtual(test(*args, **kwargs))

    return run


def call(name: str, **arguments: Any) -> str:
    """Return a completion that calls a tool, as Hermes models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def seen_script(says: Sequence[str], seen: list[GenerateRequest]) -> Callable[[GenerateRequest], str]:
    """Return a script that keeps the requests in `seen`, and repeats its last answer."""

    def answer(request: GenerateRequest) -> str:
        seen.append(request)
        return says[min(len(seen), len(says)) - 1]

    return answer


@polyturn.tool
async def add(a: int = 0, b: int = 0) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)


class Says(BaseInteraction):
    """Answers every turn with the same content and score; counts the calls of its methods."""

    def __init__(self, content: Any = "again", *, is_done: bool = False, score: float = 0.0) -> None:
        super().__init__({"name": "user"})
        self.answer = (is_done, content, score, {})
        self.calls: list[str] = []

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.calls.append("start")
        return f"own-{instance_id}"

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        self.calls.append(f"reply {instance_id} {len(messages)}")
        return self.answer

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:
        self.calls.append(f"score {instance_id}")
        return 0.5

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        self.calls.append(f"end {instance_id}")


class Steps(MultiTurnScheduler):
    """A scheduler whose `step` is a function of (episode, turn), plain or async."""

    stateless = True

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = function

    async def step(self, episode: Any, turn: Any) -> Any:
        returned = self.function(episode, turn)
        return await returned if hasattr(returned, "__await__") else returned


def check_tokens(t: Trajectory) -> None:
    """Check I2 to I4 of a trajectory: each sampled token that was not cut has its weight once, replays have none."""
    assert not t.is_failed, t.error
    check_invariants(t)
    assert t.num_sampled_tokens == t.metrics["sampled_tokens"] - t.metrics.get("dropped_cut", 0)
