"""kill -9 in the middle of a conversation, and another process goes on: no call of a complete turn is made twice.

The tool and the interaction write every call into a file; one call, the first time it is made, kills its own process.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from polyturn.cli.main import main
from support.crash_injection import ledger_problems
from support.forked import run_forked, run_program
from support.runs import SEVERAL_TURNS, call_command, write_tiny_run

call = partial(call_command, main)

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
        is_fatal = count == 2 and instance_id[:2] in ("g2", "g3") and not (here / "killed").exists()
        if is_fatal and instance_id != "g3/1" and hasattr(self, "snapshot"):
            await asyncio.Event().wait()  # else the kill could find a call that is made and its turn not yet written
        if is_fatal and instance_id == "g3/1":
            key, held = ("state" if hasattr(self, "snapshot") else "trajectory"), {instance_id}
            written = here / "runs/tiny/checkpoints/step-000001"  # whose weights sampled these turns
            # Until a complete turn of all others is on disk, or, of those without, the whole.
            while len(held) < 6 or not written.exists():
                await asyncio.sleep(0.01)
                for journal in here.glob("runs/tiny/journal/step-*.jsonl"):
                    said = [json.loads(line) for line in journal.read_text().split("\\n")[:-1] if line]
                    held |= {line["s"] for line in said if key in line and line["s"][:2] in ("g2", "g3")}
            (here / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with (here / "calls.txt").open("a") as file:
            file.write(f"{instance_id} {count}\\n")
        return False, f"Say it again, for the {count}. time.", 0.5, {}

    async def finalize_interaction(self, instance_id=None, **kwargs):
        del self.counts[instance_id]
"""
HOOKS = """
    async def snapshot(self, instance_id):
        return self.counts[instance_id]

    async def restore(self, instance_id, state):
        self.counts[instance_id] = state
"""


def killed_and_resumed(folder: Path, coach: str) -> tuple[dict[str, int], dict[str, float], str]:
    """Return how often each call was made, the counts of the resumed run's first step, and what it said."""
    config = write_tiny_run(folder)
    plugins = (folder / "plugins.py").read_text()
    head, _, tail = plugins.partition("class Coach")
    (folder / "plugins.py").write_text(head + coach + tail[tail.index("\n\n\nclass GoesOn") :])
    settings = ["evaluation.data=null", "warm_start.conversations=null", "train.steps=3", "train.checkpoint_every=1"]
    settings += SEVERAL_TURNS
    first = run_forked("train", config, *settings)
    assert first.returncode == -9, first.err
    assert not ledger_problems(folder / "runs" / "tiny", steps=1), "one step is trained, the second was collecting"
    resumed = call("train", config, *settings, "--resume")
    assert resumed.code == 0, resumed.err
    after = (folder / "calls.txt").read_text().splitlines()
    assert not ledger_problems(folder / "runs" / "tiny", steps=3)
    lines = [json.loads(line) for line in (folder / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    metrics = next(line for line in lines if line["step"] == 2)
    return Counter(after), metrics, resumed.err


@pytest.mark.slow
def test_an_interaction_with_a_snapshot_is_asked_once_for_every_turn(tmp_path: Path):
    calls, metrics, said = killed_and_resumed(tmp_path, COUNTING + HOOKS)
    assert max(calls.values()) == 1, {made: count for made, count in calls.items() if count > 1}
    assert {made for made in calls if made.startswith("g3/1 ")} == {f"g3/1 {count}" for count in (1, 2, 3, 4)}
    assert metrics["rollout/resumed_episodes"] == 6 and metrics["rollout/restarted_episodes"] == 0
    assert "conversations in flight: 6 went on from their last complete turn, 0 start from their tasks" in said


@pytest.mark.slow
def test_one_without_is_asked_again_by_the_one_conversation_that_was_not_over(tmp_path: Path):
    calls, metrics, said = killed_and_resumed(tmp_path, COUNTING)
    assert {made for made, count in calls.items() if count > 1} == {"g3/1 1"}
    assert metrics["rollout/resumed_episodes"] == 5 and metrics["rollout/restarted_episodes"] == 1
    assert "(1 times: interaction 'coach' offers no snapshot and is not declared stateless)" in said


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


def test_a_tool_is_called_once_for_every_call_across_two_kills(tmp_path: Path):
    assert [run_program(TOOL, tmp_path, die_at).returncode for die_at in (2, 5)] == [-9, -9]
    last = run_program(TOOL, tmp_path, -1)
    assert last.returncode == 0 and last.out.strip() == "['1', '2', '3', '4', '5', '6']", last.err
    assert (tmp_path / "calls.txt").read_text().split() == ["1", "2", "3", "4", "5", "6"]
