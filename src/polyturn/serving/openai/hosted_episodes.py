"""`polyturn serve --openai`: serves a checkpoint to agents and evaluations outside a run.

    POST   /v1/chat/completions …      without an episode: each request is independent
    POST   /episodes                   {"metadata": {…}, "seed": 1}  ->  {"id", "base_url", …, "api_key", "reward_key"}
    GET    /episodes/ID                ->  {"status": "live", "num_calls": 3} or {"status": "ended", "stop_reason", "error"}
    POST   /episodes/ID/end            {"reward": 1.0} or {}  ->  the trajectory, with its tokens
    GET    /episodes/ID/trajectory     the same, later

Requests about an episode need its reward key; the agent's API key gives access to the model only.

An episode is one run of `run_episode`, as in training, whose agent is an HTTP client. It ends on `/end`, after some time
without requests, or when the server stops. The latest trajectories can be fetched after their end, and can be recorded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polyturn.core.errors import PolyturnError, did_you_mean, one_line
from polyturn.core.serde import to_json
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.run_episode import run_episode
from polyturn.serving.openai import chat
from polyturn.serving.openai.chat_request import BadRequest, ChatRequest, ChatResponse
from polyturn.serving.openai.endpoint import EndpointOptions, ModelEndpoint
from polyturn.serving.openai.http import Handler, guarded, json_answer, read_object, read_reward
from polyturn.serving.openai.scheduler import SessionScheduler
from polyturn.serving.openai.session import AgentSession, SessionRules
from polyturn.serving.openai.turns import typed_messages, unrenderable
from polyturn.serving.rollout_service import unscored

if TYPE_CHECKING:
    from polyturn.rollout.episode import Episode

logger = logging.getLogger(__name__)

MAX_KEPT = 256
"""Number of ended trajectories that can still be fetched."""


@dataclass(slots=True, eq=False)
class _CreatedEpisode:
    """An episode that a client created."""

    session: AgentSession
    task: asyncio.Task[Trajectory]
    ending: asyncio.Event
    """Set to let the episode end."""


@keeps_deadlines
class HostedEpisodes(SessionScheduler):
    """Passes each episode's session to the request that created it."""

    no_request_error = "the episode ended before any request came to its base_url"

    def __init__(self, visits: Mapping[str, Callable[[AgentSession], Awaitable[None]]], *, rules: SessionRules) -> None:
        self.rules = rules
        self._visits = visits

    async def run_agent(self, episode: Episode, session: AgentSession) -> None:
        """Pass the session to the waiting request, and wait until the episode may end."""
        await self._visits[episode.id](session)


class OpenAIService:
    """Serves episodes that clients create, and requests without an episode."""

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
        """Create a service for a context's engine.

        Args:
            context: The rollout context; its scheduler is replaced by one that waits for requests.
            options: Options of the endpoint.
            idle_s: Seconds after the last request or answer after which an episode is ended.
            max_episodes: Largest number of live episodes; more are refused.
            record: Called with the trajectory of every episode, as a group of one.
            has_rewards: Whether the context's reward functions score episodes without a posted reward.
        """
        self._visits: dict[str, Callable[[AgentSession], Awaitable[None]]] = {}
        context.scheduler = HostedEpisodes(self._visits, rules=SessionRules(samples_as_asked=True))
        if not has_rewards:
            context.rewarder = unscored()
        self.context = context
        self.is_stopping = False
        self.endpoint = ModelEndpoint(options, plain=self)
        self._idle_s = idle_s
        self._max_episodes = max_episodes
        self._record = record
        self._live: dict[str, _CreatedEpisode] = {}
        self._ended: OrderedDict[str, Trajectory | None] = OrderedDict()
        """The latest episodes that ended, with None for one that failed and left no trajectory."""
        self._keys: dict[str, str] = {}
        self._numbers = itertools.count()
        self._origin = ""

    async def serve(self, bound: Any, until: asyncio.Event, *, grace_s: float = 30.0) -> None:
        """Serve until an event is set; running episodes then get `grace_s` seconds to finish."""
        async with self.endpoint.serving(bound, more=self._routes()) as self._origin:
            models = ", ".join(self.endpoint.options.models)
            logger.info("listening on %s (base_url %s/v1; model: %s)", self._origin, self._origin, models)
            sweep = asyncio.create_task(self._end_idle())
            await until.wait()
            sweep.cancel()
            await self.stop(grace_s)

    async def stop(self, grace_s: float) -> None:
        """Refuse new episodes, give live ones `grace_s` seconds, and end the rest."""
        self.is_stopping = True
        running = [live.task for live in self._live.values()]
        if running:
            logger.info("stopping: %d episodes have %g seconds to finish", len(running), grace_s)
            await asyncio.wait(running, timeout=grace_s)
        for live in list(self._live.values()):
            live.ending.set()
        if running:
            await asyncio.wait(running, timeout=5.0)

    # Requests without an episode.

    async def ask(self, ask: ChatRequest) -> list[ChatResponse]:
        """Answer one request in an episode of its own."""
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
            running.add_done_callback(_log_failure)

    def count_tokens(self, ask: ChatRequest) -> int:
        try:
            return len(self.context.encoder_listing(ask.tools).start(typed_messages(ask.messages)))
        except PolyturnError as problem:
            raise unrenderable(problem) from problem

    def give_reward(self, score: float, info: Mapping[str, Any]) -> None:
        """Refuse a reward: there is no episode."""
        raise BadRequest("a request without an episode has no reward; create one with POST /episodes", status=404)

    # Episodes.

    def _routes(self) -> list[Route]:
        def route(path: str, method: str, handler: Handler) -> Route:
            return Route(path, guarded(handler, chat.error), methods=[method])

        return [
            route("/episodes", "POST", self._create),
            route("/episodes/{name}", "GET", self._status),
            route("/episodes/{name}/end", "POST", self._finish),
            route("/episodes/{name}/trajectory", "GET", self._fetch),
        ]

    async def _create(self, request: Request) -> Response:
        self.endpoint.check_token(request)
        body = await read_object(request, may_be_empty=True)
        if unknown := [name for name in body if name not in ("metadata", "seed")]:
            hint = did_you_mean(unknown[0], ("metadata", "seed"))
            raise BadRequest(f"an episode has no {unknown[0]!r}.{hint} Other values go into metadata", param=unknown[0])
        num_live = sum(id.startswith("served/") for id in self._visits)  # including episodes that have yet to open
        if self.is_stopping or num_live >= self._max_episodes:
            why = "the server is stopping" if self.is_stopping else f"all {num_live} episodes are in use"
            raise BadRequest(f"{why}; try again later", status=503, code="overloaded")
        metadata, seed = body.get("metadata") or {}, body.get("seed")
        if not isinstance(metadata, dict) or isinstance(seed, bool) or not isinstance(seed, int | None):
            raise BadRequest("an episode takes `metadata` (an object) and `seed` (a whole number); both are optional")
        opened: asyncio.Future[AgentSession] = asyncio.get_running_loop().create_future()
        ending = asyncio.Event()
        id = f"served/{next(self._numbers)}"

        async def visit(session: AgentSession) -> None:
            opened.set_result(session)
            await ending.wait()

        self._visits[id] = visit
        task = Task(id=str(metadata.get("task", id)), prompt=(), extra=metadata)
        running = asyncio.create_task(
            run_episode(self.context, task, id=id, seed=secrets.randbits(48) if seed is None else seed), name=id
        )
        await asyncio.wait([running, opened], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
        if not opened.done():
            del self._visits[id]
            raise BadRequest(f"the episode did not start: {running.result().error}", status=500, code="server_error")
        name, address = self.endpoint.admit(opened.result(), origin=self._origin, posts_reward=True)
        assert address.reward_key is not None
        self._live[name] = _CreatedEpisode(opened.result(), running, ending)
        self._keys[name] = address.reward_key
        running.add_done_callback(functools.partial(self._end, name, id))
        return json_answer({"id": name, **dataclasses.asdict(address)})

    def _end(self, name: str, id: str, done: asyncio.Task[Trajectory]) -> None:
        self._visits.pop(id, None)
        self._live.pop(name, None)
        problem = None if done.cancelled() else done.exception()
        is_failed = done.cancelled() or problem is not None
        self._ended[name] = None if is_failed else done.result()
        if len(self._ended) > MAX_KEPT:
            self._keys.pop(self._ended.popitem(last=False)[0], None)
        if is_failed:
            self.endpoint.dismiss(name, "it failed" if problem is None else one_line(problem))
            logger.error("the episode %s failed: %s", id, problem)
            return
        trajectory = done.result()
        self.endpoint.dismiss(name, trajectory.error or f"its stop reason was {trajectory.stop_reason.value}")
        if self._record is not None:
            self._record(TrajectoryGroup(id=id, task=trajectory.task, trajectories=(trajectory,)))

    async def _status(self, request: Request) -> Response:
        live = self._of(request)
        if live is None:
            trajectory = self._ended[request.path_params["name"]]
            assert trajectory is not None
            return json_answer({"status": "ended", "stop_reason": trajectory.stop_reason.value, "error": trajectory.error})
        return json_answer({"status": "live", "num_calls": live.session.num_calls})

    async def _finish(self, request: Request) -> Response:
        live = self._of(request)
        body = await read_object(request, may_be_empty=True)
        if live is not None:
            if body:
                live.session.give_reward(*read_reward(body))
            live.ending.set()
            await asyncio.wait({live.task})
            await asyncio.sleep(0)  # the done callback of the task records the end
        return await self._fetch(request)

    async def _fetch(self, request: Request) -> Response:
        if self._of(request) is not None:
            raise BadRequest("the episode is live; POST to its /end first", status=409, code="episode_live")
        return json_answer(to_json(self._ended[request.path_params["name"]]))

    def _of(self, request: Request) -> _CreatedEpisode | None:
        """Return the live episode of a request, or None if it has ended.

        Raises:
            BadRequest: there is no such episode, or the key is wrong.
        """
        name = request.path_params["name"]
        if name not in self._keys:
            raise BadRequest("there is no such episode, or it ended long ago", status=404, code="not_found")
        self.endpoint.check_reward_key(request, self._keys[name])
        if name not in self._live and self._ended[name] is None:
            raise BadRequest("the episode failed and left no trajectory", status=410, code="episode_ended")
        return self._live.get(name)

    async def _end_idle(self) -> None:
        while True:
            await asyncio.sleep(min(self._idle_s / 4, 10.0))
            for live in list(self._live.values()):
                if live.session.idle_s > self._idle_s:
                    logger.info("the episode %s was not used for %g seconds and is ended", live.session.id, self._idle_s)
                    live.ending.set()


def _with_fresh_ids(response: ChatResponse) -> ChatResponse:
    """Return an answer with unique call ids. Each request is the first of an episode, so the original ids repeat."""
    calls = tuple(
        dataclasses.replace(c, id=f"call_{secrets.token_hex(8)}") if c.id.startswith("call_") else c for c in response.calls
    )
    return dataclasses.replace(response, calls=calls) if calls else response


def _log_failure(done: asyncio.Task[Trajectory]) -> None:
    if not done.cancelled() and (problem := done.exception()) is not None:
        logger.error("the episode of a request failed: %s", one_line(problem))
