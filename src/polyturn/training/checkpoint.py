"""Checkpoints: a folder per step that is either whole or not there, and from which a run goes on.

    checkpoints/step-000040/state.pt      step, task order, evaluation state
                            policy/       parameters and optimizer in shards (`shards`), and critic/ where there is one
                            model/        weights, tokenizer, template in Hugging Face format, made of the shards
    checkpoints/best        a link-free copy of the name: a text file that says which step was best

A checkpoint is written into a hidden folder and renamed, so that a kill at any moment leaves the last good one intact; the
one that it replaces is renamed first, and comes back if the kill fell between the two.
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
from safetensors import SafetensorError

from polyturn.core.errors import CheckpointError, one_line
from polyturn.core.protocols import Stored

STATE = "state.pt"
MODEL = "model"
WARM_START = "warm_start"
"""The folder, in a run's, of the checkpoint of a warm start that is under way."""
_BEST = "best"
_FORMER, _GONE = ".former-", ".gone-"
_POLL_S = 0.02
"""Seconds between two looks at whether the shards are written."""
_MAX_SAVING = 50
"""Checkpoints by time keep at least so many times apart what writing one takes, so that they cost 2 % at most."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int = 2, keep_every: int = 0, former: Path | None = None) -> None:
        """Keep the newest `keep` ones, the best one, and those of every `keep_every` steps for good; 0 keeps none so.

        The folder `former`, of checkpoints that a run goes on from until there is one here, is removed with the first.
        """
        self.folder = folder
        self._keep = keep
        self._keep_every = keep_every
        self._former = former

    def save(self, step: int, state: Mapping[str, Any], **options: Any) -> Path:
        """Write the checkpoint of `step` and return its folder; the arguments and errors are those of `begin`."""
        return self.begin(step, state, **options)()

    def begin(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        export: Callable[[Path], object],
        stored: Mapping[str, Stored] | None = None,
        is_best: bool = False,
    ) -> Callable[[], Path]:
        """Begin to write the shards, and return a function that writes the rest, in a thread or not.

        Older checkpoints beyond `keep` go then, the best one stays.

        Args:
            step: The number of optimizer steps taken.
            state: Everything needed to continue beside the shards.
            export: Writes the model in Hugging Face format into the folder that it is given, once the shards are written.
            stored: What writes itself in shards, from copies, each in a folder of its name.
            is_best: Whether this is the best one so far.

        Raises:
            CheckpointError: it cannot be written, for instance on a full disk; the earlier ones are intact.
        """
        draft, parts = self.folder / f".draft-{step:06d}", stored or {}
        with self._writing(draft, step):
            self._restore()  # before the names are used again that a kill left aside
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            for name, one in parts.items():
                one.save(draft / name)

        def finish() -> Path:
            with self._writing(draft, step):
                while not all(one.is_saved() for one in parts.values()):
                    time.sleep(_POLL_S)
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
        """Write the rest of a draft, and give it its name."""
        final = self.folder / f"step-{step:06d}"
        with (draft / STATE).open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())  # a crash of the machine may keep the rename below and lose the bytes
        former = self.folder / f"{_FORMER}{final.name}"
        # Two renames, because no system call exchanges two folders: between them `_restore` knows which name is missing.
        if final.exists():
            final.rename(former)
        draft.rename(final)
        _discard(former)
        return final

    @contextmanager
    def _writing(self, draft: Path, step: int) -> Iterator[None]:
        """Remove a draft that cannot be written, and name the free space, of which torch's own error says nothing."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as problem:
            free = f"; {shutil.disk_usage(self.folder).free / 1e6:.0f} MB are free there" if self.folder.is_dir() else ""
            shutil.rmtree(draft, ignore_errors=True)
            last = self.latest()
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self.folder} ({problem}{free}); "
                f"the last good one is {last if last else 'none'}"
            ) from problem

    def mark_best(self, step: int) -> None:
        """Mark the checkpoint of `step` as the best one; it stays, however many follow."""
        draft = self.folder / f".{_BEST}"
        draft.write_text(f"step-{step:06d}\n")  # a name and no link: object stores and copies keep no links
        draft.replace(self.folder / _BEST)

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint; None if there is none."""
        checkpoints = self._all()
        return checkpoints[-1] if checkpoints else None

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
            CheckpointError: it is missing or damaged.
        """
        file = path / STATE
        if not file.is_file():
            raise CheckpointError(f"there is no checkpoint at {path}; a checkpoint is a folder with {STATE} in it")
        try:
            # Tensors and plain values alone: a foreign checkpoint must not run code.
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as problem:  # whatever damaged bytes come to
            raise CheckpointError(
                f"the checkpoint {file} cannot be read ({one_line(problem)}); to resume from an earlier one, remove {path}"
            ) from problem
        return state

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        self._restore()
        folders = [p for p in self.folder.glob("step-*") if p.name.removeprefix("step-").isdigit() and (p / STATE).is_file()]
        return sorted(folders, key=lambda p: int(p.name.removeprefix("step-")))

    def _restore(self) -> None:
        """Bring back a checkpoint that a kill left set aside, and clear what a kill left half deleted."""
        for former in self.folder.glob(f"{_FORMER}step-*"):
            final = self.folder / former.name.removeprefix(_FORMER)
            if final.exists():
                _discard(former)
            else:
                former.rename(final)
        for rest in self.folder.glob(f"{_GONE}*"):
            shutil.rmtree(rest, ignore_errors=True)

    def _prune(self) -> None:
        best = self.best()  # read once `mark_best` has run: the former best may go with this very checkpoint
        for old in self._all()[: -self._keep]:
            step = int(old.name.removeprefix("step-"))
            stays = self._keep_every and step and step % self._keep_every == 0
            if old != best and not stays:
                _discard(old)


class SavingClock:
    """Decides when the next checkpoint is due by time."""

    def __init__(self, every_s: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Let one be due every `every_s` seconds, or later where writing one takes long; None lets none be due."""
        self._every_s = every_s
        self._clock = clock
        self._saved, self._saving_s = clock(), 0.0
        """When the latest checkpoint was written, and how long that held up training."""

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
            self._saved = self._clock()  # counted from the end, so that slow disks never leave only saving to do
            self._saving_s = self._saved - began


class Saver:
    """Writes checkpoints beside training, one after another, from copies that no step changes: ranks their shards, and a
    thread here the rest.

    A kill while one is being written leaves the one before it. The next call of `save` or `wait` raises what went wrong.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    def save(self, step: int, state: Mapping[str, Any], **options: Any) -> None:
        """Begin to write the checkpoint of `step`, once the one before it is written; `state` and `export`, of the
        options of `Checkpoints.begin`, share nothing with what is trained.

        Raises:
            CheckpointError: the one before it could not be written.
        """
        self.wait()
        finish = self._checkpoints.begin(step, state, **options)

        def work() -> None:
            try:
                finish()
            except BaseException as problem:  # a thread's own would be printed and forgotten
                self._problem = problem

        self._thread = threading.Thread(target=work, name="polyturn-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until what was begun is written.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem


def _discard(folder: Path) -> None:
    """Delete `folder` so that no half of it can be taken for a checkpoint."""
    if folder.exists():
        # Renamed first: a deletion takes seconds, and a kill within them would leave a folder that lacks some shards.
        gone = folder.with_name(f"{_GONE}{folder.name}")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
