"""Environments of GEM, skyrl-gym and TRL's kind, against the real packages, and the processes that others run in."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn.core.errors import ConfigError, DataError, MissingModuleError, SchedulerError, UnknownNameError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory
from polyturn.environments import Adapter, find_adapter
from polyturn.environments.base import OwnRandom
from polyturn.environments.json_subprocess import JsonSubprocess
from polyturn.environments.scheduler import EnvScheduler, Stage
from polyturn.infra.process import ManagedProcess
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context
from support.benchmark import load_benchmark
from support.cases import needs
from support.refusals import refuses, refuses_later

pytestmark = needs("gem", "skyrl_gym", extra="environments")

ROOT = Path(__file__).resolve().parents[3]
HERE = ROOT / "tests/data/environments"
GUESS = "gem:game:GuessTheNumber-v0-easy"


def run(adapter: Adapter, says: Sequence[str], *, task: Task | None = None, seed: int = 3, **limits: Any) -> Trajectory:
    context = scripted_context(
        says,
        tools=adapter.tools(),
        scheduler=adapter.scheduler() or EnvScheduler({adapter.name: Stage(adapter=adapter)}),
        limits=Limits(max_context=1 << 20, **limits),
    )
    task = task or adapter.tasks(split="train", seeds=range(seed, seed + 1))[0]
    return asyncio.run(run_episode(context, task, id="e"))


def total(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None, trajectory.error
    return trajectory.reward.total


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def row(**columns: Any) -> Task:
    return Task(id="r", prompt=(Message(role="user", content="9 * 8?"),), extra=columns)


ROWS = load_benchmark("_environment_rows")


@pytest.mark.parametrize("case", [*ROWS.GEM, *ROWS.skyrl_cases()], ids=lambda case: case.name)
def test_episode_earns_what_the_package_gives(case: Any):
    own = case.own()
    adapter = find_adapter(case.name, case.kwargs)
    found = run(adapter, own.actions, task=case.task(adapter), max_turns=len(own.actions))
    assert len(found.turns) == len(own.actions)
    assert total(found) == pytest.approx(own.reward)


# GEM


def test_gem_game_shows_its_text_with_the_suffix():
    env = find_adapter(GUESS).make()
    shown = env.reset(seed=3)
    assert "between 1 and 10" in shown and shown.endswith("Enter your next guess.")
    observation, reward, is_terminated, is_truncated, _ = env.step("no number")
    assert (reward, is_terminated, is_truncated) == (-0.1, True, False)
    assert "did not provide a valid guess" in observation and "Enter your next guess" not in observation
    env.close()


def test_gem_game_draws_by_its_seed_alone():
    adapter = find_adapter("gem:game:Minesweeper-v0-easy")

    def play(meddles: bool) -> list[Any]:
        env = adapter.make()
        seen = [env.reset(seed=5)]
        for action in ("\\boxed{reveal 0 0}", "\\boxed{reveal 4 4}"):
            if meddles:
                other = adapter.make()
                other.reset(seed=random.randrange(1000))
                other.step("\\boxed{reveal 2 2}")
                np.random.rand(3)
            seen.append(env.step(action)[:2])
        return seen

    assert play(meddles=True) == play(meddles=False)


def test_gem_leaves_random_state_and_root_logger_alone():
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), logging.getLogger().handlers[:]
    env = find_adapter(GUESS).make()
    env.reset(seed=9)
    env.step("\\boxed{5}")
    assert (random.getstate(), np.random.get_state()[1].tolist(), logging.getLogger().handlers[:]) == before


def test_hanging_environment_does_not_hold_the_random_state(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("polyturn.environments.base.HELD_S", 0.05)
    with OwnRandom().held(), pytest.raises(SchedulerError, match="its step hangs"), OwnRandom().held():
        pass


@pytest.mark.parametrize(
    ("name", "kwargs", "error", "said"),
    [
        ("gem:game:GuessTheNumber-v0-eazy", {}, UnknownNameError, "Did you mean 'game:GuessTheNumber-v0-easy'"),
        ("gem:game:Sokoban-v0-easy", {"dim_room": 3}, ConfigError, "cannot be made with kwargs {'dim_room': 3}"),
        ("gem:game:Sudoku-v0-easy", {"clues": "many"}, ConfigError, "change env.kwargs"),
        ("skyrl:gsm9k", {}, UnknownNameError, "Did you mean 'gsm8k'"),
        ("skyrl:gsm8k", {"env_config": 3}, ConfigError, "env_config is 3; write a mapping"),
        ("trl:counter.py:Nothing", {}, ConfigError, "Nothing"),
        ("trl:counter.py:NoReset", {}, ConfigError, "NoReset has no method reset"),
        ("trl:counter.py:NoDocstring", {}, ConfigError, "NoDocstring.go is not a tool: .* has no docstring"),
        ("trl:counter.py:NoTools", {}, ConfigError, "no public method besides reset"),
        ("trl:counter.py:Counter", {"goall": 2}, ConfigError, "cannot be made with kwargs {'goall': 2}"),
        ("verifiers:x", {"python": "/no/such/python"}, ConfigError, "there is no interpreter '/no/such/python'"),
        ("openenv:./nowhere", {}, ConfigError, "there is no .*openenv.yaml"),
        ("openenv:word", {}, ConfigError, "is not an application"),
        ("openenv:http://127.0.0.1:1", {"sesions": 2}, ConfigError, "Did you mean 'sessions'"),
        ("openenv:http://127.0.0.1:1", {"servers": 0}, ConfigError, "of at least 1"),
        ("openenv:http://127.0.0.1:1", {"sessions": "two"}, ConfigError, "sessions is 'two'"),
    ],
)
def test_environment_that_cannot_work_is_refused(name: str, kwargs: Mapping[str, Any], error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        find_adapter(name, kwargs, base=HERE)


@pytest.mark.parametrize(
    ("name", "module", "line"),
    [("gem:game:Wordle-v0-easy", "gem", "pip install gem-llm"), ("skyrl:gsm8k", "skyrl_gym", "pip install skyrl-gym")],
)
def test_missing_package_names_the_line_that_installs_it(name: str, module: str, line: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingModuleError, match=line):
        find_adapter(name)


# skyrl-gym


def test_skyrl_row_is_scored_by_its_environment():
    adapter = find_adapter("skyrl:gsm8k_multi_turn")
    rows = [row(reward_spec={"method": "rule", "ground_truth": "72"}, max_turns=3, data_source="openai/gsm8k")]
    found = run(adapter, ["#### 70", "#### 72"], task=adapter.of_rows(rows)[0])
    assert [t.scores["env"] for t in found.turns] == [pytest.approx(0.2 / 3), 1.0]
    assert total(found) == pytest.approx(1 + 0.2 / 3) and found.stop_reason is StopReason.ENV_DONE


def test_skyrl_row_that_lacks_a_column_is_a_data_error():
    adapter = find_adapter("skyrl:gsm8k")
    refuses(lambda: adapter.make_for(adapter.of_rows([row()])[0]), DataError, "reward_spec field is required")
    refuses(lambda: adapter.tasks(split="train", seeds=range(2)), ConfigError, "set data.train.files")


# TRL's kind


def test_public_methods_of_a_trl_class_are_tools():
    adapter = find_adapter("trl:counter.py:Counter", base=HERE)
    increment, look = sorted((tool.schema["function"] for tool in adapter.tools()), key=lambda f: f["name"])
    assert increment["name"] == "increment" and increment["description"] == "Add to the counter."
    assert increment["parameters"]["properties"] == {"by": {"type": "integer", "description": "How much."}}
    assert look["name"] == "look" and look["parameters"]["properties"] == {}


def test_static_method_of_a_trl_class_is_not_offered_as_tool(tmp_path: Path):
    (tmp_path / "game.py").write_text(
        "class Game:\n    def reset(self): pass\n    def go(self) -> str:\n        'Go.'\n"
        "    @staticmethod\n    def helper(): pass\n"
    )
    assert [tool.name for tool in find_adapter("trl:game.py:Game", base=tmp_path).tools()] == ["go"]


def test_trl_episode_has_an_object_of_its_own():
    adapter = find_adapter("trl:counter.py:Counter", {"goal": 3}, base=HERE)
    context = scripted_context(
        [call("increment", '{"by": 1}'), call("increment", '{"by": 2}') + "\n" + call("look", "{}"), "Done."],
        tools=adapter.tools(),
        scheduler=adapter.scheduler(),
        limits=Limits(max_context=1 << 20),
    )
    tasks = adapter.tasks(split="train", seeds=range(4))

    async def all_at_once() -> list[Trajectory]:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(run_episode(context, task, id=task.id)) for task in tasks]
        return [task.result() for task in running]

    for found in asyncio.run(all_at_once()):
        assert total(found) == 1.0
        assert [r.content for t in found.turns for r in t.tool_results] == ["1", "3", "It shows 3."]
    assert adapter.live == {}, "nothing is held behind its episode"  # type: ignore[attr-defined]


def test_trl_reset_gets_the_row_and_extends_the_prompt():
    adapter = find_adapter("trl:counter.py:Counter", base=HERE)
    found = run(adapter, [call("increment", '{"by": 5}'), "Done."], task=adapter.of_rows([row(to=5)])[0])
    assert total(found) == 1.0
    shown = found.segments[0].token_ids
    assert "9 * 8?\nCount to 5." in scripted_context([]).codec.decode(shown.tolist())


def test_trl_method_gets_values_of_its_annotations():
    found = run(find_adapter("trl:counter.py:Calendar", base=HERE), [call("weekday", '{"day": "2026-02-02"}'), "Done."])
    assert [r.content for r in found.turns[0].tool_results] == ["Monday"]


def test_trl_method_that_raises_is_an_observation():
    found = run(find_adapter("trl:counter.py:Counter", base=HERE), [call("increment", '{"by": -1}'), "Sorry."])
    assert found.error is None and "only forwards" in str(found.turns[0].tool_results[0].content)
    assert total(found) == 0.0


# processes


WORKER = """
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    print("noise")
    if asked["do"] == "die":
        print("out of memory", file=sys.stderr); sys.exit(3)
    if asked["do"] == "sleep":
        continue
    print(json.dumps({"id": asked["id"], "value": asked.get("what")}), flush=True)
"""


def test_dead_worker_is_replaced_by_the_next_request(tmp_path: Path):
    greeted: list[Any] = []
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    worker = JsonSubprocess(
        (sys.executable, str(script)), name="it", greet=lambda ask: greeted.append(ask("hello", what="hi"))
    )

    async def use() -> None:
        assert await worker.call("say", what=[1, 2]) == [1, 2]
        first = worker.pid
        await refuses_later(lambda: worker.call("die"), SchedulerError, "it: its process has ended: out of memory")
        assert await worker.call("say", what="again") == "again" and worker.pid != first
        waits = asyncio.create_task(worker.call("sleep"))
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    asyncio.run(use())
    assert greeted == ["hi", "hi"]
    worker.close()
    worker.close()
    assert worker.pid is None
    refuses(lambda: worker.start(), SchedulerError, "the run has ended")


def test_end_of_a_dead_worker_fails_only_its_own_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script, arrived, go = tmp_path / "worker.py", tmp_path / "arrived", tmp_path / "go"
    script.write_text(
        "import json, pathlib, sys, time\n"
        "for line in sys.stdin:\n"
        "    pathlib.Path(sys.argv[1]).touch()\n"
        "    while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)\n"
        "    print(json.dumps({'id': json.loads(line)['id'], 'value': 'done'}), flush=True)\n"
    )
    worker = JsonSubprocess((sys.executable, str(script), str(arrived), str(go)), name="it")
    worker.start()
    dead, wait, may_end = worker.pid, ManagedProcess.wait, threading.Event()
    assert dead is not None
    (reader,) = [thread for thread in threading.enumerate() if thread.name == "answers-it"]

    def wait_at_the_gate(process: ManagedProcess, timeout_s: float) -> bool:
        return wait(process, timeout_s) and (process.pid != dead or may_end.wait(60))

    monkeypatch.setattr(ManagedProcess, "wait", wait_at_the_gate)
    os.kill(dead, signal.SIGKILL)
    while worker.pid is not None:
        time.sleep(0.01)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(worker.ask, "work")
        while not arrived.exists():
            time.sleep(0.01)
        may_end.set()
        reader.join(60)
        go.touch()
        assert answer.result(60) == "done"
    worker.close()


@pytest.mark.parametrize("leaves", ["sys.exit(3)", "os.close(1)"])
def test_request_fails_when_the_worker_stops_answering(tmp_path: Path, leaves: str):
    script, go = tmp_path / "worker.py", tmp_path / "go"
    script.write_text(
        "import json, os, subprocess, sys\n"
        "wait = 'import pathlib, sys, time\\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)'\n"
        "for line in sys.stdin:\n"
        "    request = json.loads(line)\n"
        "    if request['do'] == 'leave':\n"
        "        if 'exit' in sys.argv[2]:\n"
        "            subprocess.Popen([sys.executable, '-c', wait, sys.argv[1]], start_new_session=True)\n"
        "        exec(sys.argv[2])\n"
        "    else: print(json.dumps({'id': request['id'], 'value': 'x' * 300_000}), flush=True)\n"
    )
    worker = JsonSubprocess((sys.executable, str(script), str(go), leaves), name="it")
    try:
        refuses(lambda: worker.ask("leave", timeout_s=60), SchedulerError, "it: its process has ended")
        assert worker.ask("work", timeout_s=60) == "x" * 300_000, "by a new process"
        worker.close()
    finally:
        go.touch()


def test_worker_has_no_secret_unless_it_is_given_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys\n"
        "for line in sys.stdin:\n"
        "    print(json.dumps({'id': json.loads(line)['id'], 'value': dict(os.environ)}), flush=True)\n"
    )
    monkeypatch.setenv("WANDB_API_KEY", "wandb-secret")
    monkeypatch.setenv("HF_TOKEN", "hf-secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    worker = JsonSubprocess((sys.executable, str(script)), name="it", variables={"JUDGE_KEY": "mine"})
    seen = worker.ask("show")
    worker.close()
    assert "secret" not in str(seen)
    assert seen["JUDGE_KEY"] == "mine" and seen["HF_HUB_OFFLINE"] == "1" and seen["PATH"]
