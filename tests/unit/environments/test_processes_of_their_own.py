"""verifiers and OpenEnv, in the interpreter that scripts/environments/build.py makes: their loops, their servers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn.core.errors import ConfigError, MissingModuleError
from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import Trajectory
from polyturn.environments import Adapter, find_adapter
from polyturn.environments.openenv import OpenEnv
from polyturn.environments.scheduler import EnvScheduler, Stage
from polyturn.environments.verifiers import Verifiers
from polyturn.infra.process import session_of
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task, turn_ids
from support.refusals import refuses

ROOT = Path(__file__).resolve().parents[3]
HERE = ROOT / "tests/data/environments"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python() -> dict[str, Any]:
    """Return the interpreter of these packages as a setting, or skip the tests."""
    return interpreter("environments")


def interpreter(name: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "scripts/environments/build.py"), name, "--where"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not (Path(found).parents[1] / ".complete").exists():
        pytest.skip(f"its packages are not installed: python scripts/environments/build.py {name}")
    return {"python": found}


@pytest.fixture(scope="module")
def talk(python: dict[str, Any]) -> Iterator[Verifiers]:
    found = find_adapter("verifiers:vf_talk", python, base=HERE)
    assert isinstance(found, Verifiers)
    yield found
    found.close()


@pytest.fixture(scope="module")
def guess(python: dict[str, Any]) -> Iterator[OpenEnv]:
    found = find_adapter("openenv:./openenv_guess", {**python, "sessions": 2, "servers": 1}, base=HERE)
    assert isinstance(found, OpenEnv)
    yield found
    found.close()


async def run(adapter: Adapter, says: Sequence[str], *, seed: int = 3, id: str = "e", **limits: Any) -> Trajectory:
    context = scripted_context(
        says,
        scheduler=adapter.scheduler() or EnvScheduler({adapter.name: Stage(adapter=adapter)}),
        limits=Limits(max_context=1 << 20, **limits),
    )
    return await run_episode(context, adapter.tasks(split="train", seeds=range(seed, seed + 1))[0], id=id)


def total(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None, trajectory.error
    return trajectory.reward.total


# verifiers


def test_verifiers_loop_asks_the_endpoint_for_its_turns(talk: Verifiers):
    says = ["tea", "milks"]
    found = asyncio.run(run(talk, says))
    assert total(found) == 2.0 and found.stop_reason is StopReason.STOP
    assert found.reward is not None and found.reward.info["num_turns"] == 2.0
    assert [t.observation[0].text for t in found.turns if t.observation] == ["Now a word of 5 letters."]
    assert len(found.segments) == 1, "its second request continues the first, token for token"
    segment = found.segments[0]
    sampled = np.concatenate([turn_ids(text) for text in says])
    assert np.array_equal(segment.token_ids[np.asarray(segment.loss_weights) > 0], sampled)


def test_verifiers_dataset_is_the_tasks(talk: Verifiers):
    tasks = talk.tasks(split="train", seeds=range(3))
    assert [t.prompt[-1].text for t in tasks] == [f"Task {i}. A word of 3 letters." for i in range(3)]
    assert len(talk.tasks(split="eval", seeds=range(100))) == 8, "one that keeps none for evaluation gives what it has"


def test_truncated_rollout_is_scored_by_the_environment(talk: Verifiers):
    found = asyncio.run(run(talk, ["tea", "milks"], max_turns=1))
    assert found.stop_reason is StopReason.MAX_TURNS and total(found) == 1.0


def test_killed_process_fails_its_episodes_and_is_replaced(talk: Verifiers):
    async def use() -> tuple[Trajectory, Trajectory]:
        slow = scripted_context(["tea"], scheduler=talk.scheduler(), latency_s=3600.0, limits=Limits(max_context=1 << 20))
        task = talk.tasks(split="train", seeds=range(1))[0]
        running = asyncio.create_task(run_episode(slow, task, id="slow"))
        while (pid := talk.pid) is None:  # noqa: ASYNC110 (a thread starts it)
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        return await running, await run(talk, ["tea", "milks"], id="next")

    lost, following = asyncio.run(use())
    assert lost.error is not None and "its process has ended" in lost.error
    assert total(following) == 2.0


def test_rollout_past_its_timeout_fails_and_is_cancelled(python: dict[str, Any]):
    short = find_adapter("verifiers:vf_talk", {**python, "timeout_s": 0.3}, base=HERE)
    context = scripted_context(["tea"], scheduler=short.scheduler(), latency_s=3600.0, limits=Limits(max_context=1 << 20))
    found = asyncio.run(run_episode(context, short.tasks(split="train", seeds=range(1))[0], id="late"))
    assert "took longer than 0.3 s for a rollout" in str(found.error)
    short.close()


@pytest.mark.parametrize(
    ("id", "kwargs", "said"),
    [
        ("vf_nowhere", {}, "'vf_nowhere'.*data/environments"),
        ("vf_talk", {"turnz": 3}, "'turnz'"),
        ("vf_download", {}, "with network access"),
        ("vf_talk", {"python": sys.executable}, "pip install verifiers"),
    ],
)
def test_verifiers_environment_that_cannot_load_is_refused(
    id: str, kwargs: dict[str, Any], said: str, python: dict[str, Any]
):
    with pytest.raises(ConfigError, match=said):
        find_adapter(f"verifiers:{id}", {**python, **kwargs}, base=HERE)


@pytest.fixture(scope="module")
def tasksets() -> dict[str, Any]:
    """Return the interpreter that has verifiers 0.4 as a setting, or skip the test."""
    return interpreter("verifiers_v1")


def test_taskset_asks_the_endpoint_and_scores_the_episode(tasksets: dict[str, Any]):
    adapter = find_adapter("verifiers:vf_taskset", {**tasksets, "num": 4}, base=HERE)
    assert [t.prompt[-1].text for t in adapter.tasks(split="train", seeds=range(9))] == [
        f"What is {i} + 7?" for i in range(4)
    ]
    right = asyncio.run(run(adapter, ["It is 7."], seed=0))
    assert total(right) == 1.0 and right.reward is not None and right.reward.info["right"] == 1.0
    adapter.close()
    assert [turn.message.text for turn in right.turns] == ["It is 7."]


def test_taskset_gives_evaluation_other_tasks(tasksets: dict[str, Any], caplog: pytest.LogCaptureFixture):
    adapter = find_adapter("verifiers:vf_taskset", {**tasksets, "num": 6}, base=HERE)

    def ids_and_texts(split: str, seeds: range) -> list[tuple[str, str]]:
        return [(t.id.rpartition("-")[2], t.prompt[-1].text) for t in adapter.tasks(split=split, seeds=seeds)]

    def numbered(*numbers: int) -> list[tuple[str, str]]:
        return [(str(n), f"What is {n} + 7?") for n in numbers]

    assert ids_and_texts("train", range(4)) == numbered(0, 1, 2, 3)
    assert ids_and_texts("eval", range(4, 12)) == numbered(4, 5)
    assert not caplog.messages
    assert ids_and_texts("eval", range(6, 8)) == numbered(0, 1)
    assert "env.eval_tasks" in caplog.messages[0] and "vf_taskset" in caplog.messages[0]
    adapter.close()


def test_module_without_a_taskset_is_refused(tasksets: dict[str, Any]):
    refuses(lambda: find_adapter("verifiers:vf_talk", tasksets, base=HERE), ConfigError, "'vf_talk'", "verifiers<0.4")


# OpenEnv


def test_invalid_action_is_an_observation_a_crash_is_not(guess: OpenEnv):
    async def use() -> list[Trajectory]:
        told = await run(guess, ["I pass", "4"], max_turns=2)
        raised = await run(guess, ["13"], max_turns=2)
        died = await run(guess, ["666"], max_turns=2)
        return [told, raised, died, await run(guess, ["4"], max_turns=1)]

    told, raised, died, following = asyncio.run(use())
    assert "no number" in told.turns[0].observation[0].text and total(told) == 1.0
    assert raised.error is not None and "failed at a step: unlucky" in raised.error
    assert died.error is not None and "closed the connection at a step" in died.error
    assert total(following) == 1.0, "a server that has gone is replaced"


def test_server_ends_with_the_process_that_started_it(tmp_path: Path, python: dict[str, Any]):
    script = tmp_path / "run.py"
    script.write_text(
        "import asyncio, os, sys\nfrom pathlib import Path\nfrom polyturn.environments import find_adapter\n"
        f"adapter = find_adapter('openenv:./openenv_guess', {python!r}, base=Path({str(HERE)!r}))\n"
        "slot = asyncio.run(adapter.take())\nprint(slot.server.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 120
    while session_of(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not session_of(int(done.stdout))


def test_interpreter_without_the_package_is_refused(python: dict[str, Any]):
    with pytest.raises(MissingModuleError, match=r"'openenv' in .*; pip install openenv\b"):
        find_adapter("openenv:./openenv_guess", base=HERE)
    refuses(lambda: find_adapter("openenv:no_such_env.app:app", python, base=HERE), MissingModuleError, "'no_such_env'")


async def test_swift_scheduler_plays_an_episode_on_one_connection(guess: OpenEnv) -> None:
    from polyturn.compat.swift.adapter import SwiftScheduler
    from polyturn.serving.outputs import reward_rows

    slot = await guess.take()
    number = random.Random(5).randint(1, 9)
    wrong = number - 1 if number > 1 else number + 1
    says = [json.dumps({"number": n}) for n in (wrong, wrong)] + ["a word", json.dumps({"number": number})]
    context = scripted_context(
        says, scheduler=SwiftScheduler("openenv_scheduler", max_turns=9), rewards={"*": lambda t: 1.0}
    )
    row = task("<placeholder>", extra={"env_config": {"base_url": slot.url, "reset_kwargs": {"seed": 5}}})
    trajectory = await run_episode(context, row, id="e")
    await guess.give_back(slot)
    assert trajectory.error is None and trajectory.stop_reason is StopReason.ENV_DONE
    infos = reward_rows(trajectory)[0]["rollout_infos"]
    assert infos["step_rewards"] == pytest.approx([-0.1, -0.1, 0.0, 1.0]), "one episode, whose number stays the same"
    told = [m.text for m in trajectory.messages if m.role == "user"]
    assert "Guess from 1 to 9." in told[0] and told[3].startswith('"The action is refused: ')


async def test_swift_scheduler_names_a_server_that_is_not_there() -> None:
    from polyturn.compat.swift.adapter import SwiftScheduler

    context = scripted_context(["a"], scheduler=SwiftScheduler("openenv_scheduler"), rewards={"*": lambda t: 1.0})
    row = task("<placeholder>", extra={"env_config": {"base_url": "http://127.0.0.1:1"}})
    trajectory = await run_episode(context, row, id="e")
    assert "the environment 'openenv:http://127.0.0.1:1' cannot be reached" in (trajectory.error or "")


def test_episodes_share_a_server_that_ends_with_the_run(guess: OpenEnv):
    """A closed adapter does not start another server."""

    async def use() -> list[Trajectory]:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(run(guess, [*"19234"], id=f"e{i}", max_turns=5)) for i in range(4)]
        return [task.result() for task in running]

    for found in asyncio.run(use()):
        assert found.stop_reason is StopReason.ENV_DONE and total(found) == pytest.approx(0.6)
        assert found.turns[0].observation[0].text == "higher"
    slot = asyncio.run(guess.take())
    assert slot.num_used == 1, "the four episodes, two at a time, have given their places back"
    pid = slot.server.pid  # type: ignore[union-attr]
    assert session_of(pid)
    guess.close()
    guess.close()
    assert not session_of(pid)
