"""`env: textarena:GuessTheNumber-v0`: a game of TextArena, by its own id (`pip install textarena`).

    seats         the smallest number of players that the game allows; `kwargs: {num_players: 4}` sets another number
    observations  the game's messages to a player since its last move, without that move, which the history already has
    rewards       from the game, at its end, for every player: usually 1 for a win, -1 for a loss, 0 for a draw

The game answers an invalid move with the reason and lets the player try again; a player who repeats invalid moves loses. If
a move makes the game raise, the game is over: the player who made the move gets -1 (0 in a game for one), and the turn's
info has `crashed`. Games draw from the module `random`, so each has its own random state. With an id that ends in "-train",
the model sees the observations of the package's own wrappers.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, one_line
from polyturn.environments.base import Adapter, OwnRandom, check_kwargs, known_id, require
from polyturn.rollout.env import Seated

logger = logging.getLogger(__name__)

INSTALL = "'polyturn[environments]'"
MAX_PLAYERS = 16


class TextArena(Adapter):
    """Games of TextArena."""

    replays = True

    def __init__(self, name: str, id: str, kwargs: Mapping[str, Any], *, base: Path | None = None) -> None:
        super().__init__(name, id, kwargs, base=base)
        self._package: Any = require("textarena", install=INSTALL, needed_by=name)
        known_id(id, require("textarena.envs.registration", install=INSTALL, needed_by=name).ENV_REGISTRY, name=name)
        num_players = self.kwargs.pop("num_players", None)
        if num_players is not None and not isinstance(num_players, int):
            raise ConfigError(f"env {name!r}: num_players is {num_players!r}; use a whole number")
        with contextlib.redirect_stdout(io.StringIO()):  # some games print while they are created
            check_kwargs(self._game, name=name, kwargs=kwargs)
            self.num_seats = self._smallest() if num_players is None else self._fits(num_players, or_raise=True)

    def make(self) -> TextArenaEnv:
        """Return a new game."""
        return TextArenaEnv(self._game(), num_players=self.num_seats, shows_own=self.id.endswith("-train"))

    def _game(self) -> Any:
        return self._package.make(self.id, **self.kwargs)

    def _smallest(self) -> int:
        """Return the smallest number of players that the game allows."""
        for number in range(1, MAX_PLAYERS + 1):
            if self._fits(number, or_raise=False):
                return number
        self._fits(2, or_raise=True)
        raise ConfigError(
            f"env {self.name!r} does not start with any number of players up to {MAX_PLAYERS}; set kwargs.num_players"
        )

    def _fits(self, number: int, *, or_raise: bool) -> int:
        """Return `number` if it is a number of players for the game; else return 0, or raise with `or_raise`."""
        game = self._game()
        try:
            with OwnRandom().held(seed=0):
                game.reset(num_players=number, seed=0)
            if number == 1 and not isinstance(game.state, self._package.SinglePlayerState):
                raise ValueError("it is a game for several players")
        except Exception as problem:  # a game may raise anything
            if not or_raise:
                return 0
            raise ConfigError(
                f"env {self.name!r} does not start with {number} players: {one_line(problem)}; install what the game "
                "needs, or set kwargs.num_players"
            ) from problem
        return number


class TextArenaEnv:
    """One game, for one episode."""

    def __init__(self, game: Any, *, num_players: int, shows_own: bool) -> None:
        self._game = game
        self._inner = _inner(game)
        self._num_players = num_players
        self._shows_own = shows_own
        self._random = OwnRandom()

    def reset(self, *, seed: int) -> Any:
        """Begin the game and return the first player's observation."""
        with self._random.held(seed=seed):
            self._game.reset(num_players=self._num_players, seed=seed)
            seat, observed = self._observation()
        return observed if self._num_players == 1 else Seated(seat=seat, observation=observed)

    def step(self, action: str) -> Any:
        """Make a move for the current player."""
        acting = self._inner.state.current_player_id
        crashed: dict[str, Any] = {}
        with self._random.held():
            try:
                is_done, info = self._game.step(action=action)
            except Exception as problem:  # a move that the game does not handle
                is_done, info, crashed = True, {}, {"crashed": one_line(problem)}
                logger.warning("textarena: a game raised at the move %r: %s", action[:100], one_line(problem))
            seat, observed = (acting, "") if crashed else self._observation()
            rewards = self._rewards(acting, has_crashed=bool(crashed)) if is_done else {}
            game_info = self._inner.state.game_info if is_done else {}
        info = {**(info or {}), **crashed, **({"reason": game_info[acting].get("reason")} if acting in game_info else {})}
        if is_done and not observed:
            observed = str(info.get("reason") or crashed.get("crashed") or "")
        if self._num_players == 1:
            return observed, rewards.get(0, 0.0), bool(is_done), info
        return Seated(seat=seat, observation=observed, rewards=rewards, terminated=bool(is_done), info=info)

    def close(self) -> None:
        """Do nothing: a game's `close` only reads its rewards."""

    def _rewards(self, acting: int, *, has_crashed: bool) -> dict[int, float]:
        if has_crashed:
            return {acting: 0.0 if self._num_players == 1 else -1.0}
        rewards, _ = self._game.close()
        return {int(seat): float(reward) for seat, reward in (rewards or {}).items()}

    def _observation(self) -> tuple[int, str]:
        """Return the current player, and the messages that this player has not seen yet."""
        if self._shows_own:
            seat, text = self._game.get_observation()
            return int(seat), str(text)
        seat, messages = self._inner.get_observation()
        names = self._inner.state.role_mapping
        lines = []
        for sender, text, _ in messages:
            if sender == seat:
                continue
            lines.append(str(text) if sender < 0 else f"[{names.get(sender, f'Player {sender}')}] {text}")
        return int(seat), "\n".join(lines)


def _inner(game: Any) -> Any:
    """Return the game inside its wrappers."""
    import textarena

    while isinstance(game, textarena.Wrapper):
        game = game.env
    return game
