"""What a command prints can be pasted, what it is given is recognised, and what fails leaves nothing and costs no load."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import polyturn
from polyturn.build import parts as parts_module
from polyturn.cli.console import command, program
from polyturn.cli.main import main
from polyturn.cli.serve import ServeOptions
from polyturn.core.errors import ConfigError
from polyturn.infra.writable import check_file_writable
from polyturn.tokens.hub import only_cached, unreachable
from support.runs import call_command, write_tiny_run

call = functools.partial(call_command, main)


def test_a_printed_command_starts_this_program_wherever_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    line = command("show", "my run", "task 7; rm -rf/0")
    assert shlex.split(line)[-3:] == ["show", "my run", "task 7; rm -rf/0"]
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    own = Path(sys.executable).with_name("polyturn")
    if own.is_file():
        assert Path(program()[0]).absolute() == own
        monkeypatch.setenv("PATH", str(own.parent))
        assert program() == ["polyturn"]
    (tmp_path / "polyturn").write_text("#!/bin/sh\necho another\n")
    (tmp_path / "polyturn").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() != ["polyturn"], "another program of this name is found first"
    assert shutil.which("polyturn") is not None


def test_the_version_is_told():
    said = call("--version")
    assert (said.code, said.out.strip()) == (0, f"polyturn {polyturn.__version__}")


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("actor_rollout_ref: {model: {path: x}}\ntrainer: {total_epochs: 1}\n", "--verl"),
        ("defaults: [ppo_trainer, _self_]\ndata: {train_files: a}\nactor_rollout_ref: {}\n", "--verl"),
        ("defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {model: {path: x}}\n", "--verl"),
        ("algorithm: {adv_estimator: grpo}\ntrainer: {n_gpus_per_node: 8}\n", "--verl"),
        ("actor_rollout_ref: {model: {path: x}}\n", "--verl"),
        ("hydra: {searchpath: [file://x]}\ndefaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 8}\n", "--verl"),
        ("rlhf_type: grpo\nmodel: x\ndataset: [a]\n", "--swift"),
    ],
)
def test_a_config_of_another_library_is_recognised(tmp_path: Path, text: str, flag: str):
    (tmp_path / "c.yaml").write_text(text)
    for name in ("train", "plan", "doctor", "config"):
        said = call(name, tmp_path / "c.yaml")
        assert said.code == 2 and f"add {flag}" in said.err, said.err


def test_a_config_of_ours_is_not_migrated(tmp_path: Path):
    (tmp_path / "c.yaml").write_text("model: {path: x}\ntrain: {steps: 3}\n")
    said = call("config", "migrate", tmp_path / "c.yaml")
    assert said.code == 2 and "is written in polyturn's keys already" in said.err


@pytest.mark.parametrize(
    "text", ["trainer: {steps: 1}\n", "modle: {path: x}\n", "data: {trian: x}\nalgorithm: {}\ndefaults: []\n"]
)
def test_a_mistake_in_a_config_of_ours_is_not_taken_for_another_library(tmp_path: Path, text: str):
    (tmp_path / "c.yaml").write_text(text)
    said = call("train", tmp_path / "c.yaml")
    assert said.code == 2 and "add --" not in said.err


def test_a_port_that_was_asked_for_is_no_other():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*--port"):
            ServeOptions(port=port).bind()
        with ServeOptions(first_port=port).bind() as found:
            assert found.getsockname()[1] != port


def test_a_data_command_that_fails_leaves_nothing_behind(tmp_path: Path):
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


@pytest.mark.parametrize("out", ["/proc/none", "a-file", "a-file/below", "a" * 300])
@pytest.mark.parametrize(
    "words",
    [
        "init",
        "export run --out",
        "data gsm8k --from . --out",
        "data geo3k --from . --out",
        "data search --from . --out",
        "data index a-file --out",
    ],
)
def test_a_folder_that_cannot_be_made_is_told_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, out: str
):
    monkeypatch.chdir(tmp_path)
    Path("a-file").write_text("{}")
    said = call(*words.split(), out)
    assert said.code == 2 and f"the folder '{out}' cannot be made or written" in said.err, said


@pytest.mark.parametrize("out", ["/proc/none/x.png", "a-file/x.png", "a-folder"])
@pytest.mark.parametrize(
    "words", ["report run -o", "plot run -o", "simulate all_short --png", "config migrate a-file --out"]
)
def test_a_file_that_cannot_be_written_is_told_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, out: str
):
    monkeypatch.chdir(tmp_path)
    Path("a-file").write_text("{}")
    Path("a-folder").mkdir()
    said = call(*words.split(), out)
    assert said.code == 2 and ("cannot be made or written" in said.err or "'a-folder' is a folder" in said.err), said


MISTAKES = [
    "algorithm.advantage=grop",
    "algorithm.loss=nothing",
    "reward.function=missing.py:fn",
    "reward.function=plugins.py:nothing",
    "rollout.interactions=[{name: other, class_name: 'plugins.py:Coach', config: {}}]",
    "rollout.interactions=[{name: coach, class_name: 'plugins.py:Nothing', config: {}}]",
    "rollout.tools.functions=['nowhere.py:f']",
    "rollout.scheduler=nothing",
    "plugins=[broken.py]",
    "data.sampler=mine.py:Chooses",
    "algorithm.advantage=mine.py:one_argument",
    "algorithm.advantage=mine.py:Estimator",
    "algorithm.advantage=mine.py:yields",
    "algorithm.loss=mine.py:one_argument",
    "algorithm.loss=mine.py:Estimator",
    "rollout.tools.functions=['mine.py:counts']",
    "reward.routes.tiny=mine.py:yields",
    "rollout.interactions=[{name: coach, class_name: 'mine.py:Yields', config: {}}]",
]
MINE = '''\
import polyturn
from polyturn.data.sampler import Curriculum


class Chooses(Curriculum):
    def chose(self, epoch):
        return [0]


def one_argument(rewards):
    return rewards


class Estimator:
    def __call__(self, rewards_G, samples_G):
        return []


def yields(trajectory, samples=None):
    yield 1.0


def counts(to: int):
    """Count.

    Args:
        to: How far.
    """
    yield from range(to)


class Yields(polyturn.BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        yield True, "x", 1.0, {}
'''


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_before_any_weights_are_loaded(tmp_path: Path, mistake: str, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken.py").write_text("import a_module_that_is_nowhere\n")
    (tmp_path / "mine.py").write_text(
        MINE.replace("def counts", "@polyturn.tool\ndef counts") if "counts" in mistake else MINE
    )
    config = write_tiny_run(tmp_path)
    monkeypatch.setattr(parts_module, "build_model", lambda *_, **__: pytest.fail("weights were loaded"))
    said = call("train", config, "--dry-run", mistake)
    assert said.code == 2, (said.out, said.err)
    assert "Traceback" not in said.err


def test_more_minibatches_than_trajectories_are_told_to_be_fewer(tmp_path: Path):
    said = call("train", write_tiny_run(tmp_path), "--dry-run", "train.minibatches=40")
    assert said.code == 2 and "lower minibatches to at most" in said.err and "ranks" not in said.err


@pytest.mark.parametrize("command", [("train", "--dry-run"), ("train",), ("rollout",), ("eval",), ("sft",)])
@pytest.mark.parametrize("kind", ["a file", "a file above", "of the kernel", "unwritable", "a link to nothing"])
def test_a_folder_that_cannot_be_made_is_found_before_weights_are_loaded(tmp_path: Path, monkeypatch, kind: str, command):
    config = write_tiny_run(tmp_path)
    out = tmp_path / "out"
    if kind.startswith("a file"):
        out.write_text("")
        out = out if kind == "a file" else out / "runs"
    elif kind == "of the kernel":  # a superuser has the permission, and still cannot
        out = Path("/proc/runs")
    elif kind == "unwritable":
        out.mkdir(mode=0o500)
        if os.access(out, os.W_OK):
            pytest.skip("root may write everywhere")
    else:
        out.symlink_to(tmp_path / "gone" / "away")
    monkeypatch.setattr("polyturn.build.build_parts", lambda *args, **kwargs: pytest.fail("weights were loaded"))
    changes = [f"out={out}", "warm_start.steps=3", "warm_start.conversations=rows.jsonl"]
    said = call(command[0], config, *command[1:], *(changes if command[0] == "sft" else changes[:1]))
    assert said.code == 2 and "cannot be made" in said.err and "out=FOLDER" in said.err
    assert not [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".polyturn")]


WRITERS = [
    ("report", ".", "-o"), ("plot", ".", "--out"), ("simulate", "swe_like", "--png"),
    ("simulate", "--fit=http://x", "--out"),
    ("rescore", "run", "--reward=f", "--out"), ("config", "migrate", "verl.yaml", "--out"), ("export", ".", "-o"),
]  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: "-".join(writer[:2]))
@pytest.mark.parametrize("kind", ["a pipe", "a link to a device", "a file that is not ours"])
def test_what_is_no_file_is_never_written_nor_replaced(tmp_path: Path, monkeypatch, kind: str, writer: tuple[str, ...]):
    out = tmp_path / "out.yaml"
    if kind == "a pipe":
        os.mkfifo(out)
    elif kind == "a link to a device":
        out.symlink_to("/dev/null")
    else:
        out.write_text("")
        out.chmod(0o400)
        if os.access(out, os.W_OK):
            pytest.skip("root may write everywhere")
    (tmp_path / "verl.yaml").write_text("actor_rollout_ref: {}\n")
    monkeypatch.chdir(tmp_path)
    before = out.lstat()[:7]  # all but when it was looked at
    said = call(*writer, out)
    assert said.code == 2 and re.search("no regular file|cannot be written|cannot be made", said.err), said
    assert out.lstat()[:7] == before


def test_a_regular_file_is_written_again_and_only_asking_leaves_it_as_it_is(tmp_path: Path):
    out = tmp_path / "old.txt"
    out.write_text("old")
    check_file_writable(out)
    assert out.read_text() == "old"


def test_a_run_may_be_checked(tmp_path: Path):
    config = write_tiny_run(tmp_path)
    made = call("train", config, "train.steps=1")
    assert made.code == 0, made.err
    run = next((tmp_path / "runs").iterdir())
    assert call("check", run).out.startswith("property")
    said = call("check", config)
    assert said.code == 2 and "is a file" in said.err


@pytest.mark.slow
def test_without_a_hub_there_is_one_attempt_and_one_sentence(tmp_path: Path):
    """In a process of its own, because the library reads its settings when it is imported."""
    asked = (
        "import urllib.request, polyturn.tokens.codec as c\n"
        "n = []; real = urllib.request.urlopen\n"
        "urllib.request.urlopen = lambda *a, **k: (n.append(1), real(*a, **k))[1]\n"
        "try: c.load_codec('nobody/nothing')\n"
        "except Exception as problem: print(type(problem).__name__, len(n), problem)\n"
    )
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path)}
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "http_proxy", "HTTP_PROXY"):
            environment.pop(name, None)
        said = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
        assert said.stdout.startswith("ConfigError 1 'nobody/nothing' is no folder here"), said
        assert "cannot be reached" in said.stdout
        environment["HF_HUB_OFFLINE"] = "1"
        said = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
        assert said.stdout.startswith("ConfigError 0") and "unset HF_HUB_OFFLINE" in said.stdout, said


def test_folders_and_paths_are_not_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("the hub was asked"))
    for name in (str(tmp_path), "./nowhere", "/nowhere/at/all", "a/b/c", "~/models"):
        assert only_cached(name) is False
    assert callable(unreachable)
