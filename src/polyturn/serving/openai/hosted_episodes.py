"""`polyturn serve --openai`: the endpoint by itself, in front of a checkpoint, for agents and evaluations elsewhere.

    POST   /v1/chat/completions …      without an episode: a model behind an API, each request for itself
    POST   /episodes                   {"metadata": {…}, "seed": 1}  ->  {"id", "base_url", …, "api_key", "reward_key"}
    GET    /episodes/ID                ->  {"status": "live" | "ended", "num_calls": 3}
    POST   /episodes/ID/end            {"reward": 1.0} or {}  ->  the trajectory, with its tokens
    GET    /episodes/ID/trajectory     the same, later

What is asked of an episode itself needs its reward key; the API key, which the agent has, asks the model alone.

An episode is one run of `run_episode`, as in training; here its agent is a client with the URL, until `end`, until nothing
was asked for a while, or until the server stops. Ended trajectories are kept for a while, and recorded where that was asked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polyturn.core.errors import PolyturnError, one_line
from polyturn.core.serde import to_json
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.rewards.router import RewardRef, RewardRouter
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.run_episode import run_episode
from polyturn.serving.openai import chat
from polyturn.serving.openai.chat_request import BadRequest, ChatRequest, ChatResponse
from polyturn.serving.openai.endpoint import Address, EndpointOptions, ModelEndpoint
from polyturn.serving.openai.http import Handler, guarded, json_answer, read_object, read_reward
from polyturn.serving.openai.scheduler import SessionScheduler
from polyturn.serving.openai.session import AgentSession, SessionRules
from polyturn.serving.openai.turns import typed_messages, unrenderable

if TYPE_CHECKING:
    from polyturn.rollout.episode import Episode

logger = logging.getLogger(__name__)

MAX_KEPT = 256
"""Trajectories that can be fetched after their end."""


@dataclass(slots=True, eq=False)
class _CreatedEpisode:
    """An episode that a client created."""

    name: str
    address: Address | None = None
    session: AgentSession | None = None
    opened: asyncio.Future[AgentSession] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[Trajectory] | None = None


@keeps_deadlines
class HostedEpisodes(SessionScheduler):
    """Waits for the requests of the client that created an episode."""

    never_asked = "the episode ended before any request came to its base_url"

    def __init__(self, visits: Mapping[str, Callable[[AgentSession], Awaitable[None]]], *, rules: SessionRules) -> None:
        self.rules = rules
        self._visits = visits

    async def let_ask(self, episode: Episode, session: AgentSession) -> None:
        """Hand the session to the waiting request."""
        await self._visits[episode.id](session)


class OpenAIService:
    """Episodes on demand, and requests without one."""

    def __init__(
        self,
        context: RolloutContext,
        options: EndpointOptions,
        *,
        idle_s: float = 600.0,
        max_episodes: int = 256,
        record: Callable[[TrajectoryGroup], None] | None = None,
        has_rewards: bool = False,
    ) -> None:
        """Serve a context's engine.

        Args:
            context: The rollout context; its scheduler is replaced by one that waits for requests.
            options: Of the endpoint.
            idle_s: An episode of which nothing was asked for so long is ended.
            max_episodes: Episodes at once; more are refused.
            record: Called with every trajectory of an episode, as a group of one.
            has_rewards: Whether the context's reward functions score episodes for which no reward is posted.
        """
        self._visits: dict[str, Callable[[AgentSession], Awaitable[None]]] = {}
        context.scheduler = HostedEpisodes(self._visits, rules=SessionRules(samples_as_asked=True))
        if not has_rewards:
            context.rewarder = RewardRouter({}, function=RewardRef(target=_unscored))
        self.context = context
        self.is_stopping = False
        self.endpoint = ModelEndpoint(options, plain=self)
        self._idle_s = idle_s
        self._max_episodes = max_episodes
        self._record = record
        self._live: dict[str, _CreatedEpisode] = {}
        self._ended: OrderedDict[str, Trajectory] = OrderedDict()
        self._keys: OrderedDict[str, str] = OrderedDict()
        self._numbers = itertools.count()
        self._origin = ""

    async def serve(self, bound: Any, until: asyncio.Event, *, grace_s: float = 30.0) -> None:
        """Serve until an event is set; then running episodes get `grace_s` seconds."""
        async with self.endpoint.serving(bound, more=self._routes()) as self._origin:
            models = ", ".join(self.endpoint.options.models)
            logger.info("listening on %s (base_url %s/v1; model: %s)", self._origin, self._origin, models)
            sweep = asyncio.create_task(self._end_idle())
            await until.wait()
            sweep.cancel()
            await self.stop(grace_s)

    async def stop(self, grace_s: float) -> None:
        """Create no more episodes, give the live ones their time, and end them."""
        self.is_stopping = True
        running = [live.task for live in self._live.values() if live.task is not None]
        if running:
            logger.info("stopping: %d episodes have %g seconds to finish", len(running), grace_s)
            await asyncio.wait(running, timeout=grace_s)
        for live in list(self._live.values()):
            live.ending.set()
        if running:
            await asyncio.wait(running, timeout=5.0)

    # Requests without an episode.

    async def ask(self, ask: ChatRequest) -> list[ChatResponse]:
        """Answer one request by itself."""
        name = f"plain/{next(self._numbers)}"
        answer: asyncio.Future[list[ChatResponse]] = asyncio.get_running_loop().create_future()

        async def visit(session: AgentSession) -> None:
            try:
                answer.set_result(await session.ask(ask))
            except BadRequest as problem:
                answer.set_exception(problem)

        self._visits[name] = visit
        running = asyncio.create_task(
            run_episode(self.context, Task(id=name, prompt=()), id=name, seed=secrets.randbits(48))
        )
        try:
            await asyncio.wait([running, answer], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
            if answer.done():
                return [_with_fresh_ids(response) for response in answer.result()]
            answer.cancel()
            trajectory = running.result()
            raise BadRequest(trajectory.error or "the request was ended", status=503, code="server_error")
        except asyncio.CancelledError:
            running.cancel()
            raise
        finally:
            del self._visits[name]
            running.add_done_callback(_look_at)

    def count_tokens(self, ask: ChatRequest) -> int:
        """Return the length of a request's prompt in tokens."""
        try:
            return len(self.context.encoder_listing(ask.tools).start(typed_messages(ask.messages)))
        except PolyturnError as problem:
            raise unrenderable(problem) from problem

    def give_reward(self, score: float, info: Mapping[str, Any]) -> None:
        """Refuse: there is nothing to reward."""
        raise BadRequest("a request without an episode has no reward; create one with POST /episodes", status=404)

    # Episodes.

    def _routes(self) -> list[Route]:
        def route(path: str, method: str, handler: Handler) -> Route:
            return Route(path, guarded(handler, chat.error), methods=[method])

        return [
            route("/episodes", "POST", self._create),
            route("/episodes/{name}", "GET", self._look),
            route("/episodes/{name}/end", "POST", self._finish),
            route("/episodes/{name}/trajectory", "GET", self._fetch),
        ]

    async def _create(self, request: Request) -> Response:
        self.endpoint.check_token(request)
        if self.is_stopping or len(self._live) >= self._max_episodes:
            why = "the server is stopping" if self.is_stopping else f"{len(self._live)} episodes are live, as many as may be"
            raise BadRequest(f"{why}; try again later", status=503, code="overloaded")
        body = await read_object(request, may_be_empty=True)
        metadata, seed = body.get("metadata") or {}, body.get("seed")
        if not isinstance(metadata, dict) or isinstance(seed, bool) or not isinstance(seed, int | None):
            raise BadRequest("an episode takes `metadata`, an object, and `seed`, a whole number; both may be left out")
        live = _CreatedEpisode(name="")
        id = f"served/{next(self._numbers)}"

        async def visit(session: AgentSession) -> None:
            live.opened.set_result(session)
            await live.ending.wait()

        self._visits[id] = visit
        task = Task(id=str(metadata.get("task", id)), prompt=(), extra=metadata)
        live.task = asyncio.create_task(
            run_episode(self.context, task, id=id, seed=secrets.randbits(48) if seed is None else seed), name=id
        )
        await asyncio.wait([live.task, live.opened], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
        if not live.opened.done():
            raise BadRequest(f"the episode did not start: {live.task.result().error}", status=500, code="server_error")
        live.session = live.opened.result()
        live.name, live.address = self.endpoint.admit(live.session, origin=self._origin, posts_reward=True)
        assert live.address.reward_key is not None
        self._live[live.name] = live
        self._keys[live.name] = live.address.reward_key
        live.task.add_done_callback(lambda done: self._end(live, id, done))
        addresses = {"base_url": live.address.base_url, "anthropic_base_url": live.address.anthropic_base_url}
        return json_answer(
            {"id": live.name, **addresses, "api_key": live.address.api_key, "reward_key": live.address.reward_key}
        )

    def _end(self, live: _CreatedEpisode, id: str, done: asyncio.Task[Trajectory]) -> None:
        self._visits.pop(id, None)
        self._live.pop(live.name, None)
        problem = None if done.cancelled() else done.exception()
        if done.cancelled() or problem is not None:
            self.endpoint.dismiss(live.name, "it failed" if problem is None else one_line(problem))
            logger.error("the episode %s broke: %s", id, problem)
            return
        trajectory = done.result()
        self.endpoint.dismiss(live.name, trajectory.error or f"its end was {trajectory.stop_reason.value}")
        self._ended[live.name] = trajectory
        if len(self._ended) > MAX_KEPT:
            self._keys.pop(self._ended.popitem(last=False)[0], None)
        if self._record is not None:
            self._record(TrajectoryGroup(id=id, task=trajectory.task, trajectories=(trajectory,)))

    async def _look(self, request: Request) -> Response:
        live = self._of(request)
        if live is None:
            trajectory = self._ended[request.path_params["name"]]
            return json_answer({"status": "ended", "stop_reason": trajectory.stop_reason.value, "error": trajectory.error})
        assert live.session is not None
        return json_answer({"status": "live", "num_calls": live.session.num_calls})

    async def _finish(self, request: Request) -> Response:
        live = self._of(request)
        body = await read_object(request, may_be_empty=True)
        if live is not None:
            assert live.session is not None and live.task is not None
            if body:
                live.session.give_reward(*read_reward(body))
            live.ending.set()
            await asyncio.wait({live.task})
            await asyncio.sleep(0)  # its end is noted by a callback
        return await self._fetch(request)

    async def _fetch(self, request: Request) -> Response:
        if self._of(request) is not None:
            raise BadRequest("the episode is live; POST to its /end first", status=409, code="episode_live")
        return json_answer(to_json(self._ended[request.path_params["name"]]))

    def _of(self, request: Request) -> _CreatedEpisode | None:
        """Return a live episode, None for one that ended.

        Raises:
            BadRequest: there is none, or the key is another.
        """
        name = request.path_params["name"]
        if name not in self._keys:
            raise BadRequest("there is no such episode, or it ended long ago", status=404, code="not_found")
        self.endpoint.check_reward_key(request, self._keys[name])
        if name not in self._live and name not in self._ended:
            raise BadRequest("the episode broke and left no trajectory", status=410, code="episode_ended")
        return self._live.get(name)

    async def _end_idle(self) -> None:
        while True:
            await asyncio.sleep(min(self._idle_s / 4, 10.0))
            for live in list(self._live.values()):
                if live.session is not None and time.monotonic() - live.session.last_used > self._idle_s:
                    logger.info("the episode %s was not used for %g seconds and is ended", live.session.id, self._idle_s)
                    live.ending.set()


def _with_fresh_ids(response: ChatResponse) -> ChatResponse:
    """Return an answer whose calls have ids that no other request's have: here every request is an episode's first."""
    calls = tuple(
        dataclasses.replace(c, id=f"call_{secrets.token_hex(8)}") if c.id.startswith("call_") else c for c in response.calls
    )
    return dataclasses.replace(response, calls=calls) if calls else response


def _look_at(done: asyncio.Task[Trajectory]) -> None:
    if not done.cancelled() and (problem := done.exception()) is not None:
        logger.error("a request broke its episode: %s", one_line(problem))


def _unscored(trajectory: Trajectory) -> float:
    return 0.0
