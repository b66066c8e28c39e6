"""Run: the result of `polyturn.train`, `polyturn.evaluate` and `polyturn.rollout`, and a view of any run's folder.

run = polyturn.train(…)  or  polyturn.Run("runs/mine")
run.metrics                     a table, one row a step          run.config      the configuration
run.trajectories                iterate, or look up by id        run.model()     the trained model
run.filter("reward < 1")        some trajectories                run.resume(steps=200)
run.show("g5/2")                one trajectory
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.text import Text

from polyturn.core.errors import ConfigError, DataError, one_line
from polyturn.core.messages import Message
from polyturn.core.printable import printable
from polyturn.core.reward import brief
from polyturn.core.trajectory import Trajectory
from polyturn.infra.console import make_console
from polyturn.store.parquet_store import FOLDER
from polyturn.store.stored_run import StoredRun

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

COLOURS = {"system": "gray", "user": "teal", "tool": "olive", "assistant": "green"}


class Run(StoredRun):
    """A run's folder: metrics, trajectories, configuration and weights.

    While the run continues, `refresh` reads the trajectories that were recorded after the last reading.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: PreTrainedModel | None = None,
        again: Callable[[Mapping[str, Any]], Run] | None = None,
        reports: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the folder of a run.

        Args:
            folder: The folder.
            model: The trained model, if it is in this process.
            again: Resumes the run with changed keywords; None if only the folder is known.
            reports: Evaluation set -> result.
        """
        if not isinstance(folder, str | Path):
            raise DataError(f"folder is {brief(folder)}; give the folder of a run, for instance polyturn.Run('runs/NAME')")
        folder = Path(folder)
        if not (folder / "config.yaml").is_file() and not (folder / FOLDER).is_dir():
            raise DataError(f"there is no run in {str(folder)!r}; give the folder of a run, for instance runs/NAME")
        super().__init__(folder)
        self._model = model
        self._again = again
        self.reports = dict(reports or {})
        """The results of an evaluation, by evaluation set: `run.reports["greedy"].report.success`."""

    def __await__(self) -> Generator[Any, None, Run]:
        """Return the run, so that an unneeded `await polyturn.train(…)` does not lose it."""
        yield from ()
        return self

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration as plain data; an object that the program passed is the text `<live module:name>`.

        Raises:
            DataError: config.yaml is missing or cannot be read.
        """
        path = self.folder / "config.yaml"
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as problem:
            raise DataError(f"{path} cannot be read: {one_line(problem)}") from problem
        if not isinstance(loaded, dict):
            raise DataError(f"{path} cannot be read: it does not contain keys with values")
        return loaded

    def model(self) -> PreTrainedModel:
        """Return the trained model, ready to generate: from memory, otherwise from the newest checkpoint.

        Raises:
            CheckpointError: there is no checkpoint.
        """
        if self._model is None:
            from polyturn.build import model_folder
            from polyturn.training.hf import load_model

            folder = model_folder(self.folder)
            assert folder is not None  # None only for the path None
            self._model = load_model(folder)
        return self._model.eval()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer with the run's chat template.

        Raises:
            DataError: the run's folder has no tokenizer.
        """
        from transformers import AutoTokenizer

        if not (self.folder / "tokenizer").is_dir():
            raise DataError(f"the run in {str(self.folder)!r} has no tokenizer; use its model's tokenizer")
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            self.folder / "tokenizer", trust_remote_code=False
        )
        return tokenizer

    def resume(self, **changes: Any) -> Run:
        """Resume from the newest checkpoint with the same objects; `changes` are keywords of `polyturn.train`: `steps=200`.

        Raises:
            ConfigError: the run was opened from its folder, is not a training run, or would become another run (`name`).
        """
        if self._again is None:
            raise ConfigError(
                f"the run in {str(self.folder)!r} was opened without the objects that started it; write "
                f"polyturn.train(config={str(self.folder / 'config.yaml')!r}, resume=True, …) with the arguments that "
                "started it"
            )
        self._model = None  # the resumed run builds a new model
        return self._again(changes)

    def show(self, trajectory: str | None = None) -> None:
        """Print the run, or one of its trajectories as a conversation; in a notebook, display it."""
        picture: Any = self if trajectory is None else TrajectoryPicture(self.trajectories[trajectory])
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if shell is not None and hasattr(shell, "kernel"):  # a notebook
            from IPython.display import display

            display(picture)
        else:
            make_console().print(Text(picture.text()), soft_wrap=True)

    def text(self) -> str:
        """Return the summary that `show` prints: folder, metrics, trajectories."""
        return f"{self!r}\n{self.metrics!r}"

    def __repr__(self) -> str:
        num = len(self.metrics)
        return f"Run({str(self.folder)!r}: {num} rows of metrics, {len(self)} trajectories)"

    def _repr_html_(self) -> str:
        return f"<p><b>{escape(str(self.folder))}</b></p>" + self.metrics._repr_html_() + super()._repr_html_()


class TrajectoryPicture:
    """One trajectory as a conversation."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory

    def text(self) -> str:
        """Return the trajectory as lines."""
        lines = [f"{message.role}: {message_text(message)}" for message in self._trajectory.messages]
        return "\n".join([*lines, self._end()])

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td style="color:{COLOURS.get(message.role, "inherit")};vertical-align:top">{escape(message.role)}</td>'
            f'<td style="text-align:left;white-space:pre-wrap">{escape(printable(message_text(message)))}</td></tr>'
            for message in self._trajectory.messages
        )
        return f"<table>{rows}</table><p>{escape(printable(self._end()))}</p>"

    def _end(self) -> str:
        one = self._trajectory
        reward = "no reward" if one.reward is None else f"reward {one.reward.total:g}"
        return f"{one.id}: {one.error or one.stop_reason.value}, {reward}"


def message_text(message: Message) -> str:
    """Return a message's text with its calls."""
    calls = [f"-> {call.name}({dict(call.arguments)})" if call.error is None else call.raw for call in message.tool_calls]
    return "\n".join([*([message.text] if message.text else []), *map(str, calls)])
