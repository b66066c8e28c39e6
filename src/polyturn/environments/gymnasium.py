"""`env: gymnasium:FrozenLake-v1`: an environment of Gymnasium, by its own id (`pip install gymnasium`).

    actions        Discrete: its name if the environment has names (left, down, …), else its number; Text: the text itself
                   MultiDiscrete, MultiBinary, Box: the numbers
    observations   Text: as it is; else the value in words ("observation: 5", "[0.01, -0.2]"), below a picture if the
                   environment draws one as text (render_mode "ansi"), or with the names of its parts if they are known

The action is read from <action>…</action> if the model writes these tags, else from the last valid word or number. An
invalid action changes nothing: the model reads which actions are valid, and the turn earns `invalid_reward` (a kwarg,
default 0). After `max_invalid` (default 3) invalid actions in a row the episode ends, truncated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError
from polyturn.core.tagged import between
from polyturn.environments.base import Adapter, check_kwargs, known_id, require

INSTALL = "'polyturn[environments]'"

ACTIONS: Mapping[str, Sequence[str]] = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "TaxiRainy": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "none", "right"),
    "Acrobot": ("left", "none", "right"),
}
"""Id without version -> names of the actions, for environments that only number their actions."""

PARTS: Mapping[str, Sequence[str]] = {
    "Blackjack": ("your sum", "the dealer's card", "a usable ace"),
    "CartPole": ("position", "velocity", "angle", "angular velocity"),
    "MountainCar": ("position", "velocity"),
    "MountainCarContinuous": ("position", "velocity"),
    "Pendulum": ("x", "y", "angular velocity"),
}
"""Id without version -> names of the parts of an observation."""

_ANSI = re.compile(r"\x1b\[([\d;]*)m")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WORD = re.compile(r"[A-Za-z_]+|-?\d+")


class Gymnasium(Adapter):
    """Environments of Gymnasium."""

    replays = True

    def __init__(self, name: str, id: str, kwargs: Mapping[str, Any], *, base: Path | None = None) -> None:
        super().__init__(name, id, kwargs, base=base)
        self._package: Any = require("gymnasium", install=INSTALL, needed_by=name)
        known_id(id, self._package.registry, name=name)
        try:
            self._invalid_reward = float(self.kwargs.pop("invalid_reward", 0.0))
            self._max_invalid = int(self.kwargs.pop("max_invalid", 3))
        except (TypeError, ValueError, OverflowError) as problem:
            raise ConfigError(f"env {name!r}: invalid_reward and max_invalid must be numbers: {problem}") from problem
        env = check_kwargs(self._env, name=name, kwargs=kwargs)
        if "ansi" in env.metadata.get("render_modes", ()) and "render_mode" not in self.kwargs:
            self.kwargs["render_mode"] = "ansi"
        try:
            self._names = _action_names(id, env.action_space)
            self._read = reader(env.action_space, self._names, spaces=self._package.spaces, name=name)
            self.instructions = self._instructions(env)
        finally:
            env.close()

    def make(self) -> GymnasiumEnv:
        """Return a new environment."""
        return GymnasiumEnv(
            self._env(),
            read=self._read,
            show=self._show,
            hint=self.instructions,
            invalid_reward=self._invalid_reward,
            max_invalid=self._max_invalid,
        )

    def _env(self) -> Any:
        return self._package.make(self.id, **self.kwargs)

    def _instructions(self, env: Any) -> str:
        space, spaces = env.action_space, self._package.spaces
        if isinstance(space, spaces.Text):
            return "Write your action."
        if isinstance(space, spaces.Discrete):
            start = int(space.start)
            options = self._names or [str(start + n) for n in range(int(space.n))]
            return f"Choose one action and write it as <action>{options[0]}</action>. Actions: {', '.join(options)}."
        if isinstance(space, spaces.Box):
            return (
                f"Write your action as {space.shape[0] if space.shape else 1} number(s) in <action> and </action>, from "
                f"{space.low.flatten().tolist()} to {space.high.flatten().tolist()}."
            )
        return f"Write your action as numbers in <action> and </action>: {space}."

    def _show(self, env: Any, observation: Any) -> str:
        """Return an observation as text, below the environment's picture if it draws one."""
        if isinstance(observation, str):
            return observation
        if env.render_mode == "ansi" and (drawn := env.render()) is not None:
            return f"{uncoloured(str(drawn))}\nobservation: {worded(observation)}"
        return f"observation: {worded(observation, PARTS.get(_family(self.id), ()))}"


class GymnasiumEnv:
    """One Gymnasium environment, for one episode."""

    def __init__(
        self,
        env: Any,
        *,
        read: Callable[[str], Any],
        show: Callable[[Any, Any], str],
        hint: str,
        invalid_reward: float,
        max_invalid: int,
    ) -> None:
        self._env = env
        self._read = read
        self._show = show
        self._hint = hint
        self._invalid_reward = invalid_reward
        self._max_invalid = max_invalid
        self._num_invalid = 0

    def reset(self, *, seed: int) -> str:
        """Begin with `seed`."""
        observation, _ = self._env.reset(seed=seed)
        return self._show(self._env, observation)

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Take the action that a text contains."""
        chosen = self._read(action)
        if chosen is None:
            self._num_invalid += 1
            is_over = self._num_invalid >= self._max_invalid
            return f"That is not an action. {self._hint}", self._invalid_reward, False, is_over, {"is_valid": False}
        self._num_invalid = 0
        observation, reward, terminated, truncated, _ = self._env.step(chosen)
        observed = self._show(self._env, observation)
        return observed, float(reward), bool(terminated), bool(truncated), {"is_valid": True, "action": worded(chosen)}

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def reader(space: Any, names: Sequence[str], *, spaces: Any, name: str) -> Callable[[str], Any]:
    """Return a function that reads an action of `space` from a text and returns None if there is none.

    Raises:
        ConfigError: actions of that space cannot be written as text.
    """
    if isinstance(space, spaces.Text):
        return lambda text: text if space.contains(text) else None
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        known = {str(start + n): start + n for n in range(int(space.n))} | {w: start + n for n, w in enumerate(names)}
        if start >= 0:
            known |= {f"-{number}": value for number, value in known.items()}  # "choose -3": a dash, no sign
        return lambda text: next((known[w] for w in reversed(_words(text)) if w in known), None)
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box):
        return lambda text: _numbers(space, text)
    raise ConfigError(
        f"env {name!r} has actions in {space}, which cannot be written as text; wrap it in an environment with Text, "
        "Discrete, MultiDiscrete, MultiBinary or Box actions"
    )


def uncoloured(drawn: str) -> str:
    """Return a picture without ANSI colours: a coloured background becomes [X], blue (X), magenta {X}.

    uncoloured("\\x1b[41mS\\x1b[0mFFF")  ->  "[S]FFF"
    """
    first, *pieces = _ANSI.split(drawn)
    out, colour, coloured = [first], "", ""
    for code, text in zip(pieces[::2], pieces[1::2], strict=True):
        if colour and code == "0":
            out += [_in_brackets(coloured, colour.split(";")), text]
            colour = coloured = ""
        elif colour:
            coloured += text
        elif code.strip("0;"):
            colour, coloured = code, text
        else:
            out.append(text)
    return "".join([*out, coloured]).strip("\n")


def _in_brackets(text: str, codes: Sequence[str]) -> str:
    if any(code.startswith("4") for code in codes):
        return f"[{text}]"
    return f"({text})" if "34" in codes else f"{{{text}}}" if "35" in codes else text


def worded(value: Any, parts: Sequence[str] = ()) -> str:
    """Return a value of any space in words: worded((14, 10, False), ("sum", "card", "ace")) -> "sum 14, card 10, ace no"."""
    import numpy as np

    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {worded(item)}" for key, item in value.items())
    if isinstance(value, tuple | list):
        if parts and len(parts) == len(value):
            return ", ".join(f"{part} {worded(item)}" for part, item in zip(parts, value, strict=True))
        return f"[{', '.join(worded(item) for item in value)}]"
    return str(value)


def _words(text: str) -> list[str]:
    tagged = between(text, "<action>", "</action>")
    return [w.lower() for w in _WORD.findall(tagged[-1] if tagged else text)]


def _numbers(space: Any, text: str) -> Any:
    import numpy as np

    tagged = between(text, "<action>", "</action>")
    numbers = [float(n) for n in _NUMBER.findall(tagged[-1] if tagged else text)]
    size = int(np.prod(space.shape))
    if len(numbers) < size:
        return None
    written = np.array(numbers[-size:])
    action = written.astype(space.dtype)
    is_exact = action.dtype.kind == "f" or np.array_equal(action, written)  # 256 is not a number of 8 bits, 1.7 not whole
    action = action.reshape(space.shape)
    return action if is_exact and space.contains(action) else None


def _family(id: str) -> str:
    return id.rpartition("/")[2].rpartition("-v")[0] or id


def _action_names(id: str, space: Any) -> list[str]:
    names = list(ACTIONS.get(_family(id), ()))
    return names if str(space).startswith("Discrete") and len(names) == int(space.n) else []
