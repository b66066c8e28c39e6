"""A class of a plug-in that misspells a method, or takes other arguments, is refused where it is loaded, for every kind."""

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
from polyturn.interactions.context import check_row
from polyturn.rewards.function import RewardFunction

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
    """Check a class with these methods (`async def` where nothing else is said) as the configuration of a run names it."""
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


@pytest.mark.parametrize(
    ("kind", "method", "meant"),
    [
        ("interaction", "respond(self, instance_id, messages, **kwargs)", "generate_response"),
        ("interaction", "reply(self, instance_id, messages, **kwargs)", "generate_response"),
        ("interaction", "generate_reponse(self, instance_id, messages, **kwargs)", "generate_response"),
        ("interaction", "generateResponse(self, instance_id, messages, **kwargs)", "generate_response"),
        ("interaction", "generate_responses(self, instance_id, messages, **kwargs)", "generate_response"),
        ("interaction", "def get_response(self, instance_id, messages)", "generate_response"),
        ("interaction", "__call__(self, instance_id, messages)", "generate_response"),
        ("verl interaction", "generate_respose(self, instance_id, messages, **kwargs)", "generate_response"),
        ("view", "repond(self, view, instance_id, messages, **kwargs)", "respond"),
        ("tool", "excute(self, instance_id, parameters, **kwargs)", "execute"),
        ("tool", "def run(self, instance_id, parameters)", "execute"),
        ("tool", "exec(self, instance_id, parameters, **kwargs)", "execute"),
        ("tool", "Execute(self, instance_id, parameters, **kwargs)", "execute"),
        ("tool", "__call__(self, parameters)", "execute"),
        ("verl tool", "excecute(self, instance_id, parameters, **kwargs)", "execute"),
        ("scheduler", "steps(self, episode, turn)", "step"),
        ("scheduler", "def setp(self, episode, turn)", "step"),
        ("scheduler", "on_turn(self, episode, turn)", "on_turn_end"),
        ("scheduler", "next_turn(self, episode, turn)", "on_turn_end"),
        ("scheduler", "def check_finish(self, episode, turn)", "check_finished"),
        ("swift scheduler", "def steps(self, infer_request, response_choice, current_turn)", "step"),
        ("swift scheduler", "def Step(self, infer_request, response_choice, current_turn)", "step"),
        ("swift scheduler", "def next(self, infer_request, response_choice, current_turn)", "step"),
        ("agent loop", "runs(self, sampling_params, **kwargs)", "run"),
        ("agent loop", "forward(self, sampling_params, **kwargs)", "run"),
        ("agent loop", "generate(self, sampling_params, **kwargs)", "run"),
    ],
)
def test_a_method_under_another_name_is_refused_with_the_one_that_is_meant(
    tmp_path: Path, kind: str, method: str, meant: str
) -> None:
    name = method.removeprefix("def ").partition("(")[0]
    with pytest.raises(ConfigError, match=rf"Mine defines .*`{meant}`") as caught:
        check(tmp_path, kind, method)
    assert name.startswith("_") or f"defines `{name}`" in str(caught.value)


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
def test_what_is_right_passes_and_helpers_may_have_names_of_their_own(tmp_path: Path, kind: str, method: str) -> None:
    check(
        tmp_path,
        kind,
        method,
        "def look_up(self, key)",
        "def _steps(self)",
        "retry(self)",
        "def parse(self, a, b)",
    )


@pytest.mark.parametrize(
    ("kind", "method", "meant"),
    [
        ("interaction", "start_interation(self, instance_id=None, **kwargs)", "start_interaction"),
        ("interaction", "calculate_scores(self, instance_id, **kwargs)", "calculate_score"),
        ("verl interaction", "finalise_interaction(self, instance_id, **kwargs)", "finalize_interaction"),
        ("tool", "releases(self, instance_id, **kwargs)", "release"),
        ("tool", "cerate(self, instance_id=None, **kwargs)", "create"),
        ("tool", "Create(self, instance_id=None, **kwargs)", "create"),
        ("tool", "calc_rewards(self, instance_id, **kwargs)", "calc_reward"),
        ("verl tool", "calc_rewad(self, instance_id, **kwargs)", "calc_reward"),
        ("scheduler", "on_trajectory_begin(self, episode)", "on_trajectory_(start|end)"),
        ("scheduler", "on_trajectory_ends(self, episode)", "on_trajectory_end"),
        ("scheduler", "def check_finish(self, episode, turn)", "check_finished"),
        ("scheduler", "def snaphot(self, episode)", "snapshot"),
        ("swift scheduler", "def check_finnished(self, infer_request, response_choice, current_turn)", "check_finished"),
    ],
)
def test_a_misspelt_hook_beside_what_is_right_is_refused(tmp_path: Path, kind: str, method: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"nothing calls: did you mean `{meant}`\?"):
        check(tmp_path, kind, RIGHT[kind], method)


@pytest.mark.parametrize(
    ("kind", "method", "write"),
    [
        ("interaction", "generate_response(self, messages)", "generate_response(self, instance_id, messages, **kwargs)"),
        ("interaction", "generate_response(self)", "generate_response(self, instance_id, messages, **kwargs)"),
        ("interaction", "generate_response(self, a, b, c, **kwargs)", "generate_response(self, instance_id, messages, **kw"),
        ("interaction", "def generate_response(messages)", "generate_response(self, instance_id, messages, **kwargs)"),
        ("view", "respond(self, instance_id, messages)", "respond(self, view, instance_id, messages, **kwargs)"),
        ("verl interaction", "generate_response(self, messages, **kwargs)", "generate_response(self, instance_id, messages"),
        ("tool", "execute(self, parameters)", "execute(self, instance_id, parameters, **kwargs)"),
        ("tool", "execute(self, instance_id, *, query)", "execute(self, instance_id, parameters, **kwargs)"),
        ("verl tool", "execute(self, parameters, **kwargs)", "execute(self, instance_id, parameters, **kwargs)"),
        ("scheduler", "step(self, turn)", "step(self, episode, turn)"),
        ("scheduler", "run(self)", "run(self, episode)"),
        ("swift scheduler", "def step(self, infer_request)", "step(self, infer_request, response_choice, current_turn)"),
        ("agent loop", "run(self, sampling_params)", "run(self, sampling_params, **kwargs)"),
    ],
)
def test_other_arguments_are_refused_with_the_right_ones(tmp_path: Path, kind: str, method: str, write: str) -> None:
    with pytest.raises(ConfigError, match="cannot be called as it is") as caught:
        check(tmp_path, kind, method)
    assert write in str(caught.value)


@pytest.mark.parametrize(("kind", "method"), RIGHT.items())
def test_a_static_method_and_odd_but_callable_ones_pass(tmp_path: Path, kind: str, method: str) -> None:
    name = method.removeprefix("def ").partition("(")[0]
    check(tmp_path, kind, f"{name}(self, *args, **kwargs)")
    check(tmp_path, kind, f"def {name}(self, *anything, **more)")


def test_the_base_class_itself_may_be_named_and_an_empty_subclass_may_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="defines no `generate_response`, and an interaction needs it; write `async def"):
        check(tmp_path, "interaction")
    with pytest.raises(ConfigError, match="defines no `execute`"):
        check(tmp_path, "tool", "release(self, instance_id, **kwargs)")
    check(tmp_path, "scheduler", "shared = True")
    checked(tmp_path, {"rollout": {"interactions": [{"class_name": "polyturn.interactions.base.BaseInteraction"}]}})


def test_a_class_that_inherits_nothing_needs_all_of_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="defines no `start_interaction`"):
        check(tmp_path, "plain", RIGHT["interaction"], as_="interaction")
    every = ("start_interaction(self, i=None, **kw)", "calculate_score(self)", "finalize_interaction(self)")
    check(tmp_path, "plain", RIGHT["interaction"], *every, as_="interaction")


class Takes:
    """An interaction whose methods take no arguments of a row."""

    name = "takes"

    async def start_interaction(self, instance_id: str | None = None, ground_truth: str = "", name: str = "") -> str:
        return instance_id or ""

    async def generate_response(self, instance_id: str, messages: Any, ground_truth: str = "", name: str = "") -> Any:
        return False, "", 0.0, {}


def test_a_row_whose_arguments_an_interaction_does_not_take_is_refused() -> None:
    def row(**kwargs: Any) -> Task:
        return Task(id="t", prompt=(), interaction=InteractionRef(name="takes", kwargs={"name": "takes", **kwargs}))

    check_row({"takes": Takes()}, row(ground_truth="4"))  # type: ignore[dict-item]
    with pytest.raises(DataError, match=r"task 't'.*start_interaction does not take.*'truth'.*\*\*kwargs"):
        check_row({"takes": Takes()}, row(truth="4"))  # type: ignore[dict-item]


ENV = "def reset(self, *, seed): ...\ndef step(self, action): ...\ndef close(self): ..."


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        ("def step", "def steps", "defines `steps`, but an environment needs `step`"),
        ("def reset", "def rest", "defines `rest`, but an environment needs `reset`"),
        ("def close(self): ...", "pass", "defines no `close`"),
        ("def step(self, action)", "def step(self)", r"write `def step\(self, action\)`"),
        ("def reset(self, *, seed)", "def reset(self)", r"write `def reset\(self, \*, seed\)`"),
        ("def close", "def closes", "defines `closes`, but an environment needs `close`"),
    ],
)
def test_an_environment_is_checked_before_it_is_made(tmp_path: Path, was: str, now: str, words: str) -> None:
    (tmp_path / "lake.py").write_text("class Lake:\n" + textwrap.indent(ENV, "    "))
    assert find_adapter("lake.py:Lake", base=tmp_path).name == "lake.py:Lake"
    (tmp_path / "pond.py").write_text("class Lake:\n" + textwrap.indent(ENV.replace(was, now), "    "))
    with pytest.raises(ConfigError, match=words):
        find_adapter("pond.py:Lake", base=tmp_path)


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        ("completions, **kw", "solution_strs"),
        ("completions", "solution_strs"),
        ("prompts, completions, **kwargs", "trajectory"),
        ("completion", "solution_str"),
        ("solution", "solution_str"),
        ("responses, **kwargs", "solution_strs"),
        ("solution_strings", "did you mean 'solution_strs'"),
        ("solution_sr, ground_truth", "did you mean 'solution_str'"),
        ("answer", "solution_str"),
        ("text, ground_truth", "solution_str"),
    ],
)
def test_a_reward_of_another_library_is_refused_with_the_right_signature(signature: str, words: str) -> None:
    made: dict[str, Any] = {}
    exec(f"def score({signature}): return 0.0", made)
    with pytest.raises(ConfigError, match=rf"{words}.*write it as \(trajectory\)"):
        RewardFunction(made["score"], name="score")


@pytest.mark.parametrize(
    "signature", ["trajectory", "t", "traj, bonus=1.0", "data_source, solution_str, ground_truth", "solution_strs, **kwargs"]
)
def test_a_reward_of_ours_passes(signature: str) -> None:
    made: dict[str, Any] = {}
    exec(f"def score({signature}): return 0.0", made)
    assert RewardFunction(made["score"], name="score").name == "score"


@pytest.mark.parametrize(
    ("kind", "members", "match"),
    [
        ("interaction", ["generate_response = 3"], "Mine defines no `generate_response`"),
        ("tool", ["execute = 'x'"], "Mine defines no `execute`"),
        ("interaction", [RIGHT["interaction"], "calc_score(self, instance_id, **kwargs)"], "`calculate_score`"),
        ("tool", [RIGHT["tool"], "calculate_reward(self, instance_id, **kwargs)"], "`calc_reward`"),
        ("tool", [RIGHT["tool"], "calculateReward(self, instance_id, **kwargs)"], "`calc_reward`"),
    ],
)
def test_a_value_is_no_method_and_a_shortened_word_is_the_same_word(
    tmp_path: Path, kind: str, members: list[str], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        check(tmp_path, kind, *members)


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ("async def excute(self, instance_id, parameters, **kwargs): ...", "defines `excute`, .*`execute`"),
        ("async def execute(self, parameters): ...", r"Mine\.execute takes \(self, parameters\)"),
        (
            "async def execute(self, instance_id, parameters, **kwargs): ...\n    async def create(self): ...",
            r"Mine\.create takes \(self\)",
        ),
    ],
)
def test_the_class_of_a_tool_that_is_given_as_an_object_is_checked(tmp_path: Path, members: str, match: str) -> None:
    schema = {"type": "function", "function": SCHEMA}
    name = f"mine{next(NUMBER)}"
    code = f"import polyturn\n\n\nclass Mine(polyturn.BaseTool):\n    {members}\n\n\nmade = Mine({{}}, {schema!r})\n"
    (tmp_path / f"{name}.py").write_text(code)
    with pytest.raises(ConfigError, match=match):
        checked(tmp_path, {"rollout": {"tools": {"functions": [f"{name}.py:made"]}}})
