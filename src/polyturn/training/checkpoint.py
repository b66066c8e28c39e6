"""Checkpoints: one folder per step, either complete or absent, from which a run resumes.

    checkpoints/step-000040/state.pt      step, task order, evaluation state
                            policy/       parameters and optimizer in shards (`shards`); critic/ if there is a critic
                            model/        weights, tokenizer, template in Hugging Face format, made from the shards
    checkpoints/best        a text file with the name of the best checkpoint

A checkpoint is written into a hidden folder and renamed, so that a kill at any moment leaves the previous one intact. A
folder of the same name is renamed first, and restored if the kill falls between the two renames.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from polyturn.core.errors import CheckpointError, RankLostError, one_line
from polyturn.core.protocols import Stored

STATE = "state.pt"
MODEL = "model"
WARM_START = "warm_start"
"""Name of the folder, in the run's folder, for the checkpoint of an unfinished warm start."""
_BEST = "best"
_DRAFT, _FORMER, _GONE = ".draft-", ".former-", ".gone-"
_POLL_S = 0.02
"""Seconds between two checks whether the shards are written."""
_MAX_SAVING = 50
"""Checkpoints by time are at least this many times the writing time apart, so that they cost at most 2 %."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int = 2, keep_every: int = 0, former: Path | None = None) -> None:
        """Keep the newest `keep` checkpoints and the best one, and forever the checkpoints of steps that `keep_every`
        divides (0: none).

        `former` has the checkpoints of an earlier run to resume from; it is removed when the first checkpoint is written
        here.
        """
        self.folder = folder
        self._keep = keep
        self._keep_every = keep_every
        self._former = former

    def save(self, step: int, state: Mapping[str, Any], **options: Any) -> Path:
        """Write the checkpoint of `step` and return its folder; takes and raises the same as `begin`."""
        return self.begin(step, state, **options)()

    def begin(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        export: Callable[[Path], object] | None,
        stored: Mapping[str, Stored] | None = None,
        is_best: bool = False,
    ) -> Callable[[], Path]:
        """Start writing the shards, and return a function that writes the rest, which may run in a thread.

        That function also removes older checkpoints beyond `keep`, except the best one.

        Args:
            step: The number of steps taken.
            state: The state needed to resume, except the shards.
            export: Writes the model in Hugging Face format into a folder, once the shards are written; None leaves it out.
            stored: Name -> part that writes its state in shards, from copies, into the folder of that name.
            is_best: Whether this is the best checkpoint so far.

        Raises:
            CheckpointError: the checkpoint cannot be written, for instance on a full disk; earlier ones are intact.
            RankLostError: a rank is gone with its shards.
        """
        draft, parts = self.folder / f"{_DRAFT}{step:06d}", stored or {}
        with self._writing(draft, step):
            self._restore()  # a kill may have left folders under these names
            for rest in self.folder.glob(f"{_DRAFT}*"):  # of a kill during a write, perhaps of another step
                shutil.rmtree(rest, ignore_errors=True)
            draft.mkdir(parents=True)
            for name, one in parts.items():
                one.save(draft / name)

        def finish() -> Path:
            with self._writing(draft, step):
                while not all(one.is_saved() for one in parts.values()):
                    time.sleep(_POLL_S)
                if export is not None:
                    export(draft / MODEL)
                final = self._write(draft, step, state)
                if is_best:
                    self.mark_best(step)
                self._prune()
            if self._former is not None:
                shutil.rmtree(self._former, ignore_errors=True)
            return final

        return finish

    def _write(self, draft: Path, step: int, state: Mapping[str, Any]) -> Path:
        """Write the rest of a draft and rename it."""
        final = self.folder / f"step-{step:06d}"
        with (draft / STATE).open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine may keep the rename below and lose the bytes
        former = self.folder / f"{_FORMER}{final.name}"
        # Two renames, because no portable call exchanges two folders; `_restore` repairs a kill between them.
        if final.exists():
            final.rename(former)
        draft.rename(final)
        _discard(former)
        return final

    @contextmanager
    def _writing(self, draft: Path, step: int) -> Iterator[None]:
        """Remove a draft that cannot be written, and add the free space to the error, which torch's error lacks."""
        try:
            yield
        except RankLostError:  # not a matter of the disk: the run restarts or ends
            shutil.rmtree(draft, ignore_errors=True)
            raise
        except Exception as problem:  # the tokenizers library raises Exception itself if the disk is full
            free = f"; {shutil.disk_usage(self.folder).free / 1e6:.0f} MB are free there" if self.folder.is_dir() else ""
            shutil.rmtree(draft, ignore_errors=True)
            last = self.latest()
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self.folder} ({problem}{free}); "
                f"the last good one is {last if last else 'none'}. Free space and resume; with "
                "train.on_checkpoint_error: warn a run continues until the next checkpoint"
            ) from problem

    def mark_best(self, step: int) -> None:
        """Mark the checkpoint of `step` as the best one, which is kept until another is better."""
        draft = self.folder / f".{_BEST}"
        draft.write_text(f"step-{step:06d}\n")  # a name, not a link, because object stores do not keep links
        draft.replace(self.folder / _BEST)

    def latest(self) -> Path | None:
        """Return the newest checkpoint; None if there is none."""
        checkpoints = self._all()
        return checkpoints[-1] if checkpoints else None

    def latest_step(self) -> int | None:
        """Return the step of the newest checkpoint; None if there is none."""
        latest = self.latest()
        return None if latest is None else _step_of(latest)

    def best(self) -> Path | None:
        """Return the best checkpoint; None if none was marked."""
        mark = self.folder / _BEST
        if not mark.is_file():
            return None
        chosen = self.folder / mark.read_text().strip()
        return chosen if (chosen / STATE).is_file() else None

    def load(self, path: Path) -> dict[str, Any]:
        """Return the state that `save` wrote.

        Raises:
            CheckpointError: the checkpoint is missing or damaged.
        """
        file = path / STATE
        if not file.is_file():
            raise CheckpointError(f"there is no checkpoint at {path}; a checkpoint is a folder with {STATE} in it")
        try:
            # Only tensors and plain values: a foreign checkpoint must not run code.
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as problem:  # damaged bytes may raise anything
            raise CheckpointError(
                f"the checkpoint {file} cannot be read ({one_line(problem)}); to resume from an earlier one, remove {path}"
            ) from problem
        return state

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        self._restore()
        folders = [p for p in self.folder.glob("step-*") if p.name.removeprefix("step-").isdigit() and (p / STATE).is_file()]
        return sorted(folders, key=_step_of)

    def _restore(self) -> None:
        """Restore a checkpoint that a kill left renamed, and remove checkpoints that a kill left half deleted."""
        for former in self.folder.glob(f"{_FORMER}step-*"):
            final = self.folder / former.name.removeprefix(_FORMER)
            if final.exists():
                _discard(former)
            else:
                former.rename(final)
        for rest in self.folder.glob(f"{_GONE}*"):
            shutil.rmtree(rest, ignore_errors=True)

    def _prune(self) -> None:
        best = self.best()  # after `mark_best`, so that the former best may be removed now
        for old in self._all()[: -self._keep]:
            step = _step_of(old)
            stays = self._keep_every and step and step % self._keep_every == 0
            if old != best and not stays:
                _discard(old)


class SavingClock:
    """Decides when the next checkpoint is due by time."""

    def __init__(self, every_s: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Make a checkpoint due every `every_s` seconds, or later if writing takes long; None: never."""
        self._every_s = every_s
        self._clock = clock
        self._saved, self._saving_s = clock(), 0.0
        """Time of the latest checkpoint, and the seconds for which it paused training."""

    def is_due(self) -> bool:
        """Return whether it is time to save."""
        if self._every_s is None:
            return False
        return self._clock() - self._saved >= max(self._every_s, _MAX_SAVING * self._saving_s)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time the writing of a checkpoint."""
        began = self._clock()
        try:
            yield
        finally:
            self._saved = self._clock()  # measured from the end, so that a slow disk does not fill the run with saving
            self._saving_s = self._saved - began


class Saver:
    """Writes checkpoints during training, one at a time, from copies that training does not change: the ranks write their
    shards, and a thread writes the rest.

    A kill during a write leaves the previous checkpoint. The next call of `save` or `wait` raises the error of a failed
    write.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    def save(self, step: int, state: Mapping[str, Any], **options: Any) -> None:
        """Start writing the checkpoint of `step`, once the previous one is written. `state` and `export` (options of
        `Checkpoints.begin`) must not share memory with the trained model.

        Raises:
            CheckpointError, RankLostError: the previous checkpoint could not be written.
        """
        self.wait()
        finish = self._checkpoints.begin(step, state, **options)

        def work() -> None:
            try:
                finish()
            except BaseException as problem:  # an exception in a thread would only be printed
                self._problem = problem

        self._thread = threading.Thread(target=work, name="polyturn-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint under way is written.

        Raises:
            CheckpointError, RankLostError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _discard(folder: Path) -> None:
    """Delete `folder` without leaving a partial checkpoint if a kill interrupts."""
    if folder.exists():
        # Renamed first, because deleting takes seconds, and a kill during it would leave a folder that lacks some shards.
        gone = folder.with_name(f"{_GONE}{folder.name}")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
