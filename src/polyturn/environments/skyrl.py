"""`env: skyrl:gsm8k_multi_turn`: an environment of skyrl-gym (`pip install skyrl-gym`), by the id that its `make` takes.

    {"prompt": […], "reward_spec": {"method": "rule", "ground_truth": "72"}, "max_turns": 3}        a row of skyrl-gym

The environment's constructor gets the row as `extras`, its `init` gets the row's prompt, and its `step` the model's text. So
the run needs rows (`data.train.files`) instead of seeds. `env.kwargs.env_config` is the environment's configuration (the
address of a search service, the folder of the databases); all other kwargs are added to the row's columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, DataError, one_line
from polyturn.core.task import Task
from polyturn.environments.base import ENV, Adapter, known_id, require
from polyturn.rollout.env import Env

INSTALL = "skyrl-gym"


class Skyrl(Adapter):
    """Environments of skyrl-gym."""

    takes_rows = True
    reads_reasoning = True

    def __init__(self, name: str, id: str, kwargs: Mapping[str, Any], *, base: Path | None = None) -> None:
        super().__init__(name, id, kwargs, base=base)
        self._gym = require("skyrl_gym", install=INSTALL, needed_by=name)
        known_id(id, self._gym.registry, name=name)
        config = self.kwargs.pop("env_config", None) or {}
        if not isinstance(config, Mapping):
            raise ConfigError(f"env {name!r}: env_config is {config!r:.100}; write a mapping")
        self._config = require("omegaconf", install="omegaconf", needed_by=name).OmegaConf.create(dict(config))

    def tasks(self, *, split: str, seeds: range, prompt: str | None = None) -> Sequence[Task]:
        """Refuse: tasks of this environment are rows."""
        raise ConfigError(
            f"env {self.name!r} is made from a row (prompt, reward_spec), so it needs rows: set data.train.files"
        )

    def of_rows(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """Return rows as tasks scored by the environment, which also gets their data_source."""
        rows = [dataclasses.replace(t, data_source=None, extra={"data_source": t.data_source, **t.extra}) for t in tasks]
        return super().of_rows(rows)

    def make_for(self, task: Task) -> Env:
        """Return a new environment for a row.

        Raises:
            DataError: the environment cannot be made from the row and `env_config`.
        """
        try:
            env = self._gym.make(self.id, env_config=self._config, extras={**_row(task), **self.kwargs})
        except Exception as problem:  # a constructor may raise anything
            raise DataError(
                f"task {task.id!r}: env {self.name!r} cannot be made from this row: {one_line(problem)}; the row needs the "
                "columns of skyrl-gym's own rows, and env.kwargs.env_config the environment's configuration"
            ) from problem
        return SkyrlEnv(env, [message.to_openai() for message in task.prompt])


class SkyrlEnv:
    """One skyrl-gym environment, for one episode."""

    def __init__(self, env: Any, prompt: list[dict[str, Any]]) -> None:
        self._env = env
        self._prompt = prompt

    def reset(self, *, seed: int) -> list[dict[str, Any]]:
        """Return the prompt of the environment's `init`. The seed is not used, because the row determines everything."""
        prompt, _ = self._env.init(self._prompt)
        return list(prompt)

    def step(self, action: str) -> tuple[list[dict[str, Any]], float, bool, Mapping[str, Any]]:
        """Act with the model's text."""
        answer = self._env.step(action)
        return list(answer["observations"] or ()), float(answer["reward"]), bool(answer["done"]), answer["metadata"] or {}

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _row(task: Task) -> dict[str, Any]:
    """Return the row's columns under the names that skyrl-gym's environments read."""
    own = {key: value for key, value in task.extra.items() if key != ENV}
    row: dict[str, Any] = {"extra_info": own, **own}
    if task.ground_truth is not None:
        truth = {"method": "rule", "ground_truth": task.ground_truth}
        row = {"reward_spec": truth, "reward_model": truth, **row}
    return row
