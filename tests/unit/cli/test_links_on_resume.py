"""A resumed run neither reads nor writes through a link out of its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn.cli.main import main
from support.runs import call_command, write_tiny_run


@pytest.mark.parametrize("name", ["checkpoints", "trajectories", "warm_start", "journal"])
def test_link_out_of_the_run_is_refused(tmp_path: Path, name: str) -> None:
    config, outside = write_tiny_run(tmp_path), tmp_path / "outside"
    outside.mkdir()
    run = tmp_path / "runs" / "tiny"
    run.mkdir(parents=True)
    (run / name).symlink_to(outside)
    called = call_command(main, "train", config, "--resume")
    assert called.code != 0 and f"{run / name} is a symbolic link" in called.err
    assert list(outside.iterdir()) == []
