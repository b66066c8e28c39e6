"""Reads files of an untrusted folder without following symbolic links out of it.

    contained(run, "config.yaml")                      run/config.yaml; None if there is no such file
    contained(run, "config.yaml")  -> /etc/passwd      DataError: a symbolic link leads out of the folder

Run folders are copied and sent around, and a viewer shows their files to others. A symbolic link in a run must not expose
other files of this machine. The folder itself may be reached through a link.
"""

from __future__ import annotations

from pathlib import Path

from polyturn.core.errors import DataError


def contained(folder: Path, name: str) -> Path | None:
    """Return the resolved path of a file or folder inside `folder`; None if it does not exist.

    Raises:
        DataError: a symbolic link leads out of `folder`, or the path is neither a plain file nor a folder.
    """
    try:
        base, path = folder.resolve(), (folder / name).resolve()
    except (OSError, RuntimeError, ValueError) as problem:  # links that lead in a circle, a name that no file can have
        raise DataError(f"{name} of {str(folder)!r} cannot be followed to a file: {problem}") from problem
    if not path.is_relative_to(base):
        raise DataError(
            f"{name} of {str(folder)!r} leads out of the folder through a symbolic link, and such links are not followed; "
            "put the file itself there"
        )
    try:
        if path.is_file() or path.is_dir():
            return path
        if path.exists():
            raise DataError(f"{name} of {str(folder)!r} is neither a file nor a folder")
    except PermissionError as problem:
        raise DataError(f"{name} of {str(folder)!r} cannot be read: permission denied") from problem
    return None


def read_contained(folder: Path, name: str, *, max_bytes: int) -> str | None:
    """Return the text of a file inside `folder`, with invalid bytes replaced; None if the file does not exist.

    Raises:
        DataError: as `contained`, or the file is larger than `max_bytes` or cannot be read.
    """
    path = contained(folder, name)
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as problem:
        raise DataError(f"{name} of {str(folder)!r} cannot be read: {problem.strerror}") from problem
    if len(data) > max_bytes:
        raise DataError(f"{name} of {str(folder)!r} is larger than {max_bytes} bytes, more than such a file ever is")
    return data.decode("utf-8", "replace")
