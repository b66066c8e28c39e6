"""Players: each seat of a game is played by the trained policy or by an opponent.

    seats: [policy, policy]                          self-play: one policy, with a separate agent in each seat
    seats: [policy, random]                          a random one of the moves that the game offers in '[brackets]'
    seats: [policy, "opponents.py:careful"]          a function of the observation, or a class whose objects are called with
                                                     it (created with a `seed`, if the constructor takes one)
    seats: [policy, opponent]                        a further policy of the run, a key of the section `policies`
    seats: [policy, {policy: opponent, temperature: 0.5, system: "Play badly."}]
    seats: [policy, {url: "http://…/v1", model: m}]  a model behind an OpenAI-compatible endpoint
    seats: [policy, [policy, past, random]]          one of these, drawn for each task: a league

A new opponent is created for each episode and seat, so it may keep state. It sees the observations that the policy would see
in this seat. A further policy of the run also gets the same prompt, and its actions are parsed in the same way.
"""

from __future__ import annotations

import functools
import inspect
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from polyturn.core.errors import ConfigError, EngineError, UnknownNameError, did_you_mean
from polyturn.core.generation import SamplingParams
from polyturn.core.messages import Message, Origin
from polyturn.core.secrets import token_from
from polyturn.core.seeds import derive_seed
from polyturn.infra.live import LiveObject, NameOrObject
from polyturn.infra.plugin_shape import has_parameter
from polyturn.infra.plugins import import_attr
from polyturn.partners.client import ChatClient, Endpoint
from polyturn.partners.policy import SAMPLED_WITH, FrozenPolicy, Policies, policy_named, sampled_with
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.schedulers.environment import with_text

POLICY = "policy"
RANDOM = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerSlot:
    """A seat of a game in one episode."""

    id: str
    """Unique among the slots of live episodes."""
    seed: int
    prompt: tuple[Message, ...] = ()
    """The prompt that the policy would have in this seat, before the game's observations."""
    action_of: Callable[[str, Message], str]
    """(full text, parsed message) of a policy's turn -> its action."""


class Player(Protocol):
    """An opponent for one episode."""

    def act(self, observation: str) -> str | Awaitable[str]:
        """Return the player's move; sync or async."""
        ...


@runtime_checkable
class Recalls(Protocol):
    """A player that can resume a game."""

    def recall(self, observation: str, reply: str) -> Any:
        """Return the move for an observation again; it must equal `reply`, the move of an earlier process. Sync or async."""
        ...


@runtime_checkable
class Leaves(Protocol):
    """A player that must release something when the game is over."""

    async def leave(self) -> None:
        """Release the player's resources."""
        ...


MakePlayer = Callable[[PlayerSlot], Player]
"""Creates the player of an episode's seat."""
Named = MakePlayer | None | tuple[MakePlayer | None, ...]
"""The player of a seat: None is the trained policy; from a tuple, one is drawn for each task."""

_MOVE = re.compile(r"\[([^\[\]]{1,40})\]")


def moves_in(observation: str) -> list[str]:
    """Return the moves that a text offers: the bracketed texts of its last line with '[brackets]'.

    moves_in("Board …\\nAvailable Moves: '[0]', '[4]'")  ->  ["[0]", "[4]"]
    """
    for line in reversed(observation.splitlines()):
        if moves := _MOVE.findall(line):
            return [f"[{move}]" for move in moves]
    return []


class RandomPlayer:
    """Plays a random one of the latest moves that the game offered."""

    def __init__(self, seat: PlayerSlot) -> None:
        self._random = random.Random(seat.seed)
        self._offered: list[str] = ["[pass]"]

    def act(self, observation: str) -> str:
        """Return a move that the observation offers, or one of the latest offered before."""
        self._offered = moves_in(observation) or self._offered
        return self._random.choice(self._offered)

    def recall(self, observation: str, reply: str) -> str:
        """Draw the move again, which also advances the random state."""
        return self.act(observation)


class WrittenPlayer:
    """A player written in Python: a function of the observation, or a callable object."""

    def __init__(self, play: Callable[[str], Any]) -> None:
        self._play = play

    def act(self, observation: str) -> Any:
        """Return the function's action."""
        return self._play(observation)

    def recall(self, observation: str, reply: str) -> Any:
        """Call the function again, because it may keep state."""
        return self._play(observation)


@keeps_deadlines
class EndpointPlayer:
    """A model at an endpoint; keeps the messages of the game."""

    def __init__(self, client: ChatClient, *, system: str | None, options: Mapping[str, Any]) -> None:
        self._client = client
        self._options = options
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]

    async def act(self, observation: str) -> str:
        """Request the next move."""
        self._messages.append({"role": "user", "content": observation})
        endpoint = self._client.endpoint
        async with self._client.in_use():
            answer = await self._client.ask({"model": endpoint.model, "messages": self._messages, **self._options})
        try:
            reply = str(answer["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError) as problem:
            raise EngineError(f"the answer of {endpoint.url} contains no move: {answer!r:.200}") from problem
        self._messages.append({"role": "assistant", "content": reply})
        return reply

    def recall(self, observation: str, reply: str) -> str:
        """Store the move without calling the model again."""
        self._messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": reply}]
        return reply


@keeps_deadlines
class PolicyPlayer:
    """A further policy of the run that plays instead of the trained one."""

    def __init__(self, policy: FrozenPolicy, seat: PlayerSlot, *, sampling: SamplingParams, system: str | None) -> None:
        self.name = policy.name
        self.version: int | None = None
        """Version of the weights that made the latest move."""
        self._policy = policy
        self._seat = seat
        self._sampling = sampling
        self._system = system
        self._messages: list[Message] = []
        self._num_moves = 0

    async def act(self, observation: str) -> str:
        """Return the action of the policy's next turn.

        Raises:
            EngineError: the game exceeds the policy's context, or its engine is lost.
        """
        seat = self._seat
        self._see(observation)
        seed = derive_seed(seat.seed, "move", self._num_moves)
        reply = await self._policy.say(self._messages, seed=seed, session=seat.id, sampling=self._sampling)
        self._messages.append(reply.message)
        self._num_moves += 1
        self.version = reply.version
        return seat.action_of(reply.text, reply.message)

    def recall(self, observation: str, reply: str) -> str:
        """Store the move without sampling again."""
        self._see(observation)
        self._messages.append(Message(role="assistant", content=reply, origin=Origin.MODEL))
        self._num_moves += 1
        return reply

    def _see(self, observation: str) -> None:
        if self._messages:
            self._messages.append(Message(role="user", content=observation, origin=Origin.ENVIRONMENT))
            return
        prompt = tuple(m for m in self._seat.prompt if m.text.strip())
        if self._system is not None:
            prompt = (
                Message(role="system", content=self._system, origin=Origin.OWNER),
                *(m for m in prompt if m.role != "system"),
            )
        self._messages += with_text(prompt or (Message(role="user", content=""),), observation)

    async def leave(self) -> None:
        """Release the game in the policy's engine."""
        await self._policy.end(self._seat.id)


def seat_players(
    seats: Sequence[NameOrObject | Mapping[str, Any] | Sequence[NameOrObject | Mapping[str, Any]]],
    *,
    num_seats: int,
    name: str,
    base: Path | None,
    policies: Policies | None = None,
) -> tuple[Named, ...]:
    """Return the player of each seat; None is the policy. If `seats` is empty, the policy plays all of them.

    Raises:
        ConfigError: the number of seats does not fit the game, no seat always belongs to the policy, or an opponent cannot
            be created.
    """
    if not seats:
        return (None,) * num_seats
    if len(seats) != num_seats:
        raise ConfigError(
            f"env {name!r} has {num_seats} seats, but env.seats names {len(seats)}, {list(seats)!r:.200}; name one per seat"
        )
    make = functools.partial(_maker, name=name, base=base, policies=policies or {})
    players: list[Named] = []
    for seat in seats:
        if isinstance(seat, str | LiveObject | Mapping):
            players.append(make(seat))
        elif seat:
            players.append(tuple(make(one) for one in seat))
        else:
            raise ConfigError(f"env {name!r}: a seat is an empty list; name the players to draw from")
    if None not in players:
        raise ConfigError(
            f"env {name!r}: no seat of {list(seats)!r:.200} always belongs to the policy; put 'policy' in one of them"
        )
    return tuple(players)


def _maker(seat: NameOrObject | Mapping[str, Any], *, name: str, base: Path | None, policies: Policies) -> MakePlayer | None:
    if isinstance(seat, Mapping):
        return _policy_maker(seat, name=name, policies=policies) if "policy" in seat else _endpoint_maker(seat, name=name)
    if seat == POLICY:
        return None
    if seat == RANDOM:
        return RandomPlayer
    if seat in policies:
        return _policy_maker({"policy": seat}, name=name, policies=policies)
    if isinstance(seat, str) and ":" not in seat and "." not in seat:
        hint = did_you_mean(seat, [POLICY, RANDOM, *policies])
        raise UnknownNameError(
            f"env {name!r}: there is no player {seat!r}.{hint} Or name a further model in the section `policies`, or a "
            "function, 'file.py:function'"
        )
    play: Any = import_attr(seat, base=base)
    if not callable(play):
        raise ConfigError(
            f"env {name!r}: the player {seat!r} is {play!r:.100}; use a function of the observation, or a class"
        )
    play_or_class: Any = play
    if not inspect.isclass(play):
        return lambda seat: WrittenPlayer(play_or_class)
    takes_seed = has_parameter(play_or_class, "seed")
    return lambda seat: WrittenPlayer(play_or_class(seed=seat.seed) if takes_seed else play_or_class())


_POLICY_KEYS = ("policy", "system", *SAMPLED_WITH)


def _policy_maker(settings: Mapping[str, Any], *, name: str, policies: Policies) -> MakePlayer:
    who = f"env {name!r}, a seat"
    for key in settings:
        if key not in _POLICY_KEYS:
            raise UnknownNameError(f"{who}: a further policy of the run has no {key!r}.{did_you_mean(key, _POLICY_KEYS)}")
    policy = policy_named(settings["policy"], policies, who=who)
    system = settings.get("system")
    if system is not None and (not isinstance(system, str) or not system.strip()):
        raise ConfigError(f"{who}: system is {system!r:.100}; use a text")
    sampling = sampled_with(policy, settings, who=who)
    return lambda seat: PolicyPlayer(policy, seat, sampling=sampling, system=system)


_ENDPOINT_KEYS = (
    *("url", "model", "api_key_env", "system", "temperature"),
    *("max_tokens", "timeout_s", "max_concurrent", "max_tries"),
)


def _endpoint_maker(seat: Mapping[str, Any], *, name: str) -> MakePlayer:
    for key in seat:
        if key not in _ENDPOINT_KEYS:
            hint = did_you_mean(key, _ENDPOINT_KEYS)
            raise UnknownNameError(f"env {name!r}: a player at an endpoint has no option {key!r}.{hint}")
    if "url" not in seat or "model" not in seat:
        raise ConfigError(f"env {name!r}: a player at an endpoint needs url and model; this one has {sorted(seat)}")
    passed = {k: seat[k] for k in ("max_tokens", "timeout_s", "max_concurrent", "max_tries") if k in seat}
    token = token_from({"token_env": seat.get("api_key_env")}, where=f"env {name!r}: api_key_env")
    endpoint = Endpoint(url=str(seat["url"]), model=str(seat["model"]), key=token, **passed)
    client = ChatClient(endpoint)
    options = {"temperature": seat["temperature"]} if "temperature" in seat else {}
    system = seat.get("system")
    return lambda slot: EndpointPlayer(client, system=system, options=options)
