"""verl.experimental.agent_loop.utils: paths of the files that loops are configured by."""

from __future__ import annotations

from pathlib import Path


def resolve_config_path(config_path: str) -> str:
    """Return the absolute path of a file; a relative one starts from the working directory.

    Raises:
        FileNotFoundError: a relative path leads to no file.
    """
    path = Path(config_path)
    if path.is_absolute():
        return config_path
    if not (found := path.resolve()).exists():
        raise FileNotFoundError(f"Agent loop configuration file not found: {config_path} (looked for {found})")
    return str(found)
