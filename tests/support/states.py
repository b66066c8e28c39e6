"""States of policies and critics on their way through a folder, as a checkpoint takes them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
