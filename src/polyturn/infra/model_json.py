"""Reads a JSON file of a model's folder, such as config.json, with a readable message if the file is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from polyturn.core.errors import CheckpointError, one_line


def read_model_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:  # a file in another encoding raises a ValueError, too
        raise CheckpointError(f"{file} cannot be read ({one_line(problem)}); copy the model again") from problem
    if not isinstance(about, dict):
        raise CheckpointError(f"{file} does not contain a JSON object; copy the model again")
    return about
