"""Commands refuse files that they cannot write before they compute anything, and never touch special files."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import pytest

from polyturn.cli.main import main
from polyturn.infra.writable import check_file_writable
from support.runs import call_command, write_tiny_run

call = functools.partial(call_command, main)

FOLDERS = (
    "init",
    "export run --out",
    "data gsm8k --from . --out",
    "data geo3k --from . --out",
    "data search --from . --out",
    "data index a-file --out",
)
FILES = (
    "report run -o",
    "report run --metric reward/mean -o",
    "config migrate a-file --out",
    "rescore run --reward=f --out",
    "export . -o",
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a-file").write_text("actor_rollout_ref: {}\n")
    Path("a-folder").mkdir()
    Path("run/trajectories").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "out"),
    [*((words, "/proc/none") for words in FOLDERS), *(("init", out) for out in ("a-file", "a-file/below", "a" * 300))],
)
def test_folder_that_cannot_be_made_is_refused(here: Path, words: str, out: str) -> None:
    called = call(*words.split(), out)
    assert called.code == 2 and out in called.err and "cannot be made or written" in called.err, called


@pytest.mark.parametrize(
    ("words", "out"),
    [*((words, "/proc/none/x.png") for words in FILES[:4]), *(("report run -o", out) for out in ("a-file/x", "a-folder"))],
)
def test_file_that_cannot_be_written_is_refused(here: Path, words: str, out: str) -> None:
    called = call(*words.split(), out)
    assert called.code == 2 and out.split("/x")[0] in called.err, called
    assert re.search("cannot be made or written|is a folder", called.err), called


@pytest.mark.parametrize("words", FILES)
def test_pipe_or_device_is_never_written_nor_replaced(here: Path, words: str) -> None:
    for kind in ("pipe", "device"):
        out = here / f"{kind}.yaml"
        os.mkfifo(out) if kind == "pipe" else out.symlink_to("/dev/null")
        before = out.lstat()[:7]  # without the access time
        called = call(*words.split(), out)
        assert called.code == 2 and re.search("not a regular file|cannot be written|cannot be made", called.err), called
        assert out.lstat()[:7] == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_file_without_permission_is_not_written(here: Path) -> None:
    out = here / "out.html"
    out.write_text("")
    out.chmod(0o400)
    called = call("report", ".", "-o", out)
    assert called.code == 2 and "cannot be" in called.err


def test_check_of_a_writable_file_leaves_its_text(tmp_path: Path) -> None:
    out = tmp_path / "old.txt"
    out.write_text("old")
    check_file_writable(out)
    assert out.read_text() == "old"


@pytest.mark.parametrize(
    ("command", "out"),
    [
        *((command, "a-file") for command in ("train", "train --dry-run", "rollout", "eval", "sft")),
        *(("train", out) for out in ("a-file/runs", "/proc/runs", "link/away")),
    ],
)
def test_impossible_run_folder_is_refused_before_weights_load(
    here: Path, monkeypatch: pytest.MonkeyPatch, command: str, out: str
) -> None:
    config = write_tiny_run(here)
    Path("link").symlink_to("gone")
    monkeypatch.setattr("polyturn.build.build_parts", lambda *args, **kwargs: pytest.fail("weights were loaded"))
    name, *flags = command.split()
    out = out if out.startswith("/") else str(here / out)
    changes = [f"out={out}", *(["warm_start={steps: 3, conversations: conversations.jsonl}"] if name == "sft" else [])]
    called = call(name, config, *flags, *changes)
    assert called.code == 2 and "cannot be made" in called.err and "out=FOLDER" in called.err, called
    assert not [entry.name for entry in here.iterdir() if entry.name.startswith(".polyturn")]


def test_failed_data_command_leaves_nothing_behind(tmp_path: Path) -> None:
    source, out = tmp_path / "from", tmp_path / "a" / "b"
    source.mkdir()
    (source / "train.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    (source / "test.jsonl").write_text("no JSON\n")
    assert call("data", "gsm8k", "--from", source, "--out", out).code == 2
    assert not (tmp_path / "a").exists()
    out.mkdir(parents=True)
    (out / "mine.txt").write_text("kept")
    assert call("data", "gsm8k", "--from", source, "--out", out).code == 2
    assert [p.name for p in out.iterdir()] == ["mine.txt"]
