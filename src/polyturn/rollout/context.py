"""RolloutContext: the values that every episode of a run shares, without configs. `build` makes it.

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
"""Sets of tools that agents bring, for which an encoder is kept."""
_EXPECTED = (
    ". The template or the model writes such text in its own way, and nothing needs to be done; "
    "rollout.tokenization_sanity_check_mode=ignore_strippable keeps these lines out of the log"
)
"""The end of the warning of a difference that has an explanation."""


@dataclass(kw_only=True)
class RolloutContext:
    """Shared by all episodes; holds no state of any one of them but the ids that are live.

    A copy by `dataclasses.replace` shares `reported` and `running`, and counts and caches for itself.
    """

    engine: Engine
    codec: Codec
    parser: ToolCallParser
    tools: Toolbox
    interactions: Mapping[str, Interaction]
    also: tuple[Engine, ...] = ()
    """Engines of further policies, which only those know that let them speak; closed with the run's own."""
    rewarder: RewardRouter
    scheduler: Scheduler
    """The prototype; an episode gets a copy unless the scheduler says `shared = True`."""
    limits: Limits = field(default_factory=Limits)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    interaction_timeout_s: float = 60.0
    require_interaction_name: bool = False
    """Refuse interaction kwargs that name none, instead of reading them as meant for the default interaction."""
    renders_history: bool = False
    """Sample each turn from what the template renders of the whole history, as an inference server does, instead of
    appending to what the model saw and wrote (`use_inference_chat_template`, and templates that cannot be appended to)."""
    scheduler_timeout_s: float = 60.0
    """Deadline of a scheduler's plain methods, which run in threads."""
    sanity_mode: str = "strict"
    sanity_every: int = 16
    """Every how many episodes the incremental ids are compared with a full render; 1 checks all, 0 none."""
    escape_prompts: str = "delimiters"
    """Which control texts in a prompt are ordinary text: one of `polyturn.tokens.trust.ESCAPES`."""
    escape_observations: bool = True
    """True where the words of tools and users are ordinary text, whatever they spell."""

    media: MediaProcessor | None = None
    """The model's processor, for messages that show images, videos or sounds; None for text."""

    reported: Counter[str] = field(default_factory=Counter)
    """Number of occasions for each message that is not repeated: why trajectories failed, and `warn_of`."""

    running: Counter[EpisodeState] = field(default_factory=Counter)
    """Number of episodes, and of their forks, that generate, call tools or wait for an interaction now."""

    journal: Journal | None = None
    """The storage of live episodes turn by turn, so that a resumed run goes on with them; None keeps nothing."""

    monitor: LoopMonitor | None = None
    """Names plug-ins that block the event loop; None watches nothing."""

    calls: AuthorCalls = field(init=False)
    """Calls the scheduler's methods."""
    _num_finished: int = field(init=False, default=0)
    _encoders: dict[tuple[str, ...], DeltaEncoder] = field(init=False, default_factory=dict)
    _brought: dict[tuple[str, ...], DeltaEncoder] = field(init=False, default_factory=dict)
    """Encoders by the schemas of tools that agents brought."""
    _hosts: dict[str, LoadedInteraction] = field(init=False, default_factory=dict)
    """The interactions that episodes have used, by name."""

    def __post_init__(self) -> None:
        self.calls = AuthorCalls(timeout_s=self.scheduler_timeout_s)

    def encoder_for(self, task: Task) -> DeltaEncoder:
        """Return the encoder for the tools that the task may call."""
        names = self.tools.select(task)
        if names not in self._encoders:
            self._encoders[names] = self._encoder(self.tools.schemas_of(task), self.tools.foreign)
        return self._encoders[names]

    def encoder_listing(self, tools: Sequence[Mapping[str, Any]]) -> DeltaEncoder:
        """The encoder for tools that an agent brings, as schemas in OpenAI's function form.

        Raises:
            HiddenToolsError: the chat template does not show them.
        """
        key = (json.dumps(tools, sort_keys=True),)
        if (encoder := self._brought.pop(key, None)) is None:
            if tools and not self.codec.template.shows_tools(tools):
                raise HiddenToolsError(f"the request has {len(tools)} tool(s), and {NO_TOOLS}")
            encoder = self._encoder(tools, self._not_own(tools))
        self._brought[key] = encoder  # the most recently used stands last
        if len(self._brought) > MAX_TOOL_SETS:
            del self._brought[next(iter(self._brought))]
        return encoder

    def _not_own(self, tools: Sequence[Mapping[str, Any]]) -> Collection[str]:
        """Return the names of tools that an agent brings and that are not the run's own."""
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
        """The tokens that stand for media, which no engine may sample."""
        return () if self.media is None else self.media.token_ids

    def partner_for(self, task: Task) -> InteractionSession | None:
        """Return the partner that the task's row names; None if it names none.

        Raises:
            InteractionError: the row names an interaction that is not configured.
        """
        ref = task.interaction
        if ref is None or (ref.is_optional and not self.interactions):
            return None  # rows made for runs with tools carry the column too
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
        """Close the engines, all of them also where one fails."""
        async with AsyncExitStack() as engines:
            for engine in (*self.also, self.engine):  # the last one first
                engines.push_async_callback(engine.close)

    def scheduler_for_episode(self) -> Scheduler:
        """Return the scheduler that runs one episode."""
        # Shallow: what it was made with is common to all episodes, and what one of them assigns is its own.
        return self.scheduler if self.scheduler.shared else copy.copy(self.scheduler)

    def is_sanity_due(self) -> bool:
        """Count one finished episode, and return whether its token ids are to be compared with a full render."""
        self._num_finished += 1
        is_on = self.sanity_every > 0 and self.sanity_mode not in ("disable", "off")
        return is_on and (self._num_finished - 1) % self.sanity_every == 0

    def warn_of(self, difference: sanity.Difference, *, where: str) -> None:
        """Warn of a difference between held ids and a full render, once for each kind and run.

        Mode `strict` warns of every kind, the others of those that nothing explains.
        """
        is_due = self.sanity_mode == "strict" or difference.kind == sanity.UNEXPLAINED
        if is_due and difference.kind not in self.reported:
            self.reported[difference.kind] += 1
            logger.warning(
                "Inconsistent training and inference tokenization detected (%s) in %s: %s; the sampled ids are kept%s",
                self.sanity_mode,
                where,
                difference,
                "" if difference.kind == sanity.UNEXPLAINED else _EXPECTED,
            )

    @property
    def num_live_interactions(self) -> int:
        """Number of interaction instances that are started and not finalized."""
        return sum(len(host.live_ids) for host in self._hosts.values())
