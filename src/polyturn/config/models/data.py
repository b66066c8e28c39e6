"""The sections `data` and `evaluation`: the tasks to train on and those to evaluate on, in which order, and how often.

    data: {train: {files: train.parquet}, sampler: {name: mix, weights: {gsm8k: 2, search: 1}}}
    evaluation: {data: {files: test.parquet}, every: 20, sets: {greedy: {}, avg8: {samples: 8}}}

Tasks come from files, from a data set of the Hugging Face hub, or from a generator: exactly one of the three. The first
evaluation set that runs during training chooses the best checkpoint and may end the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from polyturn.config.parts import BY_NAME, OwnPart, Section
from polyturn.core.generation import Sampling
from polyturn.core.live import NameOrObject
from polyturn.data.options import MixOptions
from polyturn.evaluation.options import EvalOptions


class TaskSourceConfig(Section):
    """A source of tasks: files of rows, a data set of the hub, or a generator."""

    ONLY: ClassVar[Mapping[str, Sequence[str]]] = {
        "subset": ("dataset",),
        "split": ("dataset",),
        "streaming": ("dataset",),
        "columns": ("files", "dataset"),
        "kwargs": ("generator",),
    }
    """Keys that only some kinds of source have, and the keys that say which."""

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
    """Column of a task to its name in the files or the data set: `{prompt: question, ground_truth: answer}`."""
    generator: NameOrObject | None = None
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
        set_ = {key: value for key, value in self if value}
        for key, kinds in self.ONLY.items():
            if key in set_ and not any(kind in set_ for kind in kinds):
                either = " or ".join(f"`{kind}`" for kind in kinds)
                raise ValueError(f"{key} belongs to {either}; set that, or drop {key}")
        if self.streaming and self.limit is None:
            raise ValueError("streaming fetches the first `limit` rows of a data set; set limit, or drop streaming")
        return self


class OwnSampler(OwnPart):
    """An order of tasks of your own: a Curriculum, which chooses those of each epoch. Further keys are its arguments."""

    PART: ClassVar[str] = MixOptions.PART


class DataConfig(Section):
    """Tasks to train on."""

    train: TaskSourceConfig | None = None
    shuffle: bool = True
    """Draw the tasks in a random order; false keeps theirs."""
    sampler: Annotated[MixOptions | OwnSampler, BY_NAME] | None = None
    """The order of tasks: `mix`, which divides the visits among data sources, or `file.py:Class` of a Curriculum; null
    visits every task once in each epoch."""
    drop_long_prompts: bool = False
    """Leave out the tasks whose prompt is longer than rollout.limits.max_prompt_tokens instead of refusing the run."""


class EvalSetConfig(Section):
    """One way to evaluate."""

    sampling: Sampling = Sampling(temperature=0.0)
    max_turns: int | None = Field(None, ge=1)
    """Overrides rollout.limits.max_turns."""
    samples: int = Field(1, ge=1, le=2**16)
    """Number of samples of each task; more than one gives mean@N, best@N and, where functions return a `pred`, maj@N."""
    every: bool = True
    """Whether it also runs every `evaluation.every` steps; else only before and after training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig(EvalOptions):
    """Validation: before training, every few steps, and after it."""

    data: TaskSourceConfig | None = None
    sets: dict[str, EvalSetConfig] = field(default_factory=lambda: {"greedy": EvalSetConfig()})
    """Name of each set to how it decodes; the first that runs every `every` steps chooses the best checkpoint."""
    success_at: float = 1.0
    """The outcome that counts as success."""
    before_warm_start: bool = False
    """Also validate before a warm start, in sets called `untouched NAME`. It takes the time of one more validation, and
    loads the model once more for it."""
