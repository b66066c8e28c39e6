"""States of policies and critics on their way through a folder, as a checkpoint takes them, and a policy without any."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyturn.core.metrics import Metrics
from polyturn.core.sample import TrainSample
from polyturn.training.shards import stored_tensors


def stored(one: Any, folder: Path) -> Path:
    """Save `one` into `folder`, wait until that is done, and return it."""
    one.save(folder)
    while not one.is_saved():
        time.sleep(0.01)
    return folder


def hand_over(one: Any, *others: Any) -> None:
    """Let others continue from the state of `one`."""
    with tempfile.TemporaryDirectory() as folder:
        for other in others:
            other.load(stored(one, Path(folder) / "state"))


def tensors_in(folder: Path, prefix: str = "") -> Mapping[str, Any]:
    """Return the whole tensors in a folder whose names begin with `prefix`."""
    return stored_tensors(folder, prefix=prefix)


class MakesFolder:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


class EmptyPolicy:
    """A policy without parameters or state; what a pass does is a subclass's."""

    def score(self, samples: Sequence[TrainSample], *, reference: bool = False) -> list[np.ndarray]:
        return [np.zeros(len(s), np.float32) for s in samples]

    def optim_step(self) -> Metrics:
        return {}

    def save(self, folder: Path) -> None:
        folder.mkdir()

    def is_saved(self) -> bool:
        return True

    def load(self, folder: Path) -> None:
        assert folder.is_dir()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return
