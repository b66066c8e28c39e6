"""Data to prepare a tiny model for GuessTheNumber: texts for its tokenizer, and games of beginners.

    … guess the number between 1 and 7 within 2 turns …   [4]   The target number is lower.   [2]   …

A player who halves the remaining range always finds the number in three guesses. Most beginners count up from 1, some guess
at random, and a few halve. All games are played in the package's environment, which accepts one guess more than it
announces, with other seeds than the config's. There are only seven targets, so seeds are held out, not numbers.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import polyturn
from polyturn.core.messages import Message
from polyturn.data.conversations import Conversation
from polyturn.environments import Adapter, find_adapter

NUM_NUMBERS, NUM_TURNS = 7, 2


@functools.cache
def adapter() -> Adapter:
    """Return the adapter that creates the game."""
    kwargs = {"min_number": 1, "max_number": NUM_NUMBERS, "max_turns": NUM_TURNS}
    return find_adapter("textarena:GuessTheNumber-v0", kwargs)


def demonstrations(seed: int, num_conversations: int, halving: float = 0.15, counting: float = 0.6) -> list[Conversation]:
    """Return games of beginners.

    Args:
        seed: Seed of the beginners.
        num_conversations: Number of games.
        halving: Share of beginners who guess the middle of the remaining range.
        counting: Share of beginners who guess 1, 2 and 3, whatever the hints. All others guess at random, without repeating.
    """
    rng = random.Random(f"games-{seed}")
    games = []
    for number in range(num_conversations):
        drawn = rng.random()
        kind = "halving" if drawn < halving else "counting" if drawn < halving + counting else "guessing"
        games.append(_game(rng, number, kind))
    return games


def _game(rng: random.Random, number: int, kind: str) -> Conversation:
    game: Any = adapter().make()
    messages = [Message(role="user", content=str(game.reset(seed=number + 1_000_000)))]
    low, high, left = 1, NUM_NUMBERS, list(range(1, NUM_NUMBERS + 1))
    while True:
        guess = (low + high) // 2 if kind == "halving" else left[0] if kind == "counting" else rng.choice(left)
        left.remove(guess)
        messages.append(Message(role="assistant", content=f"[{guess}]"))
        observation, _, is_done, _ = game.step(f"[{guess}]")
        if is_done:
            return Conversation(messages=tuple(messages))
        if "lower" in observation:
            high = guess - 1
        else:
            low = guess + 1
        messages.append(Message(role="user", content=observation))


def is_found(trajectory: polyturn.Trajectory) -> float:
    """Return 1 if the number was found; the game's own reward for a near miss is almost as high as for a hit."""
    return float(any(turn.scores.get("env") == 1.0 for turn in trajectory.turns))


def corpus() -> list[str]:
    """Return the texts to train the tokenizer on."""
    return [m.text for c in demonstrations(0, 400) for m in c.messages]
