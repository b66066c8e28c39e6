"""Episode: a live run of one task, and `run_episode`, which turns it into a trajectory whatever happens.

The scheduler decides; the episode does: it talks to the engine, the tools and the interaction, appends tokens through the
builder, and keeps the record. An observation is encoded when the next generation needs it, so a reply that nothing follows
is recorded and never encoded.

    prepare -> generate -> (call_tools | ask_partner) -> record -> prepare -> generate -> ...
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence

from numpy.typing import ArrayLike

from polyturn.core.arrays import Ids, ids_array
from polyturn.core.builder import TrajectoryBuilder
from polyturn.core.errors import (
    AlignmentError,
    ConfigError,
    EngineError,
    LifecycleError,
    PolyturnError,
    RolloutError,
    TemplateError,
    one_line,
)
from polyturn.core.generation import Completion, GenerateRequest, SamplingParams
from polyturn.core.lifecycle import Lifecycle, RequestState, StopReason
from polyturn.core.messages import Message, to_openai
from polyturn.core.task import Task
from polyturn.core.trajectory import ToolResult, Trajectory
from polyturn.rollout import limits as limit_rules
from polyturn.rollout.context import RolloutContext, derive_seed
from polyturn.rollout.history import shorten
from polyturn.rollout.live_turn import LiveTurn
from polyturn.rollout.scheduler import Reply
from polyturn.tokens import sanity

logger = logging.getLogger(__name__)

NO_IDS = ids_array([])
BROKEN = (AlignmentError, LifecycleError, ConfigError, TemplateError, RolloutError)
"""A broken invariant or a set-up that cannot work: these end the run, not the trajectory."""


class Episode:
    """A live run of one task: what a scheduler sees and acts through."""

    def __init__(
        self, context: RolloutContext, task: Task, *, id: str, seed: int = 0, sampling: SamplingParams | None = None
    ) -> None:
        self.id = id
        self.task = task
        self.turns: list[LiveTurn] = []
        self.lifecycle = Lifecycle()
        self.limits = context.limits
        self._context = context
        self._seed = seed
        self._sampling = sampling or context.sampling
        self._encoder = context.encoder_for(task)
        self._builder = TrajectoryBuilder()
        self._tools = context.tools.session(id)
        self._partner = context.partner_for(task)
        self._messages: list[Message] = list(task.prompt)
        self._openai = to_openai(task.prompt)
        self._pending: tuple[Message, ...] = ()
        self._pending_user_reply = False
        self._user_turns = 0
        self._prompt_tokens = 0
        self._response_tokens = 0
        self._is_canonical = True
        self._started = time.monotonic()

    # What a scheduler reads.

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, as the model is shown it."""
        return tuple(self._messages)

    @property
    def has_partner(self) -> bool:
        """Whether the task's row names an interaction."""
        return self._partner is not None

    # What a scheduler does.

    async def start(self) -> None:
        """Create the tools, start the interaction, encode the prompt."""
        said = await self._tools.start(self.task)
        if self._partner is not None:
            await self._partner.start(self.id)
        self._messages += _tool_messages(said)
        self._openai = to_openai(self._messages)
        prompt_ids = self._encoder.start(self._messages)
        self._builder.open(prompt_ids)
        self._prompt_tokens = len(prompt_ids)

    async def prepare(self) -> StopReason | None:
        """Encode what waits to be shown; return the limit that forbids another generation, None if none does."""
        if not self._builder.num_segments:
            await self.start()
        ids = self._encode_pending()
        at = self._progress(num_pending=len(ids))
        reason = limit_rules.reached(self.limits, at)
        if reason in (None, StopReason.CONTEXT_FULL) and self._is_short_of_room(at) and self._shorten():
            return None
        if reason is None:
            self._show(ids)
        return reason

    async def generate(self) -> LiveTurn:
        """Let the model speak: one completion, kept as it was sampled, and the message that it reads as.

        Raises:
            EngineError: the engine is lost or refuses the request.
        """
        index = len(self.turns)
        budget = limit_rules.budget(self.limits, self._progress(), ceiling=self._sampling.max_tokens)
        sampling = dataclasses.replace(
            self._sampling,
            max_tokens=budget.tokens,
            seed=derive_seed(self._seed, index) if self._sampling.seed is None else self._sampling.seed,
            stop_token_ids=self._sampling.stop_token_ids or self._context.codec.stop_token_ids,
        )
        self._move(RequestState.GENERATING)
        began = time.monotonic()
        completion = await self._context.engine.generate(
            GenerateRequest(
                request_id=f"{self.id}/{index}",
                session_id=self.id,
                prompt_ids=self._builder.context,
                sampling=sampling,
            )
        )
        turn = LiveTurn(
            index=index,
            message=self._read(completion, index),
            completion=completion,
            cut_by=budget.cut_by,
            timings={"generate": time.monotonic() - began},
        )
        turn.spans.extend(self._builder.sample(completion, turn=index))
        self._response_tokens += len(completion.token_ids)
        self.turns.append(turn)
        self._messages.append(turn.message)
        self._openai.append(turn.message.to_openai())
        return turn

    async def call_tools(self, turn: LiveTurn) -> Reply:
        """Run the turn's tool calls; a call that fails is an observation like any other."""
        self._move(RequestState.TOOL_CALLING)
        began = time.monotonic()
        turn.tool_results = await self._tools.call(turn.message.tool_calls)
        turn.timings["tools"] = time.monotonic() - began
        for result in turn.tool_results:
            if result.reward is not None:
                key = f"tool/{result.name}"
                turn.scores[key] = turn.scores.get(key, 0.0) + result.reward
        return Reply(messages=_tool_messages(turn.tool_results))

    async def ask_partner(self, turn: LiveTurn) -> Reply:
        """Let the interaction answer the turn and score it.

        Raises:
            InteractionError: it raised, was late, or answered something that cannot be understood.
        """
        if self._partner is None:
            raise LifecycleError(f"task {self.task.id!r} has no interaction; ask `has_partner` first")
        self._move(RequestState.INTERACTING)
        began = time.monotonic()
        answer = await self._partner.reply(list(self._openai))
        turn.timings["interaction"] = time.monotonic() - began
        if answer.score is not None:
            turn.scores["interaction"] = answer.score
        return Reply(
            messages=(Message(role="user", content=answer.content, name=None),),
            is_done=answer.is_done,
            info=dict(answer.metadata),
        )

    def record(self, turn: LiveTurn, reply: Reply) -> None:
        """Keep what answered the turn; unless it ended the episode, the model is shown it before it speaks again."""
        turn.observation = reply.messages
        turn.info.update(reply.info)
        if reply.is_done:
            return
        self._pending = reply.messages
        self._pending_user_reply = "interaction" in turn.timings
        self._user_turns += self._pending_user_reply

    def weigh(self, turn: LiveTurn, weights: ArrayLike) -> None:
        """Set the loss weights of a turn's sampled tokens, one per token; 0 leaves a token out of the loss."""
        self._builder.reweigh(turn.spans[: len(turn.completion.policy_versions)], weights)

    def rewrite(self, messages: Sequence[Message]) -> None:
        """Replace the history by `messages`: a full render, which extends the segment it continues or opens a new one."""
        self._messages = list(messages)
        self._openai = to_openai(messages)
        self._pending = ()
        self._is_canonical = False
        ref = self._builder.rewrite(self._encoder.start(self._messages), turn=len(self.turns) - 1)
        if ref is not None and self.turns:
            self.turns[-1].spans.append(ref)

    # What `run_episode` does.

    async def score_last_turn(self) -> None:
        """Ask the interaction for the score of a final turn that no reply scored."""
        if self._partner is not None and self.turns and "interaction" not in self.turns[-1].timings:
            score = await self._partner.final_score()
            if score is not None:
                self.turns[-1].scores["interaction"] = score

    async def tool_rewards(self) -> dict[str, float | None]:
        """Return each tool's `calc_reward`."""
        return await self._tools.finish()

    async def close(self) -> list[str]:
        """Release the tools, finalize the interaction, free the engine's session; return what went wrong."""
        problems = [str(p) for p in await self._tools.close()]
        if self._partner is not None and (problem := await self._partner.close()) is not None:
            problems.append(problem)
        try:
            await self._context.engine.end_session(self.id)
        except EngineError as problem:
            problems.append(str(problem))
        return problems

    def trajectory(
        self, stop_reason: StopReason, *, error: str | None = None, extra: Mapping[str, float] | None = None
    ) -> Trajectory:
        """Return the record of the episode, without its reward."""
        sampled = sum(len(t.completion.token_ids) for t in self.turns)
        metrics: dict[str, float] = {
            "num_turns": len(self.turns),
            "sampled_tokens": sampled,
            "prompt_tokens": self._prompt_tokens,
            "context_tokens": len(self._builder.context) if self._builder.num_segments else 0,
            "duration_s": time.monotonic() - self._started,
        }
        for name in ("generate", "tools", "interaction"):
            metrics[f"{name}_s"] = sum(t.timings.get(name, 0.0) for t in self.turns)
        metrics["prefilled_tokens"] = sum(t.completion.info.get("prefilled_tokens", 0) for t in self.turns)
        metrics.update(extra or {})
        return Trajectory(
            id=self.id,
            task=self.task,
            segments=self._builder.build(),
            turns=tuple(t.freeze() for t in self.turns),
            stop_reason=stop_reason,
            error=error,
            metrics=metrics,
        )

    def check_tokens(self) -> dict[str, float]:
        """Compare the held ids with a full render of the same messages, if it is this episode's turn; return metrics.

        A history that was rewritten holds full renders by construction and is not compared.
        """
        if not self.turns or not self._is_canonical or not self._context.is_sanity_due():
            return {}
        full = self._encoder.full(self._messages)
        found = sanity.check(self._builder.context, full, self._context.codec, mode=self._context.sanity_mode)
        if found is None:
            return {"sanity_checked": 1.0}
        self._context.warn_of(found, where=self.id)
        return {"sanity_checked": 1.0, f"sanity_{found.kind}": 1.0}

    # Private.

    def _move(self, state: RequestState) -> None:
        self.lifecycle.move(state)
        logger.debug("%s/turn=%d %s", self.id, len(self.turns), state.value)

    def _progress(self, *, num_pending: int = 0) -> limit_rules.Progress:
        return limit_rules.Progress(
            elapsed_s=time.monotonic() - self._started,
            turns=len(self.turns),
            user_turns=self._user_turns,
            has_user_reply=self._pending_user_reply and bool(self._pending),
            response_tokens=self._response_tokens + num_pending,
            context_tokens=len(self._builder.context) + num_pending,
        )

    def _encode_pending(self) -> Ids:
        """Encode what waits to be shown: the tokens between turns, the messages, the next generation prompt."""
        if not self._pending:
            return NO_IDS
        sampled = self.turns[-1].completion.token_ids
        return self._encoder.extend(self._pending, last_id=int(sampled[-1]) if len(sampled) else None)

    def _show(self, ids: Ids) -> None:
        """Append the encoded observation to the tokens, and its messages to the history."""
        if not self._pending:
            return
        last = self.turns[-1]
        last.spans.append(self._builder.observe(ids, turn=last.index))
        self._response_tokens += len(ids)
        self._messages += self._pending
        self._openai += to_openai(self._pending)
        self._pending = ()

    def _is_short_of_room(self, at: limit_rules.Progress) -> bool:
        limit = self.limits.max_context
        return limit is not None and limit - at.context_tokens < self.limits.reserve

    def _shorten(self) -> bool:
        """Apply the context policy; return whether the history was shortened so that the next turn fits."""
        room = (self.limits.max_context or 0) - self.limits.reserve
        shorter = shorten(
            [*self._messages, *self._pending],
            policy=self.limits.context_policy,
            num_prompt=len(self.task.prompt),
            fits=lambda messages: len(self._encoder.start(messages)) <= room,
        )
        if shorter is None:
            return False
        self.rewrite(shorter)
        return True

    def _read(self, completion: Completion, index: int) -> Message:
        """Read a completion as a message. Text is a view: nothing that is read here becomes tokens again."""
        text = self._context.codec.decode_turn(completion.token_ids)
        parsed = self._context.parser.parse(text, id_prefix=f"call_{index}")
        return Message(role="assistant", content=parsed.content, tool_calls=parsed.tool_calls, reasoning=parsed.reasoning)


def _tool_messages(results: Sequence[ToolResult]) -> tuple[Message, ...]:
    return tuple(Message(role="tool", content=r.content, tool_call_id=r.call_id, name=r.name) for r in results)


async def run_episode(
    context: RolloutContext, task: Task, *, id: str, seed: int = 0, sampling: SamplingParams | None = None
) -> Trajectory:
    """Run `task` to its end and return the record, with its reward.

    A failure that the model cannot answer for ends the trajectory with its error; a broken invariant is raised.
    Tools and the interaction are released exactly once, also on error, time-out and cancellation.

    Args:
        context: What the episodes of a run share.
        task: The task.
        id: Unique among live episodes; the engine's session id.
        seed: Every random choice of the episode follows from it.
        sampling: Overrides the context's sampling.
    """
    episode = Episode(context, task, id=id, seed=seed, sampling=sampling)
    try:
        trajectory = await _run_and_score(context, episode)
    except BaseException as problem:
        is_cancelled = isinstance(problem, asyncio.CancelledError)
        episode.lifecycle.move(RequestState.ABORTED if is_cancelled else RequestState.FAILED)
        raise
    ends = {StopReason.ERROR: RequestState.FAILED, StopReason.ABORTED: RequestState.ABORTED}
    episode.lifecycle.move(ends.get(trajectory.stop_reason, RequestState.COMPLETED))
    return trajectory


async def _run_and_score(context: RolloutContext, episode: Episode) -> Trajectory:
    """Let the scheduler drive the episode, release everything, and score what came of it."""
    scheduler = context.scheduler_for_episode()
    tool_rewards: dict[str, float | None] = {}
    extra: dict[str, float] = {}
    error: str | None = None
    try:
        try:
            async with asyncio.timeout(context.limits.timeout_s) as clock:
                stop = await scheduler.run(episode)
        except TimeoutError:
            if not clock.expired():
                raise
            stop = StopReason.TIMEOUT
        if not stop.is_failure:
            extra.update(episode.check_tokens())
            episode.lifecycle.move(RequestState.SCORING)
            await episode.score_last_turn()
            tool_rewards = await episode.tool_rewards()
    except BROKEN:
        raise
    except PolyturnError as problem:
        stop, error = StopReason.ERROR, one_line(problem)
    finally:
        problems = await _close(episode)
    if problems:
        extra["close_errors"] = float(len(problems))
    trajectory = episode.trajectory(stop, error=error, extra=extra)
    if not stop.is_failure:
        try:
            reward = await context.rewarder.score(trajectory, tool_rewards)
            trajectory = dataclasses.replace(trajectory, reward=reward)
        except BROKEN:
            raise
        except PolyturnError as problem:
            trajectory = dataclasses.replace(trajectory, stop_reason=StopReason.ERROR, error=one_line(problem))
    return trajectory


async def _close(episode: Episode) -> list[str]:
    """Close the episode even while it is being cancelled; the cancellation goes on once everything is released."""
    closing = asyncio.ensure_future(episode.close())
    cancelled: asyncio.CancelledError | None = None
    while not closing.done():
        try:
            await asyncio.wait({closing})
        except asyncio.CancelledError as problem:
            cancelled = problem
    if cancelled is not None:
        raise cancelled
    return closing.result()
