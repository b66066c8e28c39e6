"""RolloutContext: the objects and settings that all episodes of a run share. `build` makes it from the configuration.

context = RolloutContext(engine=…, codec=…, parser=…, tools=Toolbox(…), interactions={"gsm8k": …}, rewarder=…, …)
trajectory = await run_episode(context, task, id="g0/0", seed=1)
"""

from __future__ import annotations

import copy
import json
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from polyturn.core.errors import HiddenToolsError, InteractionError
from polyturn.core.generation import SamplingParams
from polyturn.core.lifecycle import EpisodeState
from polyturn.core.protocols import Engine, Interaction, Scheduler
from polyturn.core.task import Task
from polyturn.infra.loop import LoopMonitor
from polyturn.interactions.registry import missing_interaction_name, unknown_interaction
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.calls import AuthorCalls
from polyturn.rollout.interaction_session import InteractionSession, LoadedInteraction
from polyturn.rollout.journal_protocol import Journal
from polyturn.rollout.limits import Limits
from polyturn.tokens import sanity
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.multimodal import MediaProcessor
from polyturn.tokens.parsers import ToolCallParser
from polyturn.tokens.templates import NO_TOOLS
from polyturn.tokens.trust import name_of
from polyturn.tools.toolbox import Toolbox

logger = logging.getLogger(__name__)

MAX_TOOL_SETS = 256
"""Largest number of agents' tool lists (`encoder_listing`) whose encoders are cached."""
_EXPECTED = " (rollout.tokenization_sanity_check_mode: ignore_strippable hides this line)"
"""The end of the line about a difference with a known, harmless cause."""


@dataclass(kw_only=True)
class RolloutContext:
    """The objects that all episodes share; the only state of single episodes is the ids of live interactions.

    A copy by `dataclasses.replace` shares `reported` and `running`; its other counters and its caches start empty.
    """

    engine: Engine
    codec: Codec
    parser: ToolCallParser
    tools: Toolbox
    interactions: Mapping[str, Interaction]
    also: tuple[Engine, ...] = ()
    """Engines of further policies, used only by the plug-ins that hold them; closed with `engine`."""
    rewarder: RewardRouter
    needs_rewards: bool = True
    """Whether every trajectory needs a reward; otherwise those of tasks that nothing scores have none."""
    scheduler: Scheduler
    """The prototype; each episode gets a copy unless the scheduler sets `shared = True`."""
    limits: Limits = field(default_factory=Limits)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    interaction_timeout_s: float = 60.0
    require_interaction_name: bool = False
    """Whether interaction kwargs without a name are an error; otherwise they go to the default interaction."""
    renders_history: bool = False
    """Sample each turn from a full render of the history, as an inference server does, instead of appending to the ids that
    the model has seen and written (`use_inference_chat_template`, and templates that cannot be appended to)."""
    scheduler_timeout_s: float = 60.0
    """Deadline of the calls of a scheduler's methods; `AuthorCalls` describes the time that it covers."""
    sanity_mode: str = "strict"
    """One of `polyturn.tokens.sanity.MODES`."""
    sanity_every: int = 16
    """Interval, in episodes, at which the incremental ids are compared with a full render; 1 checks all, 0 none."""
    escape_prompts: str = "delimiters"
    """Which texts of control tokens in a prompt are encoded as ordinary text: one of `polyturn.tokens.trust.ESCAPES`."""
    escape_observations: bool = True
    """Whether texts of control tokens in messages of tools and users are encoded as ordinary text."""

    media: MediaProcessor | None = None
    """The model's processor for images, videos and sounds in messages; None for a text-only model."""

    reported: Counter[str] = field(default_factory=Counter)
    """Reason -> number of occurrences, for warnings that are not repeated each time: failed trajectories, and `warn_of`."""

    running: Counter[EpisodeState] = field(default_factory=Counter)
    """Number of episodes and forks that are now generating, calling tools or waiting for an interaction."""

    journal: Journal | None = None
    """Stores live episodes turn by turn, so that a resumed run continues them; None stores nothing."""

    monitor: LoopMonitor | None = None
    """Reports plug-ins that block the event loop; None disables this."""

    calls: AuthorCalls = field(init=False)
    """Calls the scheduler's methods."""
    _num_finished: int = field(init=False, default=0)
    _encoders: dict[tuple[str, ...], DeltaEncoder] = field(init=False, default_factory=dict)
    _brought: dict[tuple[str, ...], DeltaEncoder] = field(init=False, default_factory=dict)
    """Tool schemas of an agent, as JSON -> encoder; the most recently used one is last."""
    _hosts: dict[str, LoadedInteraction] = field(init=False, default_factory=dict)
    """The interactions that episodes have used, by name."""

    def __post_init__(self) -> None:
        self.sanity_mode = sanity.check_mode(self.sanity_mode)
        self.calls = AuthorCalls(timeout_s=self.scheduler_timeout_s)

    def scores(self, task: Task) -> bool:
        """Return whether something gives the task its reward (`RewardRouter.scores`)."""
        return self.rewarder.scores(task, tools=self.tools.tools, scoring=self.tools.scoring)

    def encoder_for(self, task: Task) -> DeltaEncoder:
        """Return the encoder for the task's tools."""
        names = self.tools.select(task)
        if names not in self._encoders:
            self._encoders[names] = self._encoder(self.tools.schemas_of(task), self.tools.foreign)
        return self._encoders[names]

    def encoder_listing(self, tools: Sequence[Mapping[str, Any]]) -> DeltaEncoder:
        """Return the encoder for tools that an agent brings, as schemas in OpenAI's function form.

        Raises:
            HiddenToolsError: the chat template does not render tools.
        """
        key = (json.dumps(tools, sort_keys=True),)
        if (encoder := self._brought.pop(key, None)) is None:
            if tools and not self.codec.template.shows_tools(tools):
                raise HiddenToolsError(f"the request has {len(tools)} tool(s), and {NO_TOOLS}")
            encoder = self._encoder(tools, self._not_own(tools))
        self._brought[key] = encoder  # most recently used last
        if len(self._brought) > MAX_TOOL_SETS:
            del self._brought[next(iter(self._brought))]
        return encoder

    def _not_own(self, tools: Sequence[Mapping[str, Any]]) -> Collection[str]:
        """Return the names of the agent's tools whose schema is not that of a tool of the run's owner."""
        own = [schema for name, schema in self.tools.schemas.items() if name not in self.tools.foreign]
        return [name_of(tool) for tool in tools if tool not in own]

    def _encoder(self, tools: Sequence[Mapping[str, Any]], foreign: Collection[str]) -> DeltaEncoder:
        return DeltaEncoder(
            self.codec,
            tools=tools,
            foreign_tools=foreign,
            media=self.media,
            escape_prompts=self.escape_prompts,
            escape_observations=self.escape_observations,
        )

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """The placeholder tokens of media, which an engine must not sample."""
        return () if self.media is None else self.media.token_ids

    def partner_for(self, task: Task) -> InteractionSession | None:
        """Return a session with the interaction that the task's row names; None if the row does not name one.

        Raises:
            InteractionError: the row names an interaction that is not configured.
        """
        ref = task.interaction
        if ref is None or (ref.is_optional and not self.interactions):
            return None  # rows for runs with tools may name an interaction as well
        if self.require_interaction_name and "name" not in ref.kwargs:
            raise InteractionError(missing_interaction_name(self.interactions))
        if ref.name not in self.interactions:
            raise InteractionError(unknown_interaction(ref.name, self.interactions))
        host = self._hosts.get(ref.name)
        if host is None:
            timeout_s = self.interaction_timeout_s
            host = self._hosts[ref.name] = LoadedInteraction(self.interactions[ref.name], ref.name, timeout_s=timeout_s)
        return InteractionSession(host, ref)

    async def close(self) -> None:
        """Close all engines, even if closing one of them fails."""
        async with AsyncExitStack() as engines:
            for engine in (*self.also, self.engine):  # the stack closes the last one first
                engines.push_async_callback(engine.close)

    def scheduler_for_episode(self) -> Scheduler:
        """Return the scheduler that runs one episode."""
        # A shallow copy: episodes share the constructor's objects, and an assignment in one does not reach the others.
        return self.scheduler if self.scheduler.shared else copy.copy(self.scheduler)

    def counted(self, reason: str) -> tuple[int, str]:
        """Count a reason; return the level of its message, and " (10 trajectories so far)" unless it is the first.

        The level is WARNING for the first, tenth, hundredth … time, and otherwise DEBUG.
        """
        self.reported[reason] += 1
        count = self.reported[reason]
        level = logging.WARNING if count == 10 ** (len(str(count)) - 1) else logging.DEBUG
        return level, f" ({count} trajectories so far)" if count > 1 else ""

    def is_sanity_due(self) -> bool:
        """Count one finished episode, and return whether to compare its token ids with a full render."""
        self._num_finished += 1
        is_on = self.sanity_every > 0 and self.sanity_mode != "off"
        return is_on and (self._num_finished - 1) % self.sanity_every == 0

    def warn_of(self, difference: sanity.Difference, *, where: str) -> None:
        """Log one line about a difference between an episode's ids and a full render, once for each kind and run.

        An unexplained difference is a WARNING. The others are harmless: an INFO in mode `strict`, no line in other modes.
        """
        is_due = self.sanity_mode == "strict" or difference.kind == sanity.UNEXPLAINED
        if is_due and difference.kind not in self.reported:
            self.reported[difference.kind] += 1
            level, hint = (logging.WARNING, "") if difference.kind == sanity.UNEXPLAINED else (logging.INFO, _EXPECTED)
            logger.log(level, "token check of %s: %s%s", where, difference, hint)
            logger.debug("%s has %r where its template would write %r", where, difference.kept, difference.full)

    @property
    def num_live_interactions(self) -> int:
        """Number of interaction instances that are started and not yet finalized."""
        return sum(len(host.live_ids) for host in self._hosts.values())
