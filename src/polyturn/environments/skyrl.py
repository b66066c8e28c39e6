"""`env: skyrl:gsm8k_multi_turn`: an environment of skyrl-gym (`pip install skyrl-gym`), by the id that its `make` takes.

    {"prompt": […], "reward_spec": {"method": "rule", "ground_truth": "72"}, "max_turns": 3}        a row, as it is there

Its constructor gets the row as `extras`, its `init` the row's prompt, its `step` the model's text. So it needs rows
(`data.train.files`), not seeds. Its configuration (the address of a search service, the folder of the databases) is
`env.kwargs.env_config`; all other kwargs join the row's columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyturn.core.env import Env
from polyturn.core.errors import ConfigError, DataError, one_line
from polyturn.core.task import Task
from polyturn.environments.base import ENV, Adapter, known_id, require

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
        """Refuse: its tasks are rows."""
        raise ConfigError(
            f"env {self.name!r} is made of a row (its prompt, its reward_spec), so it needs rows: set data.train.files"
        )

    def of_rows(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """Return rows as tasks that the environment scores, whatever their data_source; it gets the data_source."""
        rows = [dataclasses.replace(t, data_source=None, extra={"data_source": t.data_source, **t.extra}) for t in tasks]
        return super().of_rows(rows)

    def make_for(self, task: Task) -> Env:
        """Return a new environment for a row.

        Raises:
            DataError: the row, or `env_config`, lacks what the environment wants.
        """
        try:
            env = self._gym.make(self.id, env_config=self._config, extras={**_row(task), **self.kwargs})
        except Exception as problem:  # whatever its constructor asserts
            raise DataError(
                f"task {task.id!r}: env {self.name!r} cannot be made of this row: {one_line(problem)}; give the row what "
                "skyrl-gym's own rows have, and env.kwargs.env_config what the environment is configured with"
            ) from problem
        return SkyrlEnv(env, [message.to_openai() for message in task.prompt])


class SkyrlEnv:
    """One skyrl-gym environment, for one episode."""

    def __init__(self, env: Any, prompt: list[dict[str, Any]]) -> None:
        self._env = env
        self._prompt = prompt

    def reset(self, *, seed: int) -> list[dict[str, Any]]:
        """Return the prompt as the environment wants it shown. It knows no seed: the row says everything."""
        prompt, _ = self._env.init(self._prompt)
        return list(prompt)

    def step(self, action: str) -> tuple[list[dict[str, Any]], float, bool, Mapping[str, Any]]:
        """Take what the model wrote."""
        answer = self._env.step(action)
        return list(answer["observations"] or ()), float(answer["reward"]), bool(answer["done"]), answer["metadata"] or {}

    def close(self) -> None:
        """Close it."""
        self._env.close()


def _row(task: Task) -> dict[str, Any]:
    """Return the row's columns under the names that skyrl-gym's environments read."""
    own = {key: value for key, value in task.extra.items() if key != ENV}
    row: dict[str, Any] = {"extra_info": own, **own}
    if task.ground_truth is not None:
        truth = {"method": "rule", "ground_truth": task.ground_truth}
        row = {"reward_spec": truth, "reward_model": truth, **row}
    return row
