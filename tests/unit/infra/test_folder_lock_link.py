"""The lock of a run's folder is a file of the folder, never a link out of it."""

from pathlib import Path

import pytest

from polyturn.core.errors import ConfigError
from polyturn.infra.folder_lock import NAME, hold_folder


def test_link_in_place_of_the_lock_is_refused_and_not_written_through(tmp_path: Path) -> None:
    target = tmp_path / "notes.txt"
    target.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / NAME).symlink_to(target)
    with pytest.raises(ConfigError, match="symbolic link"), hold_folder(run):
        pass
    assert target.read_text() == "mine"


def test_folder_is_held_once(tmp_path: Path) -> None:
    with hold_folder(tmp_path), pytest.raises(ConfigError, match="trains into"), hold_folder(tmp_path):
        pass
    with hold_folder(tmp_path):
        pass
