"""`env: reasoning_gym:chain_sum`: a data set of Reasoning Gym, by its own name (`pip install reasoning-gym`).

    seed 7  ->  the entry of `create_dataset(name, seed=7, size=1)`: a question, and a score for answers

`kwargs` are arguments of the data set (`max_terms: 6`) and two of the adapter: `tries` (default 1) is the number of answers
in an episode, and `retry` is the reply to a wrong one. The reward is the package's score of the last answer, in [0, 1]. The
answer is the text between <answer> and </answer>, or the whole text if these tags are missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError
from polyturn.environments.base import Adapter, check_kwargs, known_id, require

INSTALL = "'polyturn[environments]'"
RETRY = "That is not right. Try again."


class ReasoningGym(Adapter):
    """Makes environments from a data set of Reasoning Gym."""

    replays = True
    instructions = "Write your final answer between <answer> and </answer>."
    score = "last"

    def __init__(self, name: str, id: str, kwargs: Mapping[str, Any], *, base: Path | None = None) -> None:
        super().__init__(name, id, kwargs, base=base)
        package = require("reasoning_gym", install=INSTALL, needed_by=name)
        known_id(id, require("reasoning_gym.factory", install=INSTALL, needed_by=name).DATASETS, name=name)
        self._create = package.create_dataset
        self._extract = require("reasoning_gym.utils", install=INSTALL, needed_by=name).extract_answer
        self.tries = self.kwargs.pop("tries", 1)
        """Number of answers in an episode."""
        self.retry = str(self.kwargs.pop("retry", RETRY))
        """The reply to a wrong answer, except the last."""
        if not isinstance(self.tries, int) or self.tries < 1:
            raise ConfigError(f"env {name!r}: tries is {self.tries!r}; use a whole number of at least 1")
        check_kwargs(lambda: self._create(id, seed=0, size=1, **self.kwargs)[0], name=name, kwargs=kwargs)

    def make(self) -> ReasoningGymEnv:
        """Return an environment with one question."""
        return ReasoningGymEnv(self)

    def dataset(self, seed: int) -> Any:
        """Return the data set whose only entry is a seed's question."""
        return self._create(self.id, seed=seed, size=1, **self.kwargs)

    def answer_in(self, text: str) -> str:
        """Return the answer in a model's text."""
        answer = self._extract(text)
        return text.strip() if answer is None else str(answer)


class ReasoningGymEnv:
    """One question, for one episode."""

    def __init__(self, adapter: ReasoningGym) -> None:
        self._adapter = adapter
        self._num_tries = 0

    def reset(self, *, seed: int) -> str:
        """Return the question."""
        self._dataset = self._adapter.dataset(seed)
        self._entry = self._dataset[0]
        return str(self._entry["question"])

    def step(self, action: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        """Score an answer."""
        self._num_tries += 1
        answer = self._adapter.answer_in(action)
        score = float(self._dataset.score_answer(answer=answer, entry=self._entry))
        is_done = score >= 1.0 or self._num_tries >= self._adapter.tries
        return "" if is_done else self._adapter.retry, score, is_done, {"answer": answer}

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
