"""Environments of GEM, skyrl-gym and TRL's kind: what they show, earn and refuse. The packages are the real ones."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import random
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from polyturn.core.errors import ConfigError, DataError, MissingModuleError, SchedulerError, UnknownNameError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory
from polyturn.environments import Adapter, find_adapter
from polyturn.environments.base import OwnRandom
from polyturn.environments.scheduler import EnvScheduler, Stage
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context
from support.cases import needs

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


def _load_rows() -> Any:
    spec = importlib.util.spec_from_file_location("environment_rows", ROOT / "benchmarks/_environment_rows.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


ROWS = _load_rows()


@pytest.mark.parametrize("case", [*ROWS.GEM, *ROWS.skyrl_cases()], ids=lambda case: case.name)
def test_an_episode_earns_what_the_package_itself_gives_for_the_same_actions(case: Any):
    own = case.own()
    adapter = find_adapter(case.name, case.kwargs)
    found = run(adapter, own.actions, task=case.task(adapter), max_turns=len(own.actions))
    assert len(found.turns) == len(own.actions)
    assert total(found) == pytest.approx(own.reward)


# GEM


def test_a_game_shows_its_text_with_the_suffix_and_ends_where_it_says():
    env = find_adapter(GUESS).make()
    shown = env.reset(seed=3)
    assert "between 1 and 10" in shown and shown.endswith("Enter your next guess.")
    observation, reward, is_terminated, is_truncated, _ = env.step("no number")
    assert (reward, is_terminated, is_truncated) == (-0.1, True, False)
    assert "did not provide a valid guess" in observation and "Enter your next guess" not in observation
    env.close()


def test_what_a_game_draws_is_its_seeds_whatever_others_draw_meanwhile():
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


def test_the_callers_random_state_and_root_logger_stay_as_they_were():
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), logging.getLogger().handlers[:]
    env = find_adapter(GUESS).make()
    env.reset(seed=9)
    env.step("\\boxed{5}")
    assert (random.getstate(), np.random.get_state()[1].tolist(), logging.getLogger().handlers[:]) == before


def test_an_environment_that_hangs_in_its_random_state_does_not_hang_the_others(monkeypatch: pytest.MonkeyPatch):
    from polyturn.core.errors import SchedulerError

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
        ("trl:counter.py:NoDocstring", {}, ConfigError, "NoDocstring.go is no tool: .* has no docstring"),
        ("trl:counter.py:NoTools", {}, ConfigError, "no public method beside reset"),
        ("trl:counter.py:Counter", {"goall": 2}, ConfigError, "cannot be made with kwargs {'goall': 2}"),
        ("verifiers:x", {"python": "/no/such/python"}, ConfigError, "there is no interpreter '/no/such/python'"),
        ("openenv:./nowhere", {}, ConfigError, "there is no .*openenv.yaml"),
        ("openenv:word", {}, ConfigError, "is no application"),
        ("openenv:http://127.0.0.1:1", {"sesions": 2}, ConfigError, "Did you mean 'sessions'"),
        ("openenv:http://127.0.0.1:1", {"servers": 0}, ConfigError, "use at least 1"),
    ],
)
def test_what_cannot_work_is_a_sentence(name: str, kwargs: Mapping[str, Any], error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        find_adapter(name, kwargs, base=HERE)


@pytest.mark.parametrize(
    ("name", "module", "line"),
    [("gem:game:Wordle-v0-easy", "gem", "pip install gem-llm"), ("skyrl:gsm8k", "skyrl_gym", "pip install skyrl-gym")],
)
def test_a_missing_package_comes_with_the_line_that_installs_it(
    name: str, module: str, line: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingModuleError, match=line):
        find_adapter(name)


# skyrl-gym


def test_a_row_of_skyrls_is_scored_by_its_environment_whatever_its_data_source():
    adapter = find_adapter("skyrl:gsm8k_multi_turn")
    rows = [row(reward_spec={"method": "rule", "ground_truth": "72"}, max_turns=3, data_source="openai/gsm8k")]
    found = run(adapter, ["#### 70", "#### 72"], task=adapter.of_rows(rows)[0])
    assert [t.scores["env"] for t in found.turns] == [pytest.approx(0.2 / 3), 1.0]
    assert total(found) == pytest.approx(1 + 0.2 / 3) and found.stop_reason is StopReason.ENV_DONE


def test_a_row_that_lacks_what_the_environment_wants_is_said_to():
    adapter = find_adapter("skyrl:gsm8k")
    with pytest.raises(DataError, match="reward_spec field is required"):
        adapter.make_for(adapter.of_rows([row()])[0])
    with pytest.raises(ConfigError, match=r"set data\.train\.files"):
        adapter.tasks(split="train", seeds=range(2))


# TRL's kind


def test_public_methods_are_tools_with_the_schema_of_their_docstrings():
    adapter = find_adapter("trl:counter.py:Counter", base=HERE)
    increment, look = sorted((tool.schema["function"] for tool in adapter.tools()), key=lambda f: f["name"])
    assert increment["name"] == "increment" and increment["description"] == "Add to the counter."
    assert increment["parameters"]["properties"] == {"by": {"type": "integer", "description": "How much."}}
    assert look["name"] == "look" and look["parameters"]["properties"] == {}


def test_an_episode_has_an_object_of_its_own_and_is_worth_what_get_reward_says():
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


def test_reset_is_told_the_row_and_what_it_returns_ends_the_last_message():
    adapter = find_adapter("trl:counter.py:Counter", base=HERE)
    found = run(adapter, [call("increment", '{"by": 5}'), "Done."], task=adapter.of_rows([row(to=5)])[0])
    assert total(found) == 1.0
    shown = found.segments[0].token_ids
    assert "9 * 8?\nCount to 5." in scripted_context([]).codec.decode(shown.tolist())


def test_a_method_that_raises_is_told_to_the_model():
    found = run(find_adapter("trl:counter.py:Counter", base=HERE), [call("increment", '{"by": -1}'), "Sorry."])
    assert found.error is None and "only forwards" in str(found.turns[0].tool_results[0].content)
    assert total(found) == 0.0


# OpenEnv's words


def test_what_a_model_writes_becomes_the_action_that_the_schema_wants():
    from polyturn.environments.openenv_codec import OpenEnvCodec

    text = {"properties": {"metadata": {"type": "object"}, "message": {"type": "string"}}, "required": ["message"]}
    number = {"properties": {"metadata": {"type": "object"}, "number": {"type": "integer"}}}
    two = {"properties": {"row": {"type": "integer"}, "column": {"type": "integer"}}}
    assert OpenEnvCodec(text).action("Hello 3") == {"message": "Hello 3"}
    assert OpenEnvCodec(number).action("I say 3, no: -4.") == {"number": -4}
    assert "no number" in str(OpenEnvCodec(number).action("I pass"))
    assert OpenEnvCodec(two).action('First {x}. Then {"row": 1, "column": {"a": 2}} it is') == {"row": 1, "column": {"a": 2}}
    assert "one object with 'row', 'column'" in str(OpenEnvCodec(two).action("1 2"))
    assert OpenEnvCodec(two, field="row").action("2") == {"row": 2}


def test_no_action_that_a_model_writes_is_a_failure_of_its_episode():
    from polyturn.environments.openenv_codec import OpenEnvCodec

    number = {"properties": {"number": {"type": "integer"}}}
    two = {"properties": {"row": {"type": "integer"}, "column": {"type": "integer"}}}
    assert "no number" in str(OpenEnvCodec(number).action("9" * 400))
    assert "no JSON object" in str(OpenEnvCodec(two).action('{"row": ' * 5000))


def test_an_observation_is_shown_as_text_where_it_is_one_and_as_json_where_it_is_more():
    from polyturn.environments.openenv_codec import OpenEnvCodec

    assert OpenEnvCodec({}).shown({"hint": "higher", "picture": None}) == "higher"
    assert OpenEnvCodec({}).shown({"hint": "higher", "left": 2}) == '{"hint": "higher", "left": 2}'
    assert OpenEnvCodec({}, show="left").shown({"hint": "higher", "left": 2}) == "2"
    assert OpenEnvCodec({}).shown({}) == "" and OpenEnvCodec({}).shown(None) == ""


# A process of one's own


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


def test_a_worker_that_dies_says_why_and_the_next_request_starts_another(tmp_path: Path):
    from polyturn.core.errors import SchedulerError
    from polyturn.environments.json_subprocess import JsonSubprocess

    greeted: list[Any] = []
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    worker = JsonSubprocess(
        (sys.executable, str(script)), name="it", greet=lambda ask: greeted.append(ask("hello", what="hi"))
    )

    async def use() -> None:
        assert await worker.call("say", what=[1, 2]) == [1, 2]
        first = worker.pid
        with pytest.raises(SchedulerError, match=r"it: its process has ended: out of memory"):
            await worker.call("die")
        assert await worker.call("say", what="again") == "again" and worker.pid != first
        waits = asyncio.create_task(worker.call("sleep"))
        await asyncio.sleep(0.05)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    asyncio.run(use())
    assert greeted == ["hi", "hi"]
    worker.close()
    worker.close()
    assert worker.pid is None
    with pytest.raises(SchedulerError, match="the run has ended"):
        worker.start()


def test_a_worker_has_no_secret_of_the_trainer_unless_it_is_given_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from polyturn.environments.json_subprocess import JsonSubprocess

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


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ("[1]", "{}"),
        ("[" * 20_000, "{}"),
        ("{}", "[" * 20_000),
        ("{}", '{"type": "error", "data": "broken"}'),
        ("{}", '{"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": ["bad"]}}'),
        ("{}", '{"type": "observation", "data": [1]}'),
        ("{}", '{"type": "state", "data": {"observation": "Go."}}'),
        ('{"action": [1]}', "{}"),
        ('{"action": {"properties": {"message": "string"}}}', "{}"),
        ('{"action": {"properties": {}, "required": 5}}', "{}"),
        ("{}", "3"),
    ],
)
async def test_an_openenv_server_that_answers_nonsense_is_named(schema: str, answer: str):
    async with openenv_server(answer, schema=schema) as url:
        session = find_adapter(f"openenv:{url}").make()
        with pytest.raises(SchedulerError, match="the environment 'openenv:http"):
            await session.reset(seed=1)
        await session.close()


@contextlib.asynccontextmanager
async def openenv_server(*answers: str, schema: str = "{}") -> AsyncIterator[str]:
    """Serve an environment that answers these, one after the other, and give its address."""

    async def tell_schema(request: web.Request) -> web.Response:
        return web.Response(text=schema, content_type="application/json")

    async def talk(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for answer in answers:
            await socket.receive()
            await socket.send_str(answer)
            await socket.receive()
            await socket.send_str('{"type": "state", "data": {}}')
        await socket.receive()
        return socket

    async def elsewhere(request: web.Request) -> web.Response:
        raise web.HTTPFound(request.path.removeprefix("/away"))

    app = web.Application()
    app.add_routes([web.get("/schema", tell_schema), web.get("/ws", talk), web.get("/away/{_:.*}", elsewhere)])
    async with TestServer(app) as server:
        yield str(server.make_url(""))


@pytest.mark.parametrize(
    "said",
    [
        '"reward": "abc"',
        '"reward": NaN',
        '"reward": 1e308',
        '"reward": [1]',
        f'"reward": 1{"0" * 400}',
        '"done": "false"',
        '"done": [0]',
        '"done": NaN',
    ],
)
async def test_a_step_of_an_openenv_server_earns_a_number_and_ends_by_a_truth_value(said: str):
    from polyturn.compat.swift.openenv_wrapper import OpenEnvWrapper

    begun = '{"type": "observation", "data": {"observation": "Go."}}'
    step = f'{{"type": "observation", "data": {{"observation": "Gone.", {said}}}}}'
    async with openenv_server(begun, step) as url:
        session = find_adapter(f"openenv:{url}").make()
        await session.reset(seed=1)
        with pytest.raises(SchedulerError, match=r"answered a step with the reward .*, and .* for whether it is over"):
            await session.step('{"message": "a"}')
        await session.close()
        wrapper = OpenEnvWrapper({"base_url": url})
        await asyncio.to_thread(wrapper.reset)
        with pytest.raises(SchedulerError, match="answered a step with the reward"):
            await asyncio.to_thread(wrapper.step, {"message": "a"})
        await asyncio.to_thread(wrapper.close)


async def test_an_openenv_server_that_redirects_is_not_followed():
    async with openenv_server('{"type": "observation", "data": {"observation": "Go."}}') as url:
        session = find_adapter(f"openenv:{url}/away").make()
        with pytest.raises(SchedulerError, match="it answers with a redirect, and none is followed"):
            await session.reset(seed=1)
        await session.close()


async def test_a_schema_without_end_of_an_openenv_server_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("polyturn.core.answers.MAX_ANSWER_BYTES", 1000)
    async with openenv_server(schema=" " * 10_000) as url:
        session = find_adapter(f"openenv:{url}").make()
        with pytest.raises(SchedulerError, match=r"cannot be reached \(.*1000"):
            await session.reset(seed=1)
        await session.close()
