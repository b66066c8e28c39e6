"""Modules of the working folder stay out of the processes that score."""

from pathlib import Path

import pytest

from polyturn.rewards.processes import Processes

PROGRAM = "def score(n):\n    return n + 1\n"


def test_module_of_the_working_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward.py").write_text(PROGRAM)
    work = tmp_path / "work"
    work.mkdir()
    (work / "difflib.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.chdir(work)
    processes = Processes(f"{tmp_path / 'reward.py'}:score", num=1, timeout_s=120.0)
    try:
        assert processes(n=1) == 2
    finally:
        processes.close()
    assert not (tmp_path / "ran").exists()
