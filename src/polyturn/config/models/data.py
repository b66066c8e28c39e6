"""The sections `data` and `evaluation`: tasks for training and evaluation, their order, and the schedule of evaluations.

    data: {train: {files: train.parquet}, sampler: {name: mix, weights: {gsm8k: 2, search: 1}}}
    evaluation: {data: {files: test.parquet}, every: 20, sets: {greedy: {}, avg8: {samples: 8}}}

Tasks come from exactly one of: files, a dataset on the Hugging Face hub, a generator. The first evaluation set that runs
during training chooses the best checkpoint and may end the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from polyturn.config.parts import BY_NAME, OwnPart, Section
from polyturn.core.generation import Sampling
from polyturn.data.options import MixOptions
from polyturn.evaluation.options import EvalOptions
from polyturn.infra.live import NameOrObject


class TaskSourceConfig(Section):
    """A source of tasks: files of rows, a dataset on the hub, or a generator."""

    ONLY: ClassVar[Mapping[str, Sequence[str]]] = {
        "subset": ("dataset",),
        "split": ("dataset",),
        "streaming": ("dataset",),
        "columns": ("files", "dataset"),
        "kwargs": ("generator",),
    }
    """Key -> the source keys that it requires."""

    files: str | list[str] | None = None
    """jsonl or parquet files; globs are allowed."""
    dataset: str | None = None
    """A dataset on the Hugging Face hub, as owner/name, or a folder with one."""
    subset: str | None = None
    """The dataset's configuration, if it has several (`main` of openai/gsm8k)."""
    split: str | None = None
    """Split of the dataset; default "train", for evaluation "test". `train[:1000]` takes a part."""
    streaming: bool = False
    """Download only the first `limit` rows of the dataset."""
    columns: dict[str, str] = {}
    """Task field -> column in the files or the dataset: `{prompt: question, ground_truth: answer}`."""
    generator: NameOrObject | None = None
    """`file.py:function` that returns a sequence of tasks."""
    kwargs: dict[str, Any] = {}
    """Arguments of the generator."""
    limit: int | None = Field(None, ge=1)
    """Use only the first `limit` tasks."""
    system: str | None = None
    """System message for tasks without one."""
    interaction: str | None = None
    """Interaction of tasks without one; it receives the other columns of their rows."""

    @model_validator(mode="after")
    def _one_source(self) -> TaskSourceConfig:
        if sum(one is not None for one in (self.files, self.dataset, self.generator)) != 1:
            raise ValueError("set exactly one of files, dataset and generator")
        set_ = {key: value for key, value in self if value}
        for key, kinds in self.ONLY.items():
            if key in set_ and not any(kind in set_ for kind in kinds):
                either = " or ".join(f"`{kind}`" for kind in kinds)
                raise ValueError(f"{key} requires {either}; set that, or remove {key}")
        if self.streaming and self.limit is None:
            raise ValueError("streaming downloads the first `limit` rows of a dataset; set limit, or remove streaming")
        return self


class OwnSampler(OwnPart):
    """Your own order of tasks: a Curriculum, which chooses the tasks of each epoch. Further keys are its arguments."""

    PART: ClassVar[str] = MixOptions.PART


class DataConfig(Section):
    """Tasks to train on."""

    train: TaskSourceConfig | None = None
    shuffle: bool = True
    """Visit tasks in a random order; false keeps the order of the source."""
    sampler: Annotated[MixOptions | OwnSampler, BY_NAME] | None = None
    """The order of tasks: `mix`, which divides visits among data sources, or `file.py:Class` of a Curriculum; null visits
    every task once per epoch."""
    drop_long_prompts: bool = False
    """Drop tasks whose prompt is longer than rollout.limits.max_prompt_tokens; false makes them an error."""


class EvalSetConfig(Section):
    """An evaluation set: how the evaluation tasks are sampled."""

    sampling: Sampling = Sampling(temperature=0.0)
    max_turns: int | None = Field(None, ge=1)
    """Overrides rollout.limits.max_turns."""
    samples: int = Field(1, ge=1, le=2**16)
    """Number of samples per task; more than one adds mean@N, best@N and, if reward functions return a `pred`, maj@N."""
    every: bool = True
    """Whether the set also runs every `evaluation.every` steps; false runs it only before and after training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig(EvalOptions):
    """Validation: before training, every few steps, and after it."""

    data: TaskSourceConfig | None = None
    sets: dict[str, EvalSetConfig] = field(default_factory=lambda: {"greedy": EvalSetConfig()})
    """Name -> evaluation set; the first that runs during training chooses the best checkpoint."""
    success_at: float = 1.0
    """Smallest outcome that counts as success."""
    before_warm_start: bool = False
    """Also evaluate before a warm start, in sets named `untouched NAME`. This takes another evaluation and another load of
    the model."""
