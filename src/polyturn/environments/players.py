"""Players: who sits where in a game. The policy that is trained, or an opponent that is not.

    seats: [policy, policy]                          self-play: one policy, an agent of its own in each seat
    seats: [policy, random]                          any move that the game offers in '[brackets]'
    seats: [policy, "opponents.py:careful"]          a function of the observation, or a class that is called with it (and
                                                     made with a `seed`, where it takes one)
    seats: [policy, {url: "http://…/v1", model: m}]  a model behind an OpenAI-compatible endpoint

An opponent is made for each episode and seat, so it may remember. It is shown the same observations that the policy would be
shown in its place.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from polyturn.core.errors import ConfigError, EngineError, UnknownNameError, did_you_mean
from polyturn.core.registry import import_attr
from polyturn.core.signature import has_parameter
from polyturn.engines.chat_client import ChatClient, Endpoint, key_from

POLICY = "policy"
RANDOM = "random"


class Player(Protocol):
    """An opponent for one episode."""

    def act(self, observation: str) -> str | Awaitable[str]:
        """Return its move; plain or async."""
        ...


@runtime_checkable
class Recalls(Protocol):
    """A player that can be put back into a game."""

    def recall(self, observation: str, said: str) -> Any:
        """Return its move again; what it `said` in an earlier process is to be the same. Plain or async."""
        ...


MakePlayer = Callable[[int], Player]
"""From the seed of an episode's seat to its player."""

_MOVE = re.compile(r"\[([^\[\]]{1,40})\]")


def moves_in(observation: str) -> list[str]:
    """Return the moves that a text offers: what its last line with '[brackets]' has in brackets.

    moves_in("Board …\\nAvailable Moves: '[0]', '[4]'")  ->  ["[0]", "[4]"]
    """
    for line in reversed(observation.splitlines()):
        if found := _MOVE.findall(line):
            return [f"[{move}]" for move in found]
    return []


class RandomPlayer:
    """Makes any of the moves that it was last offered."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._offered: list[str] = ["[pass]"]

    def act(self, observation: str) -> str:
        """Return a move that the observation offers, else one that an earlier one did."""
        self._offered = moves_in(observation) or self._offered
        return self._random.choice(self._offered)

    def recall(self, observation: str, said: str) -> str:
        """Draw it again."""
        return self.act(observation)


class WrittenPlayer:
    """A function of the observation, or an object that is called with it."""

    def __init__(self, play: Callable[[str], Any]) -> None:
        self._play = play

    def act(self, observation: str) -> Any:
        """Return what the function says."""
        return self._play(observation)

    def recall(self, observation: str, said: str) -> Any:
        """Ask the function again, which may remember the game."""
        return self._play(observation)


class EndpointPlayer:
    """A model behind an endpoint, which remembers the game."""

    def __init__(self, client: ChatClient, *, system: str | None, options: Mapping[str, Any]) -> None:
        self._client = client
        self._options = options
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]

    async def act(self, observation: str) -> str:
        """Ask for the next move."""
        self._messages.append({"role": "user", "content": observation})
        place = self._client.endpoint
        async with self._client.in_use():
            answer = await self._client.ask({"model": place.model, "messages": self._messages, **self._options})
        try:
            said = str(answer["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError) as problem:
            raise EngineError(f"{place.url} answered nothing that can be read as a move: {answer!r:.200}") from problem
        self._messages.append({"role": "assistant", "content": said})
        return said

    def recall(self, observation: str, said: str) -> str:
        """Remember the move; the model is not asked again."""
        self._messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": said}]
        return said


def seat_players(
    seats: Sequence[str | Mapping[str, Any]], *, num_seats: int, name: str, base: Path | None
) -> tuple[MakePlayer | None, ...]:
    """Return for each seat what makes its opponent, None where the policy plays. No seats at all: the policy plays them all.

    Raises:
        ConfigError: there are more or fewer seats than the game has, the policy has none, or an opponent cannot be made.
    """
    if not seats:
        return (None,) * num_seats
    if len(seats) != num_seats:
        raise ConfigError(
            f"env {name!r} is a game of {num_seats} and env.seats has {len(seats)}, {list(seats)!r:.200}; name one each"
        )
    found = tuple(_maker(seat, name=name, base=base) for seat in seats)
    if all(maker is not None for maker in found):
        raise ConfigError(f"env {name!r}: the policy plays no seat of {list(seats)!r:.200}; put 'policy' in one of them")
    return found


def _maker(seat: str | Mapping[str, Any], *, name: str, base: Path | None) -> MakePlayer | None:
    if isinstance(seat, Mapping):
        return _endpoint_maker(seat, name=name)
    if seat == POLICY:
        return None
    if seat == RANDOM:
        return RandomPlayer
    if seat.startswith(POLICY):
        raise ConfigError(
            f"env {name!r}: the seat {seat!r} asks for another policy, and a run trains one; let {POLICY!r} play several "
            "seats, or serve the other model and give its address as {url: …, model: …}"
        )
    if ":" not in seat and "." not in seat:
        raise UnknownNameError(
            f"env {name!r}: there is no player {seat!r}.{did_you_mean(seat, [POLICY, RANDOM])} Or name a function, "
            "'file.py:function'"
        )
    play: Any = import_attr(seat, base=base)
    if not callable(play):
        raise ConfigError(
            f"env {name!r}: the player {seat!r} is {play!r:.100}; name a function of the observation, or a class"
        )
    play_or_class: Any = play
    if not inspect.isclass(play):
        return lambda seed: WrittenPlayer(play_or_class)
    takes_seed = has_parameter(play_or_class, "seed")
    return lambda seed: WrittenPlayer(play_or_class(seed=seed) if takes_seed else play_or_class())


_ENDPOINT_KEYS = (
    *("url", "model", "api_key_env", "system", "temperature"),
    *("max_tokens", "timeout_s", "max_concurrent", "max_tries"),
)


def _endpoint_maker(seat: Mapping[str, Any], *, name: str) -> MakePlayer:
    for key in seat:
        if key not in _ENDPOINT_KEYS:
            hint = did_you_mean(key, _ENDPOINT_KEYS)
            raise UnknownNameError(f"env {name!r}: a player behind an endpoint has no {key!r}.{hint}")
    if "url" not in seat or "model" not in seat:
        raise ConfigError(f"env {name!r}: a player behind an endpoint needs url and model; it has {sorted(seat)}")
    passed = {k: seat[k] for k in ("max_tokens", "timeout_s", "max_concurrent", "max_tries") if k in seat}
    place = Endpoint(url=str(seat["url"]), model=str(seat["model"]), key=key_from(seat.get("api_key_env")), **passed)
    client = ChatClient(place)
    options = {"temperature": seat["temperature"]} if "temperature" in seat else {}
    return lambda seed: EndpointPlayer(client, system=seat.get("system"), options=options)
