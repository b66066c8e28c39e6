"""Environments of other interpreters are complete or not there, however many build them and however a build ends."""

from __future__ import annotations

import os
import runpy
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PROGRAM = """
import subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from venv_cache import built

run = subprocess.run  # without pip, which nothing here needs and which takes most of the time
subprocess.run = lambda line, **options: run([*line[:3], "--without-pip", *line[3:]], **options)

folder = Path(sys.argv[2])

def fill(python):
    print("filling", folder.exists(), flush=True)
    (python.parent / "tool").write_text(f"#!{python}\\nimport sys; print(sys.prefix)\\n")
    (python.parent / "tool").chmod(0o755)
    sys.stdin.readline()

print("built", built(folder, fill), flush=True)
"""


def start(folder: Path) -> subprocess.Popen[str]:
    """Start a builder, which waits for a line in the middle of its build."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(SCRIPTS), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def next_line(builder: subprocess.Popen[str]) -> str:
    return builder.stdout.readline().strip()


def test_environment_is_not_there_before_it_is_complete(tmp_path: Path):
    folder = tmp_path / "cache" / "env-1"
    builder = start(folder)
    assert next_line(builder) == "filling False" and not folder.exists()
    said, _ = builder.communicate("\n")
    assert said == f"built {folder / 'bin' / 'python'}\n"
    ran = subprocess.run([str(folder / "bin" / "tool")], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(folder), "its programs start its own interpreter"
    assert start(folder).communicate()[0] == said, "an environment that is there is not built again"


def test_killed_build_is_made_again(tmp_path: Path):
    folder = tmp_path / "env-1"
    first = start(folder)
    assert next_line(first) == "filling False"
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not folder.exists()
    second = start(folder)
    assert next_line(second) == "filling False"
    assert second.communicate("\n")[0].startswith("built") and (folder / "bin" / "tool").exists()


def test_two_builders_build_one_environment(tmp_path: Path):
    folder = tmp_path / "env-1"
    first, second = start(folder), start(folder)
    (ready, *_), _, _ = select.select([first.stdout, second.stdout], [], [])
    assert ready.readline() == "filling False\n"
    working, waiting = (first, second) if ready is first.stdout else (second, first)
    assert working.communicate("\n")[0].startswith("built")
    assert waiting.communicate()[0] == f"built {folder / 'bin' / 'python'}\n", "the second one filled nothing"


def test_incomplete_environment_has_no_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build = runpy.run_path(str(SCRIPTS / "environments" / "build.py"))
    folder = build["folder"]("trl")
    assert folder.is_relative_to(tmp_path) and build["interpreter"]("trl") is None
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    assert build["interpreter"]("trl") is None, "nothing says that it is complete"
    (folder / ".complete").touch()
    assert build["interpreter"]("trl") == folder / "bin" / "python"


@pytest.mark.parametrize("separator", ["-", "/"])
def test_build_removes_unused_environments_of_the_same_name(tmp_path: Path, separator: str):
    long_ago = 1.0
    old, new, other, built = (separator.join(parts) for parts in (("env", "a"), ("env", "b"), ("other", "a"), ("env", "c")))
    for name, used in ((old, long_ago), (new, None), (other, long_ago)):
        (tmp_path / name).mkdir(parents=True)
        stamp = tmp_path / name / ".complete"
        stamp.touch()
        if used is not None:
            os.utime(stamp, (used, used))
    builder = start(tmp_path / built)
    assert next_line(builder) == "filling False"
    builder.communicate("\n")
    folders = {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob(".complete")}
    assert folders == {new, other, built}
