"""The section `data`: the tasks to train on, and in which order they are visited.

    data: {train: {files: train.parquet}, mix: {weights: {gsm8k: 2, search: 1}}}

Tasks come from files, from a data set of the Hugging Face hub, or from a generator: exactly one of the three.
`evaluation.data` names its tasks in the same way.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from polyturn.config.models.base import Section


class TaskSourceConfig(Section):
    """Where tasks come from: files of rows, a data set of the hub, or a generator."""

    files: str | list[str] | None = None
    """jsonl or parquet files; globs are allowed."""
    dataset: str | None = None
    """A data set on the Hugging Face hub, as owner/name, or a folder with one."""
    subset: str | None = None
    """Which of the data set's configurations, where it has several (`main` of openai/gsm8k)."""
    split: str | None = None
    """Which split of the data set; "train" by default, "test" for an evaluation. `train[:1000]` is a part of one."""
    streaming: bool = False
    """Fetch the first `limit` rows of the data set, not all of it."""
    columns: dict[str, str] = {}
    """Column of a task to the data set's own name for it: `{prompt: question, ground_truth: answer}`."""
    generator: str | None = None
    """`file.py:function` that returns a sequence of tasks."""
    kwargs: dict[str, Any] = {}
    """Arguments of the generator."""
    limit: int | None = Field(None, ge=1)
    """Use only the first `limit` tasks."""
    system: str | None = None
    """A system message for the tasks that have none."""
    interaction: str | None = None
    """The interaction of the tasks that name none; it is told the rest of their rows."""

    @model_validator(mode="after")
    def _one_source(self) -> TaskSourceConfig:
        if sum(one is not None for one in (self.files, self.dataset, self.generator)) != 1:
            raise ValueError("set exactly one of files, dataset and generator")
        of_datasets = {"subset": self.subset, "split": self.split, "streaming": self.streaming, "columns": self.columns}
        given = [key for key, value in of_datasets.items() if value]
        if given and self.dataset is None:
            raise ValueError(f"{given[0]} belongs to `dataset`, a data set of the hub; set `dataset`, or drop {given[0]}")
        if self.streaming and self.limit is None:
            raise ValueError("streaming fetches the first `limit` rows of a data set; set limit, or drop streaming")
        return self


class MixConfig(Section):
    """How the visits of a run are divided among data sources."""

    weights: dict[str, float | list[tuple[int, float]]]
    """data_source to a weight, or to [step, weight] pairs with straight lines between them."""
    by_success: float = Field(0.0, ge=0)
    """How strongly sources are preferred in which about half of the episodes succeed; 0 is not at all."""

    @model_validator(mode="after")
    def _points(self) -> MixConfig:
        for name, weight in self.weights.items():
            points = [(0, weight)] if isinstance(weight, int | float) else weight
            steps = [step for step, _ in points]
            if not points or steps != sorted(set(steps)) or any(value < 0 for _, value in points):
                raise ValueError(
                    f"data.mix.weights has {weight!r} for {name!r}; give a number from 0 on, or [step, weight] pairs in "
                    "rising order of steps"
                )
        return self


class DataConfig(Section):
    """Tasks to train on."""

    train: TaskSourceConfig | None = None
    shuffle: bool = True
    """Draw the tasks in a random order; false keeps theirs."""
    sampler: str | None = None
    """`file.py:Class` of a Curriculum, which chooses the tasks of each epoch; the default visits every task once."""
    sampler_kwargs: dict[str, Any] = {}
    """Arguments of the sampler."""
    mix: MixConfig | None = None
    """Divides the visits among data sources by weights that may change with the step; instead of `sampler`."""
    drop_long_prompts: bool = False
    """Leave out the tasks whose prompt is longer than rollout.limits.max_prompt_tokens instead of refusing the run."""
