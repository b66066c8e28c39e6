"""Environments of GEM, skyrl-gym, verifiers and OpenEnv, each with a script of actions and the package's own rewards.

case.own()          runs the package directly: the actions and their reward
case.task(adapter)  the task in which a model writes the same actions
"""

from __future__ import annotations

import importlib.util
import json
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.environments import Adapter

HERE = Path(__file__).resolve().parent
MODULES = HERE.parent / "tests/data/environments"
BUILD = HERE.parent / "scripts/environments/build.py"


class Own(NamedTuple):
    """The actions and the reward of a package alone."""

    actions: list[str]
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An environment and a script for it."""

    name: str
    own: Callable[[], Own]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    row: Mapping[str, Any] | None = None
    """The row to create the task from; None for a task of the environment."""
    index: int = 0
    """Index of the environment's task."""
    base: Path = MODULES
    is_theirs: bool = True
    """Whether the environment comes with the package; False if it was written for these cases."""

    def task(self, adapter: Adapter) -> Task:
        """Return the task of the script."""
        if self.row is None:
            first = self.seed - self.index
            return adapter.tasks(split="train", seeds=range(first, first + self.index + 1))[self.index]
        row = dict(self.row)
        prompt = (Message(role="user", content=row.pop("prompt")),)
        return adapter.of_rows([Task(id="row", prompt=prompt, extra=row)])[0]


def other_interpreter() -> Path | None:
    """Return the interpreter that has verifiers and OpenEnv; None if it was not built."""
    spec = importlib.util.spec_from_file_location("environments_build", BUILD)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path: Path | None = module.interpreter("environments")
    return path


_SCRATCH: list[tempfile.TemporaryDirectory[str]] = []
"""Folders that are removed when the process ends."""


def scratch() -> Path:
    """Create a folder that is removed when the process ends."""
    _SCRATCH.append(tempfile.TemporaryDirectory(prefix="polyturn-environments-"))
    return Path(_SCRATCH[-1].name)


# GEM


def boxed(*numbers: int) -> str:
    """Return an answer in the format of GEM's games."""
    return "\\boxed{" + " ".join(map(str, numbers)) + "}"


def guess_the_number(env: Any, turn: int) -> str:
    """Guess wrong, then right."""
    wrong = env.max_number if env.game_number != env.max_number else env.min_number
    return boxed(env.game_number if turn else wrong)


def any_action(env: Any, turn: int) -> str:
    """Take the game's random action, without using the game's random generator."""
    states = random.getstate(), np.random.get_state()
    try:
        return str(env.sample_random_action())
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def tower(env: Any, turn: int) -> str:
    """Move the smallest disk back and forth."""
    return "\\boxed{A C}" if turn % 2 == 0 else "\\boxed{C A}"


def right_answer(env: Any, turn: int) -> str:
    """Give the data set's answer."""
    return "\\boxed{" + str(env.data["answer"]) + "}"


def gem_case(id: str, player: Callable[[Any, int], str] = any_action, *, seed: int = 3, max_turns: int = 12) -> Case:
    """Return a case of an environment that GEM registers."""

    def own() -> Own:
        import gem

        env = gem.make(id)
        env.reset(seed=seed)
        actions, total = [], 0.0
        while len(actions) < max_turns:
            actions.append(player(env, len(actions)))
            _, reward, is_terminated, is_truncated, _ = env.step(actions[-1])
            total += float(reward)
            if is_terminated or is_truncated:
                break
        return Own(actions, total)

    return Case(name=f"gem:{id}", own=own, seed=seed)


GEM = [
    gem_case("game:GuessTheNumber-v0-easy", guess_the_number),
    gem_case("game:GuessTheNumber-v0-hard"),
    gem_case("game:Mastermind-v0-easy"),
    gem_case("game:Mastermind-v0-hard"),
    gem_case("game:Minesweeper-v0-easy"),
    gem_case("game:FifteenPuzzle-v0-easy"),
    gem_case("game:Game2048-v0-easy"),
    gem_case("game:Sokoban-v0-easy"),
    gem_case("game:TowerofHanoi-v0-easy", tower),
    gem_case("rg:leg_counting", right_answer),
    gem_case("rg:chain_sum", right_answer),
]


# skyrl-gym


def skyrl_case(id: str, row: Mapping[str, Any], actions: Sequence[str], **env_config: Any) -> Case:
    """Return a case of an environment that skyrl-gym registers."""
    info = {key: value for key, value in row.items() if key != "prompt"}

    def own() -> Own:
        import skyrl_gym
        from omegaconf import OmegaConf

        extras = {"data_source": None, "extra_info": info, **info}
        env = skyrl_gym.make(id, env_config=OmegaConf.create(env_config), extras=extras)
        env.init([{"role": "user", "content": row["prompt"]}])
        texts, total = [], 0.0
        for action in actions:
            texts.append(action)
            answer = env.step(action)
            total += float(answer["reward"])
            if answer["done"]:
                break
        env.close()
        return Own(texts, total)

    kwargs = {"env_config": env_config} if env_config else {}
    return Case(name=f"skyrl:{id}", own=own, row=row, kwargs=kwargs)


def database() -> str:
    """Create the folder of databases for text2sql, with one small database."""
    root = scratch()
    file = root / "spider/database/shop/shop.sqlite"
    file.parent.mkdir(parents=True)
    with sqlite3.connect(file) as connection:
        connection.execute("create table sale (item text, price integer)")
        connection.executemany("insert into sale values (?, ?)", [("tea", 3), ("milk", 2), ("tea", 4)])
    return str(root)


def skyrl_cases() -> list[Case]:
    """Return the cases of skyrl-gym."""
    question = {"prompt": "Tom has 9 bags of 8 apples. How many apples?"}
    truth = {"method": "rule", "ground_truth": "72"}
    sql = {
        "prompt": "What did the tea cost in all?",
        "db_id": "shop",
        "data": "spider",
        "max_turns": 4,
        "reward_spec": {"method": "rule", "ground_truth": "select sum(price) from sale where item = 'tea'"},
    }
    sum_of = "<think>Sum it.</think>\n<{0}>select sum(price) from sale where item = 'tea'</{0}>"
    tests = [{"input": "2 3\n", "output": "5\n", "testtype": "stdin", "metadata": {"func_name": None}}]
    add = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    return [
        skyrl_case("gsm8k", {**question, "reward_spec": truth}, ["9 * 8 = 72\n#### 72"]),
        skyrl_case("gsm8k_multi_turn", {**question, "reward_spec": truth, "max_turns": 3}, ["#### 70", "No.", "#### 72"]),
        skyrl_case("aime", {**question, "reward_model": truth}, ["It is 72.\nAnswer: 72"]),
        skyrl_case("text2sql", sql, [sum_of.format("sql"), sum_of.format("solution")], db_path=database()),
        skyrl_case("lcb", {**question, "reward_spec": {**truth, "ground_truth": json.dumps(tests)}}, [add]),
    ]


# verifiers and OpenEnv, in another interpreter


class Direct:
    """Runs all cases of a package in one process of another interpreter, when the first result is needed."""

    def __init__(self, python: Path, kind: str) -> None:
        self._command = [str(python), str(HERE / "_environment_direct.py"), kind]
        self._cases: list[dict[str, Any]] = []
        self._results: list[Own] = []

    def case(self, where: Path, **fields: Any) -> Callable[[], Own]:
        """Add a case, and return a function that gives its actions and reward."""
        number = len(self._cases)
        self._cases.append({"where": str(where), **fields})
        return lambda: self._all()[number]

    def _all(self) -> list[Own]:
        if not self._results:
            done = subprocess.run([*self._command, json.dumps(self._cases)], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{self._command[-1]} driven directly failed: {done.stderr.strip().splitlines()[-1:]}")
            self._results = [Own(one["actions"], float(one["reward"])) for one in json.loads(done.stdout)]
        return self._results


def verifiers_case(
    python: Path,
    direct: Direct,
    module: str,
    actions: Sequence[str],
    *,
    row: int = 0,
    is_theirs: bool = False,
    **arguments: Any,
) -> Case:
    """Return a case of an environment that verifiers loads."""
    own = direct.case(MODULES / f"{module}.py", arguments=arguments, row=row, actions=list(actions))
    kwargs = {"python": str(python), **arguments}
    return Case(name=f"verifiers:{module}", own=own, kwargs=kwargs, index=row, is_theirs=is_theirs)


def verifiers_cases(python: Path) -> list[Case]:
    """Return the cases of verifiers: its environment for two data sets, and two environments written for it."""
    direct = Direct(python, "verifiers")
    call = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 22}}</tool_call>'
    return [
        verifiers_case(python, direct, "vf_reasoning", ["RIGHT"], row=2, is_theirs=True, gym="leg_counting"),
        verifiers_case(python, direct, "vf_reasoning", ["<answer>1</answer>"], is_theirs=True, gym="chain_sum"),
        verifiers_case(python, direct, "vf_talk", ["tea", "milk!"], row=1),
        verifiers_case(python, direct, "vf_add", [call, "It is 42."]),
    ]


def openenv_cases(python: Path) -> list[Case]:
    """Return the cases of OpenEnv: the environment that its `init` creates, and one written for it."""
    folder, direct = scratch(), Direct(python, "openenv")
    command = [str(python.parent / "openenv"), "init", "echo_env"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    echo = {"class": "server.echo_env_environment:EchoEnvironment", "action": "models:EchoAction", "field": "message"}
    guess = {"class": "server.app:GuessEnvironment", "action": "server.app:Guess", "field": "number"}
    return [
        Case(
            name="openenv:./echo_env",
            base=folder,
            kwargs={"python": str(python)},
            own=direct.case(folder / "echo_env", **echo, reset={}, actions=["Hello there", "x"]),
        ),
        Case(
            name="openenv:./openenv_guess",
            kwargs={"python": str(python), "sessions": 2},
            seed=3,
            own=direct.case(MODULES / "openenv_guess", **guess, reset={"seed": 3}, actions=[1, 9, 4, 5]),
            is_theirs=False,
        ),
    ]


def cases() -> tuple[list[Case], list[str]]:
    """Return all cases that can run here, and the reasons for those left out."""
    python = other_interpreter()
    if python is None:
        why = f"verifiers and openenv: `{sys.executable} scripts/environments/build.py` builds their environment"
        return [*GEM, *skyrl_cases()], [why]
    return [*GEM, *skyrl_cases(), *verifiers_cases(python), *openenv_cases(python)], []
