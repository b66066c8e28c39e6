"""SimulatedUser: a model plays the user, with a persona, a goal, stop rules and a budget.

    class_name: polyturn.interactions.simulated_user.SimulatedUser
    config: {base_url: "http://127.0.0.1:8000/v1", model: my-model, stop_marker: "[[DONE]]", max_user_turns: 6}

    row: "interaction": {"name": "user", "goal": "Book a table for two.", "persona": "In a hurry, writes little."}

The model is at an OpenAI-compatible endpoint, is a further policy of the run (`policy: NAME`, a key of the section
`policies`), or is the trained policy itself (`model: policy`). In the last case its text is recorded under a separate agent
and by default not trained. Only counters are stored between replies. Everything else follows from the messages, so branches
of a conversation do not affect each other.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from pydantic import model_validator

from polyturn.core.code_origin import defined_at
from polyturn.core.errors import ConfigError, DataError, EngineError, InteractionError, one_line, plugin_errors_as
from polyturn.core.seeds import derive_seed
from polyturn.infra.deadline import CallWithDeadline, DeadlineError
from polyturn.infra.plugins import import_attr
from polyturn.infra.settings import AtLeastOne, Score, Text
from polyturn.interactions.base import ConversationView, SpeakOptions, ViewInteraction
from polyturn.interactions.roles import UserTurns, flipped
from polyturn.partners.partner import (
    Partner,
    PartnerReply,
    PartnerSettings,
    PolicyPartner,
    partner_of,
    without_thoughts,
)
from polyturn.partners.policy import Policies

POLICY = "policy"
"""The value of `model` for the run's own model."""
MAX_TOKENS = 256
"""Largest number of tokens of a reply, if neither the settings nor the further policy set one."""
MAX_EMPTY = 3
"""Number of attempts to get a reply that is not empty."""
STOP_TIMEOUT_S = 10.0
"""Seconds within which `stop_when` must return."""

INSTRUCTIONS = """\
You play a person who talks with an assistant. You are the person, never the assistant.

Who you are: {persona}
What you want: {goal}

Write only your next message, in the words that this person would use. Stay with what you want, answer questions from what \
is written here, and make up no facts beyond it. Do not help the assistant, and do not say that you are played."""
STOP_RULE = "When you have what you want, or see that you will not get it, end your message with {marker}"

Predicate = Callable[[Sequence[Mapping[str, Any]]], Any]


class UserSettings(PartnerSettings):
    """The settings of a simulated user, including those of its model."""

    name: str = ""
    persona: Text = "An ordinary person."
    """The persona if the row has none."""
    goal: Text | None = None
    """The goal if the row has none; null requires one in every row."""
    instructions: Text = INSTRUCTIONS
    """The model's instructions; {persona}, {goal} and further keys of the row are filled in."""
    stop_marker: Text | None = "[[DONE]]"
    """A text with which the user ends the conversation, hidden from the policy; null for no such rule."""
    max_user_turns: AtLeastOne | None = None
    """Largest number of replies; the conversation ends at the turn that would need another."""
    stop_when: Text | None = None
    """`file.py:function`, called with the messages including the user's reply; a result of True ends the conversation."""
    max_calls: AtLeastOne | None = None
    """Largest number of requests to the model in one conversation, after which the user ends it."""
    done_score: Score | None = 1.0
    """The score of the turn after which the user ends the conversation by marker or `stop_when`; null for no score."""
    other_score: Score | None = 0.0
    """The score of every other turn; null for no score."""
    agent: Text = "user"
    """With the run's own model: the agent's name in the records."""
    train: bool = False
    """With the run's own model: whether the user's tokens are trained, with the trajectory's reward."""
    seed: int = 0
    """The seed outside an episode."""

    @model_validator(mode="after")
    def _names_another_agent(self) -> Self:
        if self.agent == "assistant":
            raise ValueError("agent is 'assistant', which is the model's own name; use another one for the user")
        return self


class SimulatedUser(ViewInteraction):
    """An interaction in which a model plays the user."""

    def __init__(self, config: dict[str, Any], *, base: Path | None = None, policies: Policies | None = None) -> None:
        """Read the config; `policies` are the run's further policies.

        Raises:
            ConfigError: a setting is unknown or invalid.
        """
        super().__init__(config)
        who = self._who = f"the simulated user {self.name!r}"
        settings = self._settings = UserSettings.read(config, who=who)
        self.reply_timeout_s = math.inf  # the model's requests have their own deadlines
        self._partner: Partner | None = None
        self._policy: str | None = None
        if settings.policy is None and settings.model == POLICY:
            self._options = _speak_options(settings, who=who)
        elif settings.train:
            named = settings.policy or settings.model
            raise ConfigError(f"{who}: train is on, but {named!r} is not the run's own model; set model: {POLICY}")
        else:
            at_endpoint = {"max_tokens": settings.max_tokens or MAX_TOKENS} if settings.policy is None else {}
            partner = partner_of(settings.model_copy(update=at_endpoint), who=who, base=base, policies=policies)
            self._partner = partner
            if isinstance(partner, PolicyPartner):
                self._policy = partner.policy.name
            else:
                self.reply_timeout_s = MAX_EMPTY * settings.deadline_s + 5.0
        self._predicate: Predicate | None = None
        if settings.stop_when is not None:
            self._predicate = import_attr(settings.stop_when, base=base)
        self._bounded = CallWithDeadline(name="stop_when", timeout_s=STOP_TIMEOUT_S)
        self._live: dict[str, _SimulatedEpisode] = {}

    def check_setup(self) -> None:
        """Refuse an endpoint that does not answer."""
        if self._partner is not None:
            self._partner.require()

    def check_row(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse a row without a goal, or whose instructions cannot be filled in."""
        self._instructions(kwargs)

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin one episode; the row has a `goal` and optionally a `persona`."""
        self._instructions(kwargs)
        instance_id = str(uuid4()) if instance_id is None else instance_id
        live = self._live[instance_id] = _SimulatedEpisode()
        if self._partner is not None:
            await live.stack.enter_async_context(self._partner.in_use())
        return instance_id

    async def respond(
        self, view: ConversationView | None, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Answer the model as the user.

        Raises:
            InteractionError: the user's model returned empty texts, or is the run's own model and there is no run.
            EngineError: the endpoint did not answer.
        """
        settings, live = self._settings, self._live[instance_id]
        number = live.turn_of(messages) if view is None else view.num_user_turns
        user_id = instance_id if view is None else view.id
        if settings.max_user_turns is not None and number >= settings.max_user_turns:
            return self._end("", why="max_user_turns", number=number)
        messages_seen = flipped(messages, instructions=self._instructions(kwargs))
        reply = await self._say(view, messages_seen, live=live, user_id=user_id, number=number)
        if reply is None:
            return self._end("", why="max_calls", number=number)
        text, why = reply.text, None
        if settings.stop_marker and settings.stop_marker in text:
            text, why = text.replace(settings.stop_marker, "").strip(), "marker"
        elif self._predicate is not None and await self._stops([*messages, {"role": "user", "content": text}]):
            why = "predicate"
        used: dict[str, Any] = {
            "user_tokens": reply.completion_tokens,
            "user_prompt_tokens": reply.prompt_tokens,
            "user_cached": reply.is_cached,
        }
        if self._policy is not None:
            used |= {"user_policy": self._policy, "user_policy_version": reply.version}
        if why is not None:
            return self._end(text, why=why, number=number, **used)
        return False, text, settings.other_score, {"user_turn": number, **used}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Return the score of a turn without an answer."""
        return self._settings.other_score  # type: ignore[return-value]

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Delete the episode's state; an unknown id raises KeyError."""
        live = self._live.pop(instance_id)  # type: ignore[arg-type]
        if self._partner is not None:
            for user_id in live.num_calls:
                await self._partner.end(self._session(user_id))
        await live.stack.aclose()

    async def snapshot(self, instance_id: str) -> dict[str, Any]:
        """Return the state of an episode."""
        live = self._live[instance_id]
        return {"num_calls": dict(live.num_calls), "first": live.first}

    async def restore(self, instance_id: str, state: Mapping[str, Any]) -> None:
        """Restore the state that `snapshot` returned."""
        live = self._live[instance_id]
        live.num_calls, live.first = dict(state["num_calls"]), state["first"]

    async def _say(
        self,
        view: ConversationView | None,
        messages_seen: list[dict[str, Any]],
        *,
        live: _SimulatedEpisode,
        user_id: str,
        number: int,
    ) -> PartnerReply | None:
        """Return the simulated user's next reply, which is not empty; None if `max_calls` allows no further request."""
        for attempt in range(MAX_EMPTY):
            if self._settings.max_calls is not None and live.num_calls.get(user_id, 0) >= self._settings.max_calls:
                return None
            live.num_calls[user_id] = live.num_calls.get(user_id, 0) + 1
            if self._partner is not None:
                start = (user_id, self._settings.seed) if view is None else (view.seed, self._settings.seed)
                seed = derive_seed(*start, "user", number, attempt)
                try:
                    reply = await self._partner.say(messages_seen, seed=seed, session=self._session(user_id))
                except EngineError as problem:
                    raise EngineError(f"{self._who}: {problem}") from problem
            elif view is None:
                raise InteractionError(f"{self._who} uses the run's own model (model: {POLICY}), but there is no run")
            else:
                message = await view.speak(messages_seen, self._options)
                reply = PartnerReply(text=without_thoughts(message.text))
            if reply.text:
                return reply
        raise InteractionError(
            f"{self._who}: its model returned {MAX_EMPTY} empty answers; raise max_tokens if it reasons first"
        )

    def _session(self, user_id: str) -> str:
        return f"{self.name}/{user_id}"

    def _end(self, text: str, *, why: str, number: int, **info: Any) -> tuple[bool, str, float | None, dict[str, Any]]:
        is_own = why in ("marker", "predicate")
        score = self._settings.done_score if is_own else self._settings.other_score
        return True, text, score, {"user_turn": number, "user_stop": why, **info}

    async def _stops(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        assert self._predicate is not None
        at = defined_at(self._predicate)
        with plugin_errors_as(f"{self._who}: stop_when", InteractionError):
            try:
                answer = await self._bounded.run(functools.partial(self._predicate, messages))
            except DeadlineError as problem:
                late = f"{self._who}: stop_when took longer than {STOP_TIMEOUT_S:g} s; make it quicker{at}"
                raise InteractionError(late) from problem
        if answer not in (True, False, None):
            raise InteractionError(f"{self._who}: stop_when returned {answer!r:.100}; return True or False{at}")
        return bool(answer)

    def _instructions(self, kwargs: Mapping[str, Any]) -> str:
        settings = self._settings
        goal = kwargs.get("goal") or settings.goal
        if not isinstance(goal, str) or not goal.strip():
            raise DataError(
                f"{self._who} has no goal: the row's interaction kwargs have {sorted(kwargs)}; add a `goal` to them, or set "
                "one for all rows in the user's config"
            )
        known = {**kwargs, "goal": goal, "persona": kwargs.get("persona") or settings.persona}
        try:
            instructions = settings.instructions.format_map(known)
        except (LookupError, AttributeError, TypeError, ValueError) as problem:
            raise DataError(
                f"{self._who}: the instructions cannot be filled in ({one_line(problem)}); the row has {sorted(known)}, and "
                "literal braces must be doubled"
            ) from problem
        rule = "" if settings.stop_marker is None else "\n\n" + STOP_RULE.format(marker=settings.stop_marker)
        return instructions + rule


@dataclass(slots=True)
class _SimulatedEpisode(UserTurns):
    """One episode."""

    num_calls: dict[str, int] = field(default_factory=dict)
    """Conversation -> number of requests; each branch has its own budget."""
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)


def _speak_options(settings: UserSettings, *, who: str) -> SpeakOptions:
    """Return the sampling options for the run's own model when it plays the user."""
    settings.refuse_endpoint(but=("model",), who=who, instead=f"model is {POLICY}, the run's own")
    if settings.train and (settings.temperature is not None or settings.top_p is not None):
        raise ConfigError(
            f"{who}: train is on, but trained tokens must be sampled with the run's settings; remove temperature and top_p"
        )
    return SpeakOptions(
        agent=settings.agent,
        max_tokens=settings.max_tokens or MAX_TOKENS,
        temperature=settings.temperature,
        top_p=settings.top_p,
        is_trained=settings.train,
    )
