"""Workload: the lengths of a rollout's turns and the durations of its tools, from a file in `workloads/`.

    Workload.load("swe_like")        a name of a shipped file, or the path of a YAML file
    workload.plans()["g3/1"]         EpisodePlan(lengths=(180, 240, 95), waits=(58.1, 66.0))

Lengths are drawn from the file's seed with Python's own generator, whose sequence is fixed by the language.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields, replace
from importlib.resources import as_file, files
from pathlib import Path

from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean
from polyturn.engines.record_file import read_record
from polyturn.engines.simulated import Speed


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """One episode."""

    lengths: tuple[int, ...]
    waits: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The contents of a workload file; every length is a number of tokens and every wait a number of seconds."""

    name: str
    tasks: int
    group: int
    replicas: int
    slots: int
    kv_tokens: int = 1_000_000
    step_s: float = 0.008
    per_sequence_s: float = 0.00012
    prefill_token_s: float = 0.00002
    prompt_tokens: int = 100
    turns: int = 4
    """The mean number of turns; an episode has from one to twice as many."""
    turn_tokens: float = 300.0
    """The median length of a turn."""
    task_sigma: float = 0.5
    """Spread (of the logarithm) of lengths between tasks."""
    turn_sigma: float = 0.5
    """Spread (of the logarithm) of lengths between the turns of one task."""
    tool_s: float = 0.5
    """The median wait between two turns."""
    tool_sigma: float = 0.5
    observation_tokens: int = 20
    max_turn_tokens: int = 8192
    giant: tuple[int, int] | None = None
    """(turns, tokens of each) of the very last episode, which dwarfs the others."""
    seed: int = 0
    measured: Speed | None = None
    """A speed that was fitted to a server (`engines/calibrate.py`); replaces the times above, not slots and KV."""

    @classmethod
    def load(cls, name: str | Path) -> Workload:
        """Read a shipped workload by name, or a YAML file.

        Raises:
            ConfigError: there is no such workload, or it has keys that no workload has.
        """
        path = Path(name)
        if path.suffix in (".yaml", ".yml"):
            if not path.is_file():
                raise ConfigError(f"there is no workload file {path}")
            return read_record(path, cls, hidden=("measured",), name=path.stem)
        if str(name) not in shipped():
            raise UnknownNameError(f"there is no workload {str(name)!r}.{did_you_mean(str(name), shipped())}")
        with as_file(files("polyturn.testing").joinpath("workloads", f"{name}.yaml")) as file:
            return read_record(file, cls, hidden=("measured",), name=str(name))

    def __post_init__(self) -> None:
        counts = ("tasks", "group", "replicas", "slots", "kv_tokens", "prompt_tokens", "turns", "max_turn_tokens")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in counts and value < 1:
                raise ConfigError(f"{field.name} of the workload {self.name} is {value}; at least 1 is needed")
            if isinstance(value, float) and not 0 <= value < math.inf:
                raise ConfigError(f"{field.name} of the workload {self.name} is {value}; at least 0 is needed")

    @property
    def speed(self) -> Speed:
        """One of its servers."""
        if self.measured is not None:
            return replace(self.measured, slots=self.slots, kv_tokens=self.kv_tokens)
        return Speed(
            step_s=self.step_s,
            per_sequence_s=self.per_sequence_s,
            prefill_token_s=self.prefill_token_s,
            slots=self.slots,
            kv_tokens=self.kv_tokens,
        )

    def plans(self) -> dict[str, EpisodePlan]:
        """Return the plan of every episode, by its id."""
        rng, out = random.Random(self.seed), {}
        for task in range(self.tasks):
            factor = math.exp(rng.gauss(0, self.task_sigma))
            for member in range(self.group):
                turns = rng.randint(1, max(2 * self.turns - 1, 1))
                lengths = [
                    max(
                        2,
                        min(
                            round(self.turn_tokens * factor * math.exp(rng.gauss(0, self.turn_sigma))), self.max_turn_tokens
                        ),
                    )
                    for _ in range(turns)
                ]
                waits = [self.tool_s * math.exp(rng.gauss(0, self.tool_sigma)) for _ in range(turns - 1)]
                out[f"g{task}/{member}"] = EpisodePlan(tuple(lengths), tuple(waits))
        if self.giant is not None:
            turns, tokens = self.giant
            out[f"g{self.tasks - 1}/{self.group - 1}"] = EpisodePlan((tokens,) * turns, (self.tool_s,) * (turns - 1))
        return out

    def lower_bound_s(self, *, replicas: int) -> float:
        """Return max(the longest episode alone, all tokens at the best rate): nothing can be faster.

        Alone, an episode costs tau(1) a token and its waits. The best rate is min over b of tau(b) / b, b capped by
        episodes, slots and KV, on each of `replicas` servers.
        """
        plans, speed = self.plans(), self.speed
        alone = max(speed.tau(1) * sum(plan.lengths) + sum(plan.waits) for plan in plans.values())
        batch = min(len(plans), self.slots, self.kv_tokens // (self.prompt_tokens + 1))
        total = sum(sum(plan.lengths) for plan in plans.values())
        return max(alone, total * speed.best_token_s(batch) / replicas)


def shipped() -> list[str]:
    """Return the names of the workloads that come with the package."""
    folder = files("polyturn.testing").joinpath("workloads")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
