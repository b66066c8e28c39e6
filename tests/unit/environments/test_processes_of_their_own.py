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

ROOT = Path(__file__).resolve().parents[3]
HERE = ROOT / "tests/data/environments"
WHERE = subprocess.run(
    [sys.executable, str(ROOT / "scripts/environments/build.py"), "--where"], capture_output=True, text=True, check=True
).stdout.strip()
PYTHON = {"python": WHERE}
pytestmark = pytest.mark.skipif(
    not (Path(WHERE).parents[1] / ".complete").exists(),
    reason="python scripts/environments/build.py builds what they run in",
)


@pytest.fixture(scope="module")
def talk() -> Iterator[Verifiers]:
    found = find_adapter("verifiers:vf_talk", PYTHON, base=HERE)
    assert isinstance(found, Verifiers)
    yield found
    found.close()


@pytest.fixture(scope="module")
def guess() -> Iterator[OpenEnv]:
    found = find_adapter("openenv:./openenv_guess", {**PYTHON, "sessions": 2, "servers": 1}, base=HERE)
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


def test_the_environments_own_loop_asks_the_endpoint_and_the_sampled_tokens_are_the_record(talk: Verifiers):
    says = ["tea", "milks"]
    found = asyncio.run(run(talk, says))
    assert total(found) == 2.0 and found.stop_reason is StopReason.STOP
    assert found.reward is not None and found.reward.info["num_turns"] == 2.0
    assert [t.observation[0].text for t in found.turns if t.observation] == ["Now a word of 5 letters."]
    assert len(found.segments) == 1, "its second request continues the first, token for token"
    segment = found.segments[0]
    sampled = np.concatenate([turn_ids(text) for text in says])
    assert np.array_equal(segment.token_ids[np.asarray(segment.loss_weights) > 0], sampled)


def test_its_dataset_is_the_tasks(talk: Verifiers):
    tasks = talk.tasks(split="train", seeds=range(3))
    assert [t.prompt[-1].text for t in tasks] == [f"Task {i}. A word of 3 letters." for i in range(3)]
    assert len(talk.tasks(split="eval", seeds=range(100))) == 8, "one that keeps none for evaluation gives what it has"


def test_what_a_limit_cuts_short_is_truncated_and_scored_as_the_environment_scores_it(talk: Verifiers):
    found = asyncio.run(run(talk, ["tea", "milks"], max_turns=1))
    assert found.stop_reason is StopReason.MAX_TURNS and total(found) == 1.0


@pytest.mark.slow
def test_a_process_that_is_killed_fails_its_episodes_and_the_next_one_starts_another(talk: Verifiers):
    async def use() -> tuple[Trajectory, Trajectory]:
        slow = scripted_context(["tea"], scheduler=talk.scheduler(), latency_s=3600.0, limits=Limits(max_context=1 << 20))
        task = talk.tasks(split="train", seeds=range(1))[0]
        running = asyncio.create_task(run_episode(slow, task, id="slow"))
        while (pid := talk._worker.pid) is None:  # noqa: ASYNC110 (a thread starts it)
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        return await running, await run(talk, ["tea", "milks"], id="next")

    lost, following = asyncio.run(use())
    assert lost.error is not None and "its process has ended" in lost.error
    assert total(following) == 2.0


def test_a_rollout_that_takes_too_long_fails_its_episode_and_is_cancelled(talk: Verifiers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(talk, "_timeout_s", 0.3)
    context = scripted_context(["tea"], scheduler=talk.scheduler(), latency_s=3600.0, limits=Limits(max_context=1 << 20))
    found = asyncio.run(run_episode(context, talk.tasks(split="train", seeds=range(1))[0], id="late"))
    assert found.error is not None and "took longer than 0.3 s for a rollout" in found.error
    monkeypatch.undo()
    assert total(asyncio.run(run(talk, ["tea", "milks"], id="after"))) == 2.0


@pytest.mark.parametrize(
    ("id", "kwargs", "said"),
    [
        ("vf_nowhere", PYTHON, r"Could not import 'vf_nowhere'.* It is looked for in .*data/environments"),
        ("vf_talk", {**PYTHON, "turnz": 3}, "unexpected keyword argument 'turnz'"),
        ("vf_download", PYTHON, "it downloads something, so run it once where there is a network"),
        ("vf_talk", {}, r"'verifiers' is not installed in .*; pip install 'verifiers<0.2' there"),
    ],
)
@pytest.mark.slow
def test_a_verifiers_environment_that_cannot_be_loaded_is_a_sentence(id: str, kwargs: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        find_adapter(f"verifiers:{id}", kwargs, base=HERE)


# OpenEnv


@pytest.mark.slow
def test_what_is_no_action_is_told_to_the_model_and_what_breaks_the_environment_fails_the_episode(guess: OpenEnv):
    async def use() -> list[Trajectory]:
        told = await run(guess, ["I pass", "4"], max_turns=2)
        raised = await run(guess, ["13"], max_turns=2)
        died = await run(guess, ["666"], max_turns=2)
        return [told, raised, died, await run(guess, ["4"], max_turns=1)]

    told, raised, died, following = asyncio.run(use())
    assert "no number" in told.turns[0].observation[0].text and total(told) == 1.0
    assert raised.error is not None and "failed at a step: unlucky" in raised.error
    assert died.error is not None and "hung up at a step" in died.error
    assert total(following) == 1.0, "a server that has gone is replaced"


@pytest.mark.slow
def test_a_server_ends_with_the_process_that_started_it_however_that_ends(tmp_path: Path):
    script = tmp_path / "run.py"
    script.write_text(
        "import asyncio, os, sys\nfrom pathlib import Path\nfrom polyturn.environments import find_adapter\n"
        f"adapter = find_adapter('openenv:./openenv_guess', {PYTHON!r}, base=Path({str(HERE)!r}))\n"
        "slot = asyncio.run(adapter.take())\nprint(slot.server.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 120
    while session_of(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not session_of(int(done.stdout))


def test_an_interpreter_without_the_package_is_a_sentence():
    with pytest.raises(MissingModuleError, match=r"needs the package 'openenv' in .*; pip install openenv-core"):
        find_adapter("openenv:./openenv_guess", base=HERE)
    with pytest.raises(MissingModuleError, match="needs the package 'no_such_env'"):
        find_adapter("openenv:no_such_env.app:app", PYTHON, base=HERE)


async def test_a_scheduler_of_ms_swift_plays_one_episode_on_one_connection(guess: OpenEnv) -> None:
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
    assert "Guess from 1 to 9." in told[0] and told[3].startswith("The action is refused: ")


async def test_an_openenv_server_that_is_not_there_is_named_to_a_scheduler_of_ms_swift() -> None:
    from polyturn.compat.swift.adapter import SwiftScheduler

    context = scripted_context(["a"], scheduler=SwiftScheduler("openenv_scheduler"), rewards={"*": lambda t: 1.0})
    row = task("<placeholder>", extra={"env_config": {"base_url": "http://127.0.0.1:1"}})
    trajectory = await run_episode(context, row, id="e")
    assert "the environment 'openenv:http://127.0.0.1:1' cannot be reached" in (trajectory.error or "")


def test_episodes_share_a_server_that_is_stopped_with_the_run(guess: OpenEnv):
    """The last one, for an adapter that was closed starts no other server."""

    async def use() -> list[Trajectory]:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(run(guess, [*"19234"], id=f"e{i}", max_turns=5)) for i in range(4)]
        return [task.result() for task in running]

    for found in asyncio.run(use()):
        assert found.stop_reason is StopReason.ENV_DONE and total(found) == pytest.approx(0.6)
        assert found.turns[0].observation[0].text == "higher"
    assert len(guess._slots) == 1 and guess._slots[0].num_used == 0, "four episodes, two at a time"
    pid = guess._slots[0].server.pid  # type: ignore[union-attr]
    assert session_of(pid)
    guess.close()
    guess.close()
    assert not session_of(pid)
