"""Runs in separate processes are interrupted or killed, and continue in another process.

Signals are sent after a step of the run (`support/resumed_runs.py`), or at a random time.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from polyturn.cli.main import main
from polyturn.training.checkpoint import Checkpoints
from support.crash_injection import kill_until_done, ledger_problems
from support.forked import ONE_THREAD, Forked, run_forked, run_program
from support.resumed_runs import (
    SETTINGS,
    STEPS,
    check_equal_runs,
    check_equal_weights,
    latest_checkpoint,
    training_lines,
    write_interrupted_run,
)
from support.runs import SEVERAL_TURNS, call_command, write_tiny_run

pytestmark = [pytest.mark.kill, pytest.mark.timeout(900)]

call = functools.partial(call_command, main)
BARE = ("evaluation.data=null", "warm_start.conversations=null")
BESIDE_TRAINING = ("train.max_staleness=1", "engine.deterministic=false")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was never stopped, in a process like the others'."""
    folder = tmp_path_factory.mktemp("whole")
    done = run_forked("train", write_tiny_run(folder), *SETTINGS, env={**os.environ, **ONE_THREAD})
    assert done.returncode == 0, done.err
    return folder / "runs" / "tiny"


def resume(config: Path, *settings: str) -> None:
    done = run_forked("train", config, *SETTINGS, *settings, "--resume", env={**os.environ, **ONE_THREAD})
    assert done.returncode == 0, done.err


@pytest.mark.parametrize(
    ("number", "code", "settings"),
    [
        (signal.SIGINT, 130, ()),
        pytest.param(signal.SIGTERM, 143, (), marks=pytest.mark.slow),
        (signal.SIGKILL, -9, ()),
        (signal.SIGINT, 130, BESIDE_TRAINING),
    ],
    ids=["interrupt", "term", "kill", "interrupt beside training"],
)
def test_stopped_run_resumes(tmp_path: Path, whole: Path, number: int, code: int, settings: tuple[str, ...]) -> None:
    config, run = write_interrupted_run(tmp_path, number, after=3), tmp_path / "runs" / "tiny"
    stopped = run_forked("train", config, *SETTINGS, *settings)
    assert stopped.returncode == code, stopped.err
    assert "Traceback" not in stopped.err
    done = len(training_lines(run))
    assert 3 <= done < STEPS
    assert latest_checkpoint(run).name == ("step-000002" if code == -9 else f"step-{done:06d}")
    resume(config, *settings)
    if settings:
        assert [line["step"] for line in training_lines(run)] == list(range(1, STEPS + 1)), "each step once"
    else:
        check_equal_runs(run, whole)


@pytest.mark.slow
def test_run_whose_terminal_closes_reaches_its_checkpoint(tmp_path: Path, whole: Path) -> None:
    """Its output has no reader any more when the signal comes."""
    config, run = write_interrupted_run(tmp_path, signal.SIGHUP), tmp_path / "runs" / "tiny"
    (tmp_path / "hold").touch()
    command = [sys.executable, "-m", "polyturn", "train", str(config), *SETTINGS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **ONE_THREAD})
    try:
        while not (tmp_path / "reached").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.stdout.close()
        (tmp_path / "hold").unlink()
        assert process.wait(200) == 128 + signal.SIGHUP
    finally:
        process.kill()
        process.wait()
    assert latest_checkpoint(run).name == f"step-{len(training_lines(run)):06d}"
    resume(config)
    check_equal_runs(run, whole)


WARM_STEPS = 150
WARM = (
    *("train.steps=1", f"warm_start.steps={WARM_STEPS}", "warm_start.batch_size=2", "engine.deterministic=true"),
    "train.checkpoint_every=0.001s",
)


def check_warm_start(folder: Path) -> None:
    steps = [json.loads(line)["step"] for line in (folder / "sft_metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, WARM_STEPS + 1)), "each step once"
    assert not (folder / "warm_start").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_stopped_warm_start_resumes(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "whole").mkdir()
    assert call("train", write_tiny_run(tmp_path / "whole"), *WARM).code == 0
    config, run = write_tiny_run(tmp_path / "stopped"), tmp_path / "stopped" / "runs" / "tiny"
    process = Forked("train", config, *WARM)
    process.wait_until(lambda: Checkpoints(run / "warm_start").latest() is not None)
    process.send_signal(number)
    code = process.wait(280)
    if number == signal.SIGINT:
        assert code == 130, process.err
        assert re.search(r"of the warm start; resume with: \S*polyturn train", process.err)
    before = (run / "config.yaml").read_text()
    refused = call("train", config, *WARM, "model.init.hidden_size=32", "--resume")
    assert refused.code == 2 and (run / "config.yaml").read_text() == before
    called = call("train", config, *WARM, "--resume")
    assert called.code == 0, called.err
    check_warm_start(run)
    check_equal_weights(run, tmp_path / "whole" / "runs" / "tiny")


def test_stopped_supervised_training_resumes(tmp_path: Path) -> None:
    config, run = write_tiny_run(tmp_path), tmp_path / "runs" / "tiny-sft"
    process = Forked("sft", config, *WARM)
    process.wait_until((run / "sft_metrics.jsonl").is_file)
    process.send_signal(signal.SIGTERM)
    assert process.wait(280) == 143, process.err
    (again,) = re.findall(r"resume with: (.*)", process.err)
    called = call(*shlex.split(again)[1:])
    assert called.code == 0, called.err
    check_warm_start(run)
    assert [p.name for p in run.parent.iterdir()] == ["tiny-sft"]
    assert (run / "model" / "config.json").is_file()


def test_second_process_is_kept_out_of_the_folder(tmp_path: Path, whole: Path) -> None:
    config, run = write_interrupted_run(tmp_path, None), tmp_path / "runs" / "tiny"
    (tmp_path / "hold").touch()
    process = Forked("train", config, *SETTINGS)
    try:
        process.wait_until((tmp_path / "reached").exists)
        before = (run / "config.yaml").read_text()
        refused = call("train", config, *SETTINGS, "train.optim.lr=1", "--resume")
        assert refused.code == 2, refused.err
        assert f"process {process.pid} on {socket.gethostname()} trains into {run}" in refused.err
        assert (run / "config.yaml").read_text() == before and process.poll() is None
    finally:
        process.kill()
        process.wait()
    (tmp_path / "hold").unlink()
    resume(config)
    check_equal_runs(run, whole)


def test_signal_within_a_log_line_does_not_write_into_it() -> None:
    code = """
import logging, os, signal, threading
from polyturn.api.signals import Signals
done = threading.Event()
class Interrupted(logging.Handler):
    depth = 0
    def emit(self, record):
        self.depth += 1
        if record.msg == "first":
            os.kill(os.getpid(), signal.SIGINT)
        os.write(1, f"{self.depth} {record.msg}\\n".encode())
        self.depth -= 1
        if record.msg != "first":
            done.set()
logging.getLogger().addHandler(Interrupted())
with Signals():
    logging.warning("first")
    assert done.wait(60)
"""
    first, second = run_program(code).out.splitlines()
    assert first == "1 first" and second.startswith("1 interrupted; ")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    """As under `nohup`, or in a job that a script put into the background."""
    code = (
        f"import os, signal; signal.signal({int(number)}, signal.SIG_IGN)\n"
        "from polyturn.api.signals import Signals\n"
        f"with Signals() as noted:\n    os.kill(os.getpid(), {int(number)})\n    print(noted.received)"
    )
    assert run_program(code).out == "[]\n"


SLOW = "        import asyncio, os\n        await asyncio.sleep(0.05 * os.urandom(1)[0] / 255)\n        return False,"


@pytest.mark.chance
@pytest.mark.parametrize(("kills", "steps"), [(1, 8), pytest.param(5, 16, marks=pytest.mark.slow)])
def test_random_kills_skip_and_repeat_no_task(tmp_path: Path, kills: int, steps: int) -> None:
    """The interaction takes a random time, so that groups finish in any order and kills come at any point."""
    config, run = write_tiny_run(tmp_path), tmp_path / "runs" / "tiny"
    plugins = tmp_path / "plugins.py"
    plugins.write_text(plugins.read_text().replace("        return False,", SLOW))
    settings = [*BARE, *SEVERAL_TURNS, f"train.steps={steps}", "train.checkpoint_every=2", "train.max_staleness=1"]
    seed = random.SystemRandom().randrange(10**6)
    killed = kill_until_done(config, settings, run=run, steps=steps, kills=kills, seed=seed, max_wait_s=0.3)
    assert killed.problems == [], f"seed {seed}"
    assert killed.kills, killed
    assert latest_checkpoint(run).name == f"step-{steps:06d}"


COUNTING = """
class Coach(BaseInteraction):
    def __init__(self, config):
        super().__init__(config)
        self.counts = {}

    async def start_interaction(self, instance_id=None, **kwargs):
        self.counts[instance_id] = 0
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        import asyncio, json, os, pathlib, signal
        self.counts[instance_id] += 1
        count, here = self.counts[instance_id], pathlib.Path(__file__).parent
        is_held = count == 2 and instance_id[:2] in ("g2", "g3") and not (here / "killed").exists()
        if is_held and instance_id != "g3/1":
            await asyncio.Event().wait()  # else the kill could find a call that is made and its turn not yet written
        if is_held:
            written, held = here / "runs/tiny/checkpoints/step-000001", {instance_id}
            while len(held) < 6 or not written.exists():  # until a complete turn of all others is on disk
                await asyncio.sleep(0.01)
                for journal in here.glob("runs/tiny/journal/step-*.jsonl"):
                    said = [json.loads(line) for line in journal.read_text().split("\\n")[:-1] if line]
                    held |= {line["s"] for line in said if "state" in line and line["s"][:2] in ("g2", "g3")}
            (here / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with (here / "calls.txt").open("a") as file:
            file.write(f"{instance_id} {count}\\n")
        return False, f"Say it again, for the {count}. time.", 0.5, {}

    async def finalize_interaction(self, instance_id=None, **kwargs):
        del self.counts[instance_id]

    async def snapshot(self, instance_id):
        return self.counts[instance_id]

    async def restore(self, instance_id, state):
        self.counts[instance_id] = state
"""


@pytest.mark.slow
def test_interaction_is_asked_once_per_turn_across_a_kill(tmp_path: Path) -> None:
    config, run = write_tiny_run(tmp_path), tmp_path / "runs" / "tiny"
    head, _, tail = (tmp_path / "plugins.py").read_text().partition("class Coach")
    (tmp_path / "plugins.py").write_text(head + COUNTING + tail[tail.index("\n\n\nclass GoesOn") :])
    settings = [*BARE, "train.steps=3", "train.checkpoint_every=1", *SEVERAL_TURNS]
    first = run_forked("train", config, *settings)
    assert first.returncode == -9, first.err
    assert not ledger_problems(run, steps=1), "one step is trained, the second was collecting"
    resumed = call("train", config, *settings, "--resume")
    assert resumed.code == 0, resumed.err
    assert not ledger_problems(run, steps=3)
    calls = Counter((tmp_path / "calls.txt").read_text().splitlines())
    assert max(calls.values()) == 1, {made: count for made, count in calls.items() if count > 1}
    assert {made for made in calls if made.startswith("g3/1 ")} == {f"g3/1 {count}" for count in (1, 2, 3, 4)}
    second = next(line for line in training_lines(run) if line["step"] == 2)
    assert (second["rollout/resumed_episodes"], second["rollout/restarted_episodes"]) == (6, 0)


TOOL = """
import asyncio, os, pathlib, signal, sys
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.base import BaseTool
from polyturn.training.journal_file import JournalFile

HERE = pathlib.Path(sys.argv[1])
CALL = '<tool_call>\\n{"name": "count", "arguments": {}}\\n</tool_call>'


class Count(BaseTool):
    def __init__(self):
        empty = {"type": "object", "properties": {}}
        super().__init__({}, {"type": "function", "function": {"name": "count", "description": "x", "parameters": empty}})
        self.counts = {}

    async def create(self, instance_id=None, **kwargs):
        self.counts[instance_id] = 0
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        if self.counts[instance_id] == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        self.counts[instance_id] += 1
        with (HERE / "calls.txt").open("a") as file:
            file.write(f"{self.counts[instance_id]}\\n")
        return str(self.counts[instance_id])

    def snapshot(self, instance_id):
        return {"count": self.counts[instance_id]}

    def restore(self, instance_id, state):
        self.counts[instance_id] = state["count"]


def says(request):
    return CALL if int(request.request_id.rpartition("/")[2]) < 6 else "#### 4"


journal = JournalFile(HERE / "journal")
journal.resume(0, oldest=lambda ticket: 0) if (HERE / "journal").exists() else journal.begin(0)
context = scripted_context(says, tools=[Count()], journal=journal)
trajectory = asyncio.run(run_episode(context, task(), id="g0/0"))
print([turn.tool_results[0].content for turn in trajectory.turns[:-1]])
"""


def test_tool_is_called_once_per_call_across_two_kills(tmp_path: Path) -> None:
    assert [run_program(TOOL, tmp_path, die_at).returncode for die_at in (2, 5)] == [-9, -9]
    last = run_program(TOOL, tmp_path, -1)
    assert last.returncode == 0 and last.out.strip() == "['1', '2', '3', '4', '5', '6']", last.err
    assert (tmp_path / "calls.txt").read_text().split() == ["1", "2", "3", "4", "5", "6"]
