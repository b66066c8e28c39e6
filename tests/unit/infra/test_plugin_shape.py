"""A plug-in class with a misspelt method or other arguments is refused when it is loaded, for every kind."""

from __future__ import annotations

import itertools
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from polyturn.build.parts import check_plugins
from polyturn.config.config_source import ConfigSource
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError, DataError
from polyturn.core.task import InteractionRef, Task
from polyturn.environments.registry import find_adapter
from polyturn.interactions.checks import check_row
from polyturn.rewards.function import RewardFunction
from support.refusals import refuses

HEADS = {
    "interaction": "from polyturn.interactions.base import BaseInteraction as Base",
    "view": "from polyturn.interactions.base import ViewInteraction as Base",
    "verl interaction": "from verl.interactions.base import BaseInteraction as Base",
    "tool": "from polyturn.tools.base import BaseTool as Base",
    "verl tool": "from verl.tools.base_tool import BaseTool as Base",
    "scheduler": "from polyturn.rollout.scheduler import MultiTurnScheduler as Base",
    "swift scheduler": "from swift.rollout.multi_turn import MultiTurnScheduler as Base",
    "swift early": "from swift.plugin.multi_turn import RolloutScheduler as Base",
    "agent loop": "from verl.experimental.agent_loop.agent_loop import AgentLoopBase as Base",
    "plain": "Base = object",
}
SCHEMA = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
NUMBER = itertools.count()


def check(folder: Path, kind: str, *members: str, as_: str | None = None) -> None:
    """Check a class with these methods (`async def` by default) as the configuration of a run names it."""
    lines = [m if m.startswith("def ") or " = " in m else f"async def {m}" for m in members]
    body = "".join(f"    {line}{': ...' if 'def ' in line else ''}\n" for line in lines) or "    pass\n"
    name = f"mine{next(NUMBER)}.py"  # a file is imported once
    (folder / name).write_text(f"{HEADS[kind]}\n\n\nclass Mine(Base):\n{body}")
    kind = as_ or kind
    rollout: dict[str, Any] = {"limits": {"max_turns": 3}}
    if "interaction" in kind or kind == "view":
        rollout["interactions"] = [{"class_name": f"{name}:Mine"}]
    elif "tool" in kind:
        entry = {"class_name": f"{name}:Mine", "config": {}, "tool_schema": {"type": "function", "function": SCHEMA}}
        (folder / "tools.json").write_text(json.dumps({"tools": [entry]}))
        rollout["tools"] = {"file": "tools.json"}
    else:
        rollout["scheduler"] = f"{name}:Mine"
    checked(folder, {"rollout": rollout})


def checked(folder: Path, config: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({"model": {"path": "nowhere"}, **config}))
    check_plugins(ConfigSource(config=load_config(RunConfig, path, []).config, base=folder))


RIGHT = {
    "interaction": "generate_response(self, instance_id, messages, **kwargs)",
    "view": "respond(self, view, instance_id, messages, **kwargs)",
    "verl interaction": "generate_response(self, instance_id, messages, **kwargs)",
    "tool": "execute(self, instance_id, parameters, **kwargs)",
    "verl tool": "execute(self, instance_id, parameters, **kwargs)",
    "scheduler": "step(self, episode, turn)",
    "swift scheduler": "def step(self, infer_request, response_choice, current_turn)",
    "agent loop": "run(self, sampling_params, **kwargs)",
}


@pytest.mark.parametrize(("kind", "method"), RIGHT.items())
def test_right_method_and_helpers_pass(tmp_path: Path, kind: str, method: str) -> None:
    check(tmp_path, kind, method, "def look_up(self, key)", "def _steps(self)", "retry(self)", "def parse(self, a, b)")
    name = method.removeprefix("def ").partition("(")[0]
    check(tmp_path, kind, f"def {name}(self, *anything, **more)")


@pytest.mark.parametrize(
    ("kind", "members", "names"),
    [
        # The method under another name: the error names it and the one that is meant.
        ("interaction", ["respond(self, instance_id, messages, **kwargs)"], ("respond", "generate_response")),
        ("interaction", ["def get_response(self, instance_id, messages)"], ("get_response", "generate_response")),
        ("interaction", ["__call__(self, instance_id, messages)"], ("generate_response",)),
        ("verl interaction", ["generate_respose(self, instance_id, messages, **kwargs)"], ("generate_response",)),
        ("view", ["repond(self, view, instance_id, messages, **kwargs)"], ("repond", "respond")),
        ("tool", ["Execute(self, instance_id, parameters, **kwargs)"], ("Execute", "execute")),
        ("verl tool", ["excecute(self, instance_id, parameters, **kwargs)"], ("excecute", "execute")),
        ("scheduler", ["def setp(self, episode, turn)"], ("setp", "step")),
        ("scheduler", ["next_turn(self, episode, turn)"], ("next_turn", "on_turn_end")),
        ("swift scheduler", ["def next(self, infer_request, response_choice, current_turn)"], ("next", "step")),
        ("agent loop", ["forward(self, sampling_params, **kwargs)"], ("forward", "run")),
        # A misspelt hook beside the right method.
        ("interaction", [RIGHT["interaction"], "calc_score(self, instance_id, **kwargs)"], ("calculate_score",)),
        ("verl interaction", [RIGHT["interaction"], "finalise_interaction(self, **kwargs)"], ("finalize_interaction",)),
        ("tool", [RIGHT["tool"], "releases(self, instance_id, **kwargs)"], ("release",)),
        ("tool", [RIGHT["tool"], "calculateReward(self, instance_id, **kwargs)"], ("calc_reward",)),
        ("verl tool", [RIGHT["tool"], "calc_rewad(self, instance_id, **kwargs)"], ("calc_reward",)),
        ("scheduler", [RIGHT["scheduler"], "on_trajectory_ends(self, episode)"], ("on_trajectory_end",)),
        (
            "swift scheduler",
            [RIGHT["swift scheduler"], "def check_finnished(self, infer_request, response_choice, current_turn)"],
            ("check_finished",),
        ),
        # Other arguments: the error shows the right ones.
        ("interaction", ["generate_response(self, messages)"], (RIGHT["interaction"],)),
        ("interaction", ["def generate_response(messages)"], (RIGHT["interaction"],)),
        ("view", ["respond(self, instance_id, messages)"], (RIGHT["view"],)),
        ("tool", ["execute(self, instance_id, *, query)"], (RIGHT["tool"],)),
        ("verl tool", ["execute(self, parameters, **kwargs)"], (RIGHT["tool"],)),
        ("scheduler", ["run(self)"], ("run(self, episode)",)),
        ("swift scheduler", ["def step(self, infer_request)"], ("step(self, infer_request, response_choice,",)),
        ("agent loop", ["run(self, sampling_params)"], (RIGHT["agent loop"],)),
        # Nothing, or a value, in place of the method.
        ("interaction", [], ("generate_response",)),
        ("interaction", ["generate_response = 3"], ("generate_response",)),
        ("tool", ["release(self, instance_id, **kwargs)"], ("execute",)),
        ("tool", ["execute = 'x'"], ("execute",)),
    ],
)
def test_wrong_class_is_refused_with_the_right_names(
    tmp_path: Path, kind: str, members: list[str], names: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, kind, *members)
    for name in ("Mine", *names, ".py, line "):
        assert name in str(caught.value)


def test_base_class_itself_and_scheduler_without_methods_pass(tmp_path: Path) -> None:
    check(tmp_path, "scheduler", "shared = True")
    checked(tmp_path, {"rollout": {"interactions": [{"class_name": "polyturn.interactions.base.BaseInteraction"}]}})


def test_class_that_inherits_nothing_needs_every_method(tmp_path: Path) -> None:
    refuses(lambda: check(tmp_path, "plain", RIGHT["interaction"], as_="interaction"), ConfigError, "start_interaction")
    others = ("start_interaction(self, i=None, **kw)", "calculate_score(self)", "finalize_interaction(self)")
    check(tmp_path, "plain", RIGHT["interaction"], *others, as_="interaction")


class Takes:
    """An interaction whose methods take no arguments of a row."""

    name = "takes"

    async def start_interaction(self, instance_id: str | None = None, ground_truth: str = "", name: str = "") -> str:
        return instance_id or ""

    async def generate_response(self, instance_id: str, messages: Any, ground_truth: str = "", name: str = "") -> Any:
        return False, "", 0.0, {}


def test_row_with_unknown_interaction_arguments_is_refused() -> None:
    def row(**kwargs: Any) -> Task:
        return Task(id="t", prompt=(), interaction=InteractionRef(name="takes", kwargs={"name": "takes", **kwargs}))

    check_row({"takes": Takes()}, row(ground_truth="4"))  # type: ignore[dict-item]
    with pytest.raises(DataError, match=r"task 't'.*start_interaction.*'truth'"):
        check_row({"takes": Takes()}, row(truth="4"))  # type: ignore[dict-item]


ENV = "def reset(self, *, seed): ...\ndef step(self, action): ...\ndef close(self): ..."


@pytest.mark.parametrize(
    ("was", "now", "name"),
    [
        ("def step", "def steps", "`step`"),
        ("def close(self): ...", "pass", "`close`"),
        ("def step(self, action)", "def step(self)", "def step(self, action)"),
        ("def reset(self, *, seed)", "def reset(self)", "def reset(self, *, seed)"),
    ],
)
def test_environment_class_is_checked_before_it_is_made(tmp_path: Path, was: str, now: str, name: str) -> None:
    (tmp_path / "lake.py").write_text("class Lake:\n" + textwrap.indent(ENV, "    "))
    assert find_adapter("lake.py:Lake", base=tmp_path).name == "lake.py:Lake"
    (tmp_path / "pond.py").write_text("class Lake:\n" + textwrap.indent(ENV.replace(was, now), "    "))
    refuses(lambda: find_adapter("pond.py:Lake", base=tmp_path), ConfigError, name)


@pytest.mark.parametrize(
    ("signature", "name"),
    [
        ("completions, **kw", "solution_strs"),
        ("prompts, completions, **kwargs", "trajectory"),
        ("completion", "solution_str"),
        ("solution_strings", "'solution_strs'"),
        ("solution_sr, ground_truth", "'solution_str'"),
        ("text, ground_truth", "solution_str"),
        ("trajectory", None),
        ("traj, bonus=1.0", None),
        ("data_source, solution_str, ground_truth", None),
        ("solution_strs, **kwargs", None),
    ],
)
def test_reward_signature_is_ours_or_refused_with_the_right_name(signature: str, name: str | None) -> None:
    made: dict[str, Any] = {}
    exec(f"def score({signature}): return 0.0", made)
    if name is None:
        assert RewardFunction(made["score"], name="score").name == "score"
        return
    with pytest.raises(ConfigError, match=name):
        RewardFunction(made["score"], name="score")


@pytest.mark.parametrize(
    ("members", "name"),
    [
        ("async def excute(self, instance_id, parameters, **kwargs): ...", "`execute`"),
        ("async def execute(self, parameters): ...", r"Mine\.execute"),
        (
            "async def execute(self, instance_id, parameters, **kwargs): ...\n    async def create(self): ...",
            r"Mine\.create",
        ),
    ],
)
def test_class_of_a_tool_object_is_checked(tmp_path: Path, members: str, name: str) -> None:
    schema = {"type": "function", "function": SCHEMA}
    module = f"mine{next(NUMBER)}"
    code = f"import polyturn\n\n\nclass Mine(polyturn.BaseTool):\n    {members}\n\n\nmade = Mine({{}}, {schema!r})\n"
    (tmp_path / f"{module}.py").write_text(code)
    with pytest.raises(ConfigError, match=name):
        checked(tmp_path, {"rollout": {"tools": {"functions": [f"{module}.py:made"]}}})
