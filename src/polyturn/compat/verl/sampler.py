"""verl.experimental.dataset.sampler: users' own samplers, and the order of tasks of such a sampler.

    class HardestFirst(AbstractCurriculumSampler):
        def __init__(self, data_source, data_config): ...
        def __iter__(self): ...                 indices of rows
        def update(self, batch): ...            called with each step's DataProto, before the next step's rows are drawn

Orders in `polyturn.data.sampler` follow from a seed. Here indices are drawn when needed and stored, because an update may
change later ones. A checkpoint has the drawn indices and the sampler's `state_dict`, if there is one.
"""

from __future__ import annotations

import functools
import itertools
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from omegaconf import OmegaConf
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from polyturn.compat.verl.agent_scheduler import row_of
from polyturn.compat.verl.dataproto import DataProto
from polyturn.compat.verl.padded_batch import to_dataproto
from polyturn.core.errors import CheckpointError, ConfigError, DataError, one_line
from polyturn.core.task import Task
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.data.sampler import CURRICULUM, Curriculum, TaskSampler, Visit, empty
from polyturn.infra.plugin_shape import check_class
from polyturn.infra.plugins import import_attr

logger = logging.getLogger(__name__)


class AbstractSampler(Sampler[int]):
    """Yields the indices of rows; created with the rows and the section `data`."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any) -> None: ...


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that learns from each step."""

    @abstractmethod
    def update(self, batch: DataProto) -> None:
        """Receive the rows that a step was trained on."""


def create_rl_sampler(data_config: Any, dataset: Any) -> Sampler[int]:
    """Return the sampler of the section `data`; by default in random order, or in the order of rows."""
    section = data_config.get("sampler") or {}
    if section.get("class_path") is not None:
        sampler_class = import_attr(f"{str(section['class_path']).removeprefix('pkg://')}:{section['class_name']}")
        sampler = sampler_class(data_source=dataset, data_config=data_config)
        assert isinstance(sampler, AbstractSampler), f"{sampler_class!r} must inherit AbstractSampler"
        workers = data_config.get("dataloader_num_workers", 8)
        assert workers == 0, f"data.dataloader_num_workers is {workers}; it must be 0, so that no rows are drawn ahead"
        return sampler
    if not data_config.get("shuffle", True):
        return SequentialSampler(dataset)
    generator = torch.Generator()
    if (seed := data_config.get("seed")) is not None:
        generator.manual_seed(seed)
    return RandomSampler(dataset, generator=generator)


_END = object()


@dataclass(slots=True)
class _Drawn:
    """A sampler and the indices that it has yielded; all orders of a run share it."""

    sampler: Any
    size: int
    order: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Index in `order` of the end of each finished epoch."""
    left: Iterator[int] | None = None

    def at(self, number: int) -> Visit:
        """Return visit `number`."""
        while len(self.order) <= number:
            self._draw()
        return Visit(sum(end <= number for end in self.ends), self.order[number])

    def _draw(self) -> None:
        name = type(self.sampler).__name__
        try:
            self.left = iter(self.sampler) if self.left is None else self.left
            index = next(self.left, _END)
        except Exception as problem:
            raise DataError(f"the sampler {name} failed with {one_line(problem)}") from problem
        if index is _END:
            if len(self.order) == (self.ends[-1] if self.ends else 0):
                raise DataError(empty(len(self.ends)))
            self.ends.append(len(self.order))
            self.left = None
            return
        if not isinstance(index, SupportsIndex) or not 0 <= int(index) < self.size:
            raise DataError(f"the sampler {name} chose task {index!r:.100}; there are tasks 0 to {self.size - 1}")
        self.order.append(int(index))


class _RowsOf(Sequence[dict[str, Any]]):
    """Tasks as rows with verl's field names."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: Any) -> Any:
        return row_of(self._tasks[index])


class SamplerOrder(Curriculum):
    """Visits tasks in the order of a sampler."""

    def __init__(self, tasks: Sequence[Task], drawn: _Drawn, *, seed: int) -> None:
        self._drawn = drawn
        super().__init__(tasks, seed=seed, shuffle=False)

    @classmethod
    def maker(
        cls,
        tasks: Sequence[Task],
        *,
        seed: int,
        shuffle: bool,
        base: Path | None = None,
        sampler: str = "",
        config: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Callable[[], TaskSampler]:
        """Return a function that creates the order at its start; all orders share one sampler.

        Args:
            tasks: The tasks.
            seed: The run's seed.
            shuffle: Passed to a native `Curriculum`; a sampler reads it from `config`.
            base: The folder that a relative file path is resolved against.
            sampler: `file.py:Class` or `package.module:Class` of an `AbstractSampler`, or of a `Curriculum`.
            config: The section `data`.
            kwargs: Further arguments of a native `Curriculum`.

        Raises:
            ConfigError: the class is neither, or cannot be created.
        """
        sampler_class: Any = import_attr(sampler, base=base)
        if isinstance(sampler_class, type) and issubclass(sampler_class, Curriculum):
            check_class(sampler_class, CURRICULUM, where=f"the sampler {sampler!r}")
            return sampler_class.maker(tasks, seed=seed, shuffle=shuffle, **kwargs)
        if not isinstance(sampler_class, type) or not issubclass(sampler_class, AbstractSampler):
            raise ConfigError(
                f"data.sampler.class_name names {sampler!r}, which is not a sampler; inherit "
                "verl.experimental.dataset.sampler.AbstractSampler, or polyturn.data.sampler.Curriculum"
            )
        try:
            instance = sampler_class(
                data_source=_RowsOf(tasks), data_config=OmegaConf.create({"seed": seed, **dict(config or {})})
            )
        except Exception as problem:
            raise ConfigError(f"the sampler {sampler!r} cannot be created: {one_line(problem)}") from problem
        return functools.partial(cls, tasks, _Drawn(instance, len(tasks)), seed=seed)

    def next(self) -> Visit:
        """Return the next visit."""
        self._number += 1
        return self._drawn.at(self._number - 1)

    def seek(self, visits: int) -> None:
        """Move to the position after `visits` visits from the start."""
        self._number = visits

    def visits(self, epochs: int) -> int:
        """Return the number of visits in the sampler's first `epochs` epochs."""
        sampler = self._drawn.sampler
        return epochs * (len(sampler) if isinstance(sampler, Sized) else self.size)

    def observe(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Pass the rows that a step was trained on to the sampler, if it is an `AbstractCurriculumSampler`."""
        if isinstance(self._drawn.sampler, AbstractCurriculumSampler):
            batch, name = _batch(groups), type(self._drawn.sampler).__name__
            try:
                self._drawn.sampler.update(batch)
            except Exception as problem:
                raise DataError(f"the sampler {name} failed in update with {one_line(problem)}") from problem

    def state_dict(self) -> dict[str, Any]:
        """Return all drawn indices, also those after this order's position, and the sampler's own state."""
        drawn, own = self._drawn, getattr(self._drawn.sampler, "state_dict", None)
        state = {"size": self.size, "number": self._number, "order": list(drawn.order), "ends": list(drawn.ends)}
        return {**state, "own": own()} if callable(own) else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpointed state.

        Raises:
            CheckpointError: the state belongs to another dataset.
        """
        if state.get("size") != self.size:
            raise CheckpointError(
                f"the checkpoint's task order has size {state.get('size')!r} and this run has {self.size}; resume with the "
                "same dataset, or start a new run"
            )
        drawn = self._drawn
        drawn.order, drawn.ends = list(state["order"]), list(state["ends"])
        begun = len(drawn.order) - (drawn.ends[-1] if drawn.ends else 0)
        if "own" in state:
            drawn.sampler.load_state_dict(state["own"])
        elif isinstance(drawn.sampler, AbstractCurriculumSampler):
            logger.warning(
                "%s has no state_dict: what it learned before this checkpoint is lost", type(drawn.sampler).__name__
            )
        drawn.left = iter(drawn.sampler) if begun or "own" in state else None
        if "own" not in state and drawn.left is not None:
            drawn.left = itertools.islice(drawn.left, begun, None)
        self._number = state.get("number", len(drawn.order))


def _batch(groups: Sequence[TrajectoryGroup]) -> DataProto:
    """Return groups as the batch of a step of verl."""
    batch = to_dataproto(groups)
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    others = {str(key): batch.get(key).tolist() for key in batch.keys() if key not in tensors}  # noqa: SIM118
    scores = tensors["rm_scores"]
    return DataProto.from_dict({**tensors, "token_level_scores": scores, "token_level_rewards": scores}, others)
