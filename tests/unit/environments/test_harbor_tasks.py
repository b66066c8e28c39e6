"""Harbor's task folders: read or refused by name, run, verified and rewarded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from polyturn.build.environments import build_env_tools
from polyturn.build.tasks import build_train_tasks
from polyturn.cli.main import main
from polyturn.config.config_source import ConfigSource
from polyturn.config.load import load_config
from polyturn.config.models import EnvConfig, RunConfig
from polyturn.core.errors import ConfigError, DataError
from polyturn.core.generation import GenerateRequest
from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import Trajectory
from polyturn.environments import find_adapter
from polyturn.environments.harbor import Harbor
from polyturn.environments.harbor_task import read_task, read_tasks
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.sandbox import SandboxSpec
from polyturn.testing.episodes import scripted_context
from support.parts import call, check_tokens
from support.refusals import refuses
from support.runs import call_command
from support.sandboxes import needs_bubblewrap, processes_with, stand_in

pytestmark = pytest.mark.timeout(300)

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/harbor/tasks"
PASS = "echo 1 > /logs/verifier/reward.txt"


def write(folder: Path, *, toml: str = "", test: str = PASS, instruction: str = "Do it.", **files: str) -> Path:
    """Write a task; `files` are further ones, with __ for / and _dot_ for a dot in their names."""
    for name in ("environment", "tests"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text(instruction)
    (folder / "tests/test.sh").write_text(f"#!/bin/sh\n{test}\n")
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def adapter_of(folder: Path, **kwargs: Any) -> Harbor:
    adapter = find_adapter(f"harbor:{folder}", kwargs)
    assert isinstance(adapter, Harbor)
    return adapter


def run(
    adapter: Harbor, says: Sequence[str] | Callable[[GenerateRequest], str], *, task: int = 0, **limits: Any
) -> Trajectory:
    context = scripted_context(
        says,
        tools=adapter.tools(),
        scheduler=adapter.scheduler(),
        limits=Limits(max_context=1 << 20, **limits),
        tool_timeout_s=60.0,
    )
    tasks = adapter.tasks(split="train", seeds=range(10))
    return asyncio.run(run_episode(context, tasks[task], id="e"))


def reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None, trajectory.error
    return trajectory.reward.total


# Reading.


def test_canary_lines_are_cut_from_the_instruction(tmp_path: Path):
    text = "<!-- a CANARY: 1 -->\n# canary 2\n\n# Title\nDo it.\n# canary stays here\n"
    (step,) = read_task(write(tmp_path, instruction=text)).steps
    assert step.instruction == "# Title\nDo it.\n# canary stays here"


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[agnt]\n", ("agnt", "agent")),
        ("[agent]\ntimeout = 3\n", ("agent.timeout", "timeout_sec")),
        ("[environment]\ngpu = 1\n", ("environment.gpu", "gpus")),
        ('[[steps]]\nname = "a"\nmin_rewards = 1\n', ("min_rewards", "min_reward")),
        ("[verifier.environment]\ncpu = 1\n", ("cpu", "cpus")),
        ("[agent]\ntimeout_sec = 0\n", ("agent.timeout_sec", "0")),
        ('[environment]\nmemory = "much"\n', ("memory", "much")),
        ("[agent\n", ("task.toml",)),
        ('multi_step_reward_strategy = "max"\n', ("multi_step_reward_strategy", "max")),
    ],
)
def test_wrong_field_is_refused_by_name(tmp_path: Path, toml: str, words: tuple[str, ...]):
    with pytest.raises(DataError) as error:
        read_task(write(tmp_path, toml=toml))
    assert all(word in str(error.value) for word in words)


def test_every_field_of_the_format_is_read(tmp_path: Path):
    toml = """
version = "1.0"
artifacts = ["/a", {source = "/b", exclude = ["c"]}]
source = "here"
[task]
name = "org/name"
authors = [{name = "A", email = "a@b"}]
keywords = ["x"]
[metadata]
anything = {goes = [1]}
[agent]
timeout_sec = 5
user = "nobody"
[verifier]
timeout_sec = 7
env = {A = "1"}
user = 0
[[verifier.collect]]
command = "true"
[environment]
cpus = 2
memory = "2G"
storage = "10G"
allow_internet = false
workdir = "/work"
healthcheck = {command = "true"}
[solution]
env = {B = "2"}
"""
    task = read_task(write(tmp_path, toml=toml))
    spec = task.spec(SandboxSpec())
    assert (spec.cpus, spec.memory_mb, spec.disk_mb, spec.workdir, spec.user) == (2, 2048, 10240, "/work", "nobody")
    assert not list(task.refusals(SandboxSpec())) and list(task.notes(SandboxSpec()))


@pytest.mark.parametrize(
    ("toml", "word"),
    [
        ("[environment]\ngpus = 1", "environment.gpus"),
        ('[environment]\nos = "windows"', "environment.os"),
        ('[environment]\ntpu = {type = "v5"}', "environment.tpu"),
        ('[environment]\nskills_dir = "s"', "environment.skills_dir"),
        ('[[environment.mcp_servers]]\nname = "m"', "environment.mcp_servers"),
        ('[environment]\nnetwork_mode = "public"', "network_mode"),
        ("[environment]\nallow_internet = true", "allow_internet"),
        ('[environment]\nallowed_hosts = ["h"]', "allowed_hosts"),
        ('[agent]\nnetwork_mode = "public"', "agent.network_mode"),
        ('[verifier]\nenvironment_mode = "separate"', "verifier has a separate environment"),
        ('[environment]\ndocker_image = "python:3.12"', "python:3.12"),
        ('[environment]\nenv = {A = "${HARBOR_MISSING}"}', "HARBOR_MISSING"),
    ],
)
def test_field_that_cannot_be_done_is_refused_by_name(tmp_path: Path, toml: str, word: str):
    (reason,) = read_task(write(tmp_path, toml=toml)).refusals(SandboxSpec())
    assert word in reason


def test_several_containers_and_a_missing_test_are_refused(tmp_path: Path):
    folder = write(tmp_path, environment__docker_compose_dot_yaml="x")
    (folder / "environment/docker_compose.yaml").rename(folder / "environment/docker-compose.yaml")
    (folder / "tests/test.sh").unlink()
    reasons = list(read_task(folder).refusals(SandboxSpec()))
    assert len(reasons) == 2 and "docker-compose.yaml" in reasons[0] and "tests/test.sh" in reasons[1]


def test_image_is_the_tasks_unless_the_run_has_one(tmp_path: Path):
    built = read_task(write(tmp_path / "a", environment__Dockerfile="FROM x"))
    named = read_task(write(tmp_path / "b", toml='[environment]\ndocker_image = "img"'))
    podman = SandboxSpec(backend="podman")
    assert built.spec(podman).build == str(tmp_path / "a/environment") and named.spec(podman).image == "img"
    own = SandboxSpec(backend="podman", image="own")
    assert [task.spec(own).image for task in (built, named)] == ["own", "own"] and built.spec(own).build is None


def test_variables_come_from_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    task = read_task(write(tmp_path))
    monkeypatch.setenv("HARBOR_A", "1")
    assert task.variables({"A": "x${HARBOR_A}", "B": "${HARBOR_NO:-d}"}) == {"A": "x1", "B": "d"}
    refuses(lambda: task.variables({"B": "${HARBOR_NO}"}), DataError, "HARBOR_NO")


def test_folder_without_tasks_is_refused(tmp_path: Path):
    refuses(lambda: read_tasks(tmp_path), DataError, "no Harbor task")
    refuses(lambda: adapter_of(tmp_path / "missing"), ConfigError, "missing")


def test_link_that_leads_out_is_refused(tmp_path: Path):
    write(tmp_path / "t")
    (tmp_path / "t/environment/link").symlink_to("/etc")
    refuses(lambda: read_task(tmp_path / "t"), DataError, "link")


def test_unknown_kwarg_is_refused_by_name(tmp_path: Path):
    refuses(lambda: adapter_of(write(tmp_path), sandbx={}), ConfigError, "sandbox")


@needs_bubblewrap
def test_eval_is_one_folder_or_none(tmp_path: Path):
    refuses(lambda: adapter_of(write(tmp_path), eval=["a"]), ConfigError, "eval", "['a']")
    assert adapter_of(tmp_path, eval=None).tasks(split="eval", seeds=range(5)) == []


@needs_bubblewrap
def test_unsupported_task_is_refused_or_left_out(tmp_path: Path):
    write(tmp_path / "a", toml="[environment]\ngpus = 1")
    write(tmp_path / "b")
    refuses(lambda: adapter_of(tmp_path), ConfigError, "gpus")
    kept = adapter_of(tmp_path, skip_unsupported=True).tasks(split="train", seeds=range(5))
    assert [task.id for task in kept] == ["harbor-b"]


# Running.


@needs_bubblewrap
def test_agent_works_where_the_verifier_looks(tmp_path: Path):
    test = "grep -q done /app/out.txt && cat /tests/expected | grep -q 1 && echo 1 > /logs/verifier/reward.txt"
    write(tmp_path, test=test, tests__expected="1", environment__data_dot_txt="done")
    adapter = adapter_of(tmp_path)
    t = run(adapter, [call("bash", command="ls /tests; cp data.txt out.txt"), "Done."])
    assert reward(t) == 1.0 and t.stop_reason is StopReason.STOP and len(t.turns) == 2
    assert "No such file" in t.turns[0].observation[0].text  # the tests come after the agent
    check_tokens(t)


@needs_bubblewrap
@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("true", ("neither",)),
        ("echo oops; exit 3", ("oops", "exit code 3")),
        (": > /logs/verifier/reward.txt", ("reward.txt", "empty")),
        ("echo good > /logs/verifier/reward.txt", ("good",)),
        ("echo nan > /logs/verifier/reward.txt", ("nan",)),
        ("echo '[1]' > /logs/verifier/reward.json", ("[1]",)),
        ("""echo '{"reward": "1"}' > /logs/verifier/reward.json""", ("reward.json",)),
        ("""echo '{"style": 1}' > /logs/verifier/reward.json""", ("style", "reward_key")),
        ("sleep 1000", ("timeout_sec",)),
    ],
)
def test_broken_verifier_gives_no_reward(tmp_path: Path, test: str, words: tuple[str, ...]):
    toml = "[verifier]\ntimeout_sec = 1\n" if "sleep" in test else ""
    t = run(adapter_of(write(tmp_path, test=test, toml=toml)), ["Done."])
    assert t.stop_reason is StopReason.ERROR and t.reward is None
    assert all(word in (t.error or "") for word in words)


@needs_bubblewrap
def test_json_goes_before_text_and_the_rest_is_recorded(tmp_path: Path):
    found = json.dumps({"reward": 0.25, "style": True})
    t = run(adapter_of(write(tmp_path, test=f"{PASS}; echo '{found}' > /logs/verifier/reward.json")), ["Done."])
    assert reward(t) == 0.25 and t.reward is not None
    assert t.reward.info["steps"] == [{"reward": 0.25, "style": 1.0}]


@needs_bubblewrap
def test_reward_that_the_agent_wrote_does_not_count(tmp_path: Path):
    cheat = "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; ln -s /bin/true /tests/test.sh"
    t = run(adapter_of(write(tmp_path, test="echo 0 > /logs/verifier/reward.txt")), [call("bash", command=cheat), "Done."])
    assert reward(t) == 0.0


@needs_bubblewrap
@pytest.mark.parametrize(("keep", "expected"), [(False, 0.0), (True, 1.0)])
def test_processes_of_the_agent_end_before_the_verifier(tmp_path: Path, keep: bool, expected: float):
    test = "n=0; grep -lx sleep /proc/[0-9]*/comm > /tmp/n; for f in $(cat /tmp/n); do tr '\\0' ' ' < ${f%comm}cmdline; done"
    test += " | grep -q 31341 && n=1; echo $n > /logs/verifier/reward.txt"
    adapter = adapter_of(write(tmp_path, test=test), keep_processes=keep)
    assert reward(run(adapter, [call("bash", command="sleep 31341 &"), "Done."])) == expected
    assert not processes_with("31341")


@needs_bubblewrap
def test_late_agent_is_verified(tmp_path: Path):
    write(tmp_path, toml="[agent]\ntimeout_sec = 1\n", test=f"[ -e /app/begun ] && {PASS}")
    t = run(adapter_of(tmp_path), [call("bash", command="touch begun; sleep 1000")])
    assert t.stop_reason is StopReason.TIMEOUT and reward(t) == 1.0


@needs_bubblewrap
def test_agent_stopped_by_a_limit_is_verified(tmp_path: Path):
    t = run(adapter_of(write(tmp_path)), [call("bash", command="true")], max_turns=2)
    assert t.stop_reason is StopReason.MAX_TURNS and reward(t) == 1.0


def _steps(folder: Path, *, strategy: str = "mean", least: str = "") -> Path:
    toml = f'multi_step_reward_strategy = "{strategy}"\n[[steps]]\nname = "one"\n{least}\n[[steps]]\nname = "two"\n'
    write(folder, toml=toml)
    for name, value in (("one", "0.25"), ("two", "1")):
        step = folder / "steps" / name
        (step / "tests").mkdir(parents=True)
        (step / "instruction.md").write_text(f"Step {name}.")
        (step / "tests/test.sh").write_text(f"#!/bin/sh\ncat /app/made\necho {value} > /logs/verifier/reward.txt\n")
        (step / "workdir").mkdir()
        (step / "workdir/setup.sh").write_text(f"echo {name} >> made")
    return folder


@needs_bubblewrap
@pytest.mark.parametrize(
    ("options", "expected", "turns"),
    [
        ({}, 0.625, 3),
        ({"strategy": "final"}, 1.0, 3),
        ({"least": "min_reward = 0.5"}, 0.25, 1),
        ({"least": "min_reward = 0.25"}, 0.625, 3),
        ({"least": "min_reward = {reward = 0.1, style = 1}"}, 0.25, 1),
    ],
)
def test_steps_follow_in_one_conversation(tmp_path: Path, options: dict[str, str], expected: float, turns: int):
    adapter = adapter_of(_steps(tmp_path, **options))
    t = run(adapter, ["One done.", call("bash", command="cat made"), "Two done."])
    assert reward(t) == expected and len(t.turns) == turns
    if turns == 3:
        assert t.turns[0].observation[0].text == "Step two." and t.turns[1].observation[0].text == "one\ntwo\n"
        check_tokens(t)


@needs_bubblewrap
@pytest.mark.parametrize(
    ("toml", "word"),
    [
        ('[environment]\nhealthcheck = {command = "echo ill; false", interval_sec = 0, retries = 2}', "ill"),
        ('[environment]\nworkdir = "/proc/x"', "/proc/x"),
    ],
)
def test_failed_set_up_fails_the_trajectory(tmp_path: Path, toml: str, word: str):
    t = run(adapter_of(write(tmp_path, toml=toml)), ["Done."])
    assert t.stop_reason is StopReason.ERROR and t.reward is None and word in (t.error or "")


@needs_bubblewrap
def test_verifier_has_its_own_variables(tmp_path: Path):
    test = '[ "$A$B" = 12 ] && echo 1 > /logs/verifier/reward.txt'
    toml = '[verifier]\nenv = {B = "2"}\n[environment]\nenv = {A = "1"}\n'
    t = run(adapter_of(write(tmp_path, toml=toml, test=test)), [call("bash", command='echo "$A$B"'), "Done."])
    assert reward(t) == 1.0 and t.turns[0].observation[0].text == "1\n"


@needs_bubblewrap
@pytest.mark.parametrize("folder", sorted(EXAMPLES.iterdir()), ids=lambda folder: folder.name)
def test_example_is_worth_nothing_before_and_all_after_its_solution(folder: Path):
    adapter = adapter_of(folder, host_programs=True)
    assert reward(run(adapter, ["I give up."])) == 0.0
    solve = (folder / "solution/solve.sh").read_text()
    assert reward(run(adapter, [call("bash", command=solve), "Done."])) == 1.0


@needs_bubblewrap
def test_example_config_brings_its_tasks_and_tools():
    file = EXAMPLES.parent / "config.yaml"
    source = ConfigSource(config=load_config(RunConfig, file, []).config, base=file.parent)
    assert [task.id for task in build_train_tasks(source)] == [
        "harbor-answer-from-file",
        "harbor-fix-test",
        "harbor-write-script",
    ]
    assert [tool.name for tool in build_env_tools(source)] == ["bash", "read_file", "write_file", "edit_file"]


# With a command-line agent.

ASKS = """
import json, os, sys, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, head)))
os.system(answer["choices"][0]["message"]["content"])
"""
"""An agent that runs what the model says."""
AGENTS_FILE = f"""
from polyturn.serving.openai.agents import CommandLineAgent
asks = CommandLineAgent(
    command=("python3", "{{home}}/agent.py", "{{instruction}}"), files={{"agent.py": {ASKS!r}}}, timeout_s=600
)
missing = CommandLineAgent(command=("no-such-agent",), install="pip install it")
"""


def agent_adapter(folder: Path, agent: Any = None, **kwargs: Any) -> Harbor:
    (folder / "agents.py").write_text(AGENTS_FILE)
    return adapter_of(folder / "task", agent=agent or f"{folder}/agents.py:asks", **kwargs)


@needs_bubblewrap
def test_agent_of_a_command_line_is_verified_where_it_worked(tmp_path: Path):
    write(tmp_path / "task", test=f"[ $(cat /app/out) = 42 ] && {PASS}", environment__data_dot_txt="42")
    adapter = agent_adapter(tmp_path)
    t = run(adapter, ["ls /tests 2>&1; cp data.txt out"])
    assert reward(t) == 1.0 and t.stop_reason is StopReason.STOP and not adapter.tools()
    assert [turn.message.text for turn in t.turns] == ["ls /tests 2>&1; cp data.txt out"]
    check_tokens(t)


@needs_bubblewrap
def test_late_agent_of_a_command_line_is_verified(tmp_path: Path):
    write(tmp_path / "task", toml="[agent]\ntimeout_sec = 5\n", test=f"[ -e /app/begun ] && {PASS}")
    t = run(agent_adapter(tmp_path), ["touch begun; sleep 31342"])
    assert t.stop_reason is StopReason.TIMEOUT and reward(t) == 1.0 and not processes_with("31342")


@needs_bubblewrap
def test_late_verifier_of_an_agent_gives_no_reward(tmp_path: Path):
    write(tmp_path / "task", toml="[verifier]\ntimeout_sec = 1\n", test="sleep 1000")
    t = run(agent_adapter(tmp_path), ["true"])
    assert t.stop_reason is StopReason.ERROR and t.reward is None and "verifier.timeout_sec" in (t.error or "")


@needs_bubblewrap
def test_agent_stopped_by_a_limit_of_the_run_is_verified(tmp_path: Path):
    write(tmp_path / "task")
    t = run(
        agent_adapter(tmp_path), ["python3 /tmp/polyturn-agent/agent.py again || kill $PPID"], max_turns=None, max_tokens=30
    )
    assert t.stop_reason is StopReason.MAX_TOKENS and reward(t) == 1.0


@needs_bubblewrap
@pytest.mark.parametrize(("least", "expected", "turns"), [("", 0.625, 2), ("min_reward = 0.5", 0.25, 1)])
def test_agent_is_started_for_each_step(tmp_path: Path, least: str, expected: float, turns: int):
    _steps(tmp_path / "task", least=least)
    t = run(agent_adapter(tmp_path), lambda request: "cat made")
    assert reward(t) == expected and len(t.turns) == turns
    shown = [scripted_context([]).codec.decode(segment.token_ids.tolist()) for segment in t.segments]
    assert all(f"Step {name}." in text for name, text in zip(("one", "two"), shown, strict=False))


@needs_bubblewrap
def test_missing_agent_is_refused_before_the_run(tmp_path: Path):
    write(tmp_path / "task")
    adapter = agent_adapter(tmp_path, f"{tmp_path}/agents.py:missing")
    (task,) = adapter.tasks(split="train", seeds=range(1))
    refuses(lambda: adapter.scheduler().check_task(task), ConfigError, "no-such-agent")


@needs_bubblewrap
@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"agent": "claud_code"}, ("claud_code", "claude_code")),
        ({"agent": {"agent": "codex", "max_cals": 3}}, ("max_cals", "max_calls")),
        ({"agent": {"max_calls": 3}}, ("agent", "claude_code")),
        ({"agent": "codex", "tools": {}}, ("codex", "tools")),
    ],
)
def test_agent_setting_that_cannot_work_is_refused(tmp_path: Path, kwargs: dict[str, Any], words: tuple[str, ...]):
    with pytest.raises(ConfigError) as error:
        adapter_of(write(tmp_path), **kwargs).scheduler()
    assert all(word in str(error.value) for word in words)


def test_sandbox_that_does_not_start_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stand_in(monkeypatch, tmp_path, "podman").set("no-run")
    adapter = adapter_of(write(tmp_path / "task"), sandbox={"backend": "podman", "image": "img"})
    (task,) = adapter.tasks(split="train", seeds=range(1))
    refuses(lambda: adapter.scheduler().check_task(task), ConfigError, "no such image")


@needs_bubblewrap
def test_example_of_an_agent_solves_a_task():
    file = EXAMPLES.parent / "agent.yaml"
    config = load_config(RunConfig, file, []).config
    assert isinstance(config.env, EnvConfig)
    adapter = find_adapter(config.env.name, config.env.kwargs, base=file.parent)
    assert isinstance(adapter, Harbor)
    solve = (EXAMPLES / "answer-from-file/solution/solve.sh").read_text()
    t = run(adapter, [f"```sh\n{solve}\n```", "Done."])
    assert t.task.id == "harbor-answer-from-file" and reward(t) == 1.0 and len(t.turns) == 2


# The command.


def test_command_lists_what_tasks_need_and_why_not(tmp_path: Path):
    write(tmp_path / "good", toml="[agent]\ntimeout_sec = 5\n", environment__Dockerfile="FROM x")
    write(tmp_path / "wants-gpu", toml='artifacts = ["/a"]\n[environment]\ngpus = 2\ndocker_image = "img"')
    write(tmp_path / "wrong", toml="[agnt]")
    called = call_command(main, "data", "harbor", tmp_path)
    assert called.code == 1
    for words in (("good", "Dockerfile", "5 s", "ok"), ("wants-gpu", "img", "refused"), ("wrong", "unreadable")):
        assert any(all(word in line for word in words) for line in called.out.splitlines()), called.out
    assert "environment.gpus" in called.out and "artifacts" in called.out and "'agnt'" in called.out


@pytest.mark.parametrize("backend", ["apptainer", "e2b"])
def test_dockerfile_is_refused_where_no_image_can_be_built(tmp_path: Path, backend: str):
    write(tmp_path / "one", environment__Dockerfile="FROM x")
    called = call_command(main, "data", "harbor", tmp_path, "--backend", backend)
    assert called.code == 1 and f"{backend} builds no image from environment/Dockerfile" in called.out


def test_command_accepts_the_examples():
    called = call_command(main, "data", "harbor", EXAMPLES)
    assert called.code == 0 and called.out.count(" ok") == 3, called.out
