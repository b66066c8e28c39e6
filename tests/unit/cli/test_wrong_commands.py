"""A wrong command ends with exit code 2 and a sentence, before weights are loaded and without a run folder.

`unit/config/test_wrong_values.py` tests the sentence of each key; this file tests that it reaches the user.
"""

from __future__ import annotations

import functools
import io
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import polyturn
from polyturn import build
from polyturn.api import training
from polyturn.build import parts as parts_module
from polyturn.cli.arguments import Command
from polyturn.cli.console import Output, command, program
from polyturn.cli.listening import ServeOptions
from polyturn.cli.main import app, main, prepare_process
from polyturn.cli.serve import overrides_of
from polyturn.cli.serve_openai import unused_keys
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError
from polyturn.tokens.hub import only_cached
from support.refusals import refuses
from support.runs import Called, call_command, write_tiny_run

pytestmark = pytest.mark.timeout(300)
call = functools.partial(call_command, main)


def assert_refused(called: Called, *words: str) -> None:
    shown = " ".join(called.err.split())
    assert called.code == 2, called
    assert [word for word in words if word not in shown] == [], shown
    assert "Traceback" not in shown


PLUGINS = """\
import math
import polyturn
from polyturn.data.sampler import Curriculum


class Chooses(Curriculum):
    def chose(self, epoch):
        return [0]


class Ends(polyturn.MultiTurnScheduler):
    def __init__(self):
        raise SystemExit(0)


class Estimator:
    def __call__(self, rewards_G, samples_G):
        return []


class Yields(polyturn.BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        yield True, "x", 1.0, {}


def one_argument(rewards):
    return rewards


def yields(trajectory, samples=None):
    yield 1.0


def numbers():
    return [1]


def raises():
    raise OSError("gone")
"""
HIDDEN = """
from typing import Annotated

import polyturn


@polyturn.tool
def stock(item: str, table: Annotated[dict, polyturn.FromTask]) -> int:
    \"\"\"Look an item up.

    Args:
        item: The item.
    \"\"\"
    return table[item]
"""
TOOL = '''\
import polyturn


@polyturn.tool
def counts(to: int):
    """Count.

    Args:
        to: How far.
    """
    yield from range(to)
'''
MISTAKES = [
    (
        "rollout.tools.functions=['hidden.py:stock']",
        ["task 'mouse-0'", "'stock'", "'table'", "tools_kwargs['stock']['create_kwargs']"],
    ),
    # errors of the configuration
    ("train.stesp=3", ["'train.stesp'", "'train.steps'?"]),
    ("engine.num_slots=many", ["engine.num_slots is 'many'"]),
    ("algorithm.kl.target=0.1", ["algorithm.kl", "coef"]),
    # names
    ("algorithm.advantage=groop", ["algorithm.advantage", "'groop'", "'grpo'?"]),
    ("algorithm.loss=ppo", ["algorithm.loss", "'ppo'", "'ppo_clip'"]),
    ("reward.function=gsm9k", ["'gsm9k'", "'gsm8k'"]),
    ("rollout.scheduler=gymm", ["rollout.scheduler", "'gymm'"]),
    ("rollout.parser=hermess", ["rollout.parser", "'hermess'", "'hermes'?"]),
    ("algorithm.loss_scale=last", ["algorithm.loss_scale", "'last'"]),
    ("model.chat_template=hermess", ["model.chat_template", "'hermess'"]),
    # files, and the names in them
    ("algorithm.advantage=turn.py:nothing", ["algorithm.advantage: ", "turn.py"]),
    ("reward.function=plugins.py:nothing", ["reward: ", "nothing"]),
    ("rollout.tools.functions=['nowhere.py:f']", ["rollout.tools.functions: ", "nowhere.py"]),
    ("rollout.interactions=[{name: other, class_name: 'plugins.py:Coach', config: {}}]", ["'coach'"]),
    (
        "rollout.interactions=[{name: coach, class_name: 'plugins.py:Couch', config: {}}]",
        ["rollout.interactions: ", "plugins.py", "'Couch'", "'Coach'"],
    ),
    ("evaluation.data.files=nowhere.jsonl", ["nowhere.jsonl"]),
    ("data.train.files=task.jsonl", ["task.jsonl", "'tasks.jsonl'"]),
    # rows of data
    ("data.train.files=shoot.jsonl", ["'mouse-1'", "'shoot'", "'shout'"]),
    ("evaluation.data.files=tinny.jsonl", ["'tinny'", "'tiny'"]),
    ("warm_start={steps: 3, conversations: shwn.jsonl}", ["warm_start.conversations", "'shwn.jsonl'"]),
    ("warm_start={steps: 3, conversations: null}", ["warm_start.conversations"]),
    ("plugins=[broken.py]", ["a_module_that_is_nowhere"]),
    ("reward.function=fails.py:score", ["fails.py", "line 3", "ValueError"]),
    ("plugins=[ends.py]", ["ends.py", "SystemExit: 3"]),
    # plug-ins of the wrong form
    ("rollout.scheduler=mine.py:Ends", ["mine.py, line 13"]),
    ("data.sampler=mine.py:Chooses", ["data.sampler", "mine.py:Chooses"]),
    ("algorithm.advantage=mine.py:one_argument", ["mine.py:one_argument"]),
    ("algorithm.advantage=mine.py:Estimator", ["Estimator"]),
    ("algorithm.loss=mine.py:one_argument", ["mine.py:one_argument"]),
    ("rollout.tools.functions=['counts.py:counts']", ["counts"]),
    ("reward.routes.tiny=mine.py:yields", ["mine.py:yields"]),
    ("rollout.interactions=[{name: coach, class_name: 'mine.py:Yields', config: {}}]", ["Yields"]),
    ("model.tokenizer.corpus=mine.py:numbers", ["model.tokenizer.corpus", "1"]),
    ("model.tokenizer.corpus=mine.py:raises", ["model.tokenizer.corpus", "OSError: gone", "mine.py"]),
    # values that do not go together
    ("train.minibatches=40", ["minibatches"]),
    ("evaluation={every: 2, data: null}", ["evaluation"]),
    # folders of runs
    ("name=../elsewhere", ["`out`", "../elsewhere"]),
    ("name=a/../../b", ["`out`", "a/../../b"]),
    (f"name={'é' * 101}", ["200 bytes"]),
]


def change_row(folder: Path, to: str, **changes: Any) -> None:
    """Write the tasks with another second row."""
    rows = [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]
    rows[1] |= changes
    (folder / to).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run beside plug-ins and rows with mistakes, whose weights must not be loaded."""
    for name, text in (
        ("mine.py", PLUGINS),
        ("counts.py", TOOL),
        ("hidden.py", HIDDEN),
        ("broken.py", "import a_module_that_is_nowhere\n"),
        ("fails.py", "import math\n\nSIZE = math.sqrt(-1)\n"),
        ("ends.py", "import sys\n\nsys.exit(3)\n"),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(parts_module, "build_model", lambda *_, **__: pytest.fail("weights were loaded"))
    config = write_tiny_run(tmp_path)
    kwargs = {"need_tools_kwargs": True, "tools_kwargs": {"shoot": {"create_kwargs": {}}}}
    change_row(tmp_path, "shoot.jsonl", extra_info=kwargs)
    change_row(tmp_path, "tinny.jsonl", data_source="tinny")
    return config


@pytest.mark.parametrize(("override", "words"), MISTAKES, ids=[override for override, _ in MISTAKES])
def test_mistake_ends_train_before_weights_are_loaded(config: Path, override: str, words: list[str]) -> None:
    called = call("train", config, override)
    assert_refused(called, *words)
    lines = [line for line in called.err.splitlines() if not line.startswith(("tiny: checking", "load PyTorch: "))]
    assert lines[0].startswith("polyturn: ") and lines[1:] == []
    assert not (config.parent / "runs").exists()


def test_prompt_longer_than_the_context_ends_train(tmp_path: Path) -> None:
    config = write_tiny_run(tmp_path)
    change_row(tmp_path, "tasks.jsonl", prompt=[{"role": "user", "content": "How loud is it? " * 80}])
    assert_refused(call("train", config), "'mouse-1'", "447")


def test_resume_with_other_groups_is_refused_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_tiny_run(tmp_path)
    assert call("train", config, "train.steps=1", "evaluation.data=null").code == 0
    monkeypatch.setattr(parts_module, "build_model", lambda *_, **__: pytest.fail("weights were loaded"))
    called = call("train", config, "train.steps=2", "train.groups_per_step=1", "--resume")
    assert_refused(called, "train.groups_per_step 2 and this run has 1")
    assert "resumed with another setting" not in called.err


def test_mistake_that_needs_no_model_is_found_without_pytorch(tmp_path: Path) -> None:
    write_tiny_run(tmp_path)
    rows = (tmp_path / "tasks.jsonl").read_text()
    (tmp_path / "unknown.jsonl").write_text(rows.replace('"coach"', '"couch"'))
    script = """
import sys
from polyturn.cli.main import main
for command, override in (
    ("train", "train.stesp=3"),
    ("train", "reward.function=plugins.py:nothing"),
    ("train", "out=/proc/none"),
    ("train", "evaluation={every: 2, data: null}"),
    ("train", "data.train.files=unknown.jsonl"),
    ("train", "rollout.scheduler=gymm"),
    ("eval", "evaluation.data.files=unknown.jsonl"),
    ("rollout", "data.train.files=unknown.jsonl"),
    ("sft", "warm_start={steps: 1, conversations: nowhere.jsonl}"),
):
    try:
        main([command, "config.yaml", override])
    except SystemExit as ended:
        assert ended.code == 2, (command, override, ended.code)
    else:
        raise AssertionError((command, override))
    assert "torch" not in sys.modules, (command, override)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs").exists()


def test_rank_of_torchrun_is_refused_without_pytorch(tmp_path: Path) -> None:
    write_tiny_run(tmp_path)
    script = """
import sys
from polyturn.cli.main import main
try:
    main(["train", "config.yaml"])
finally:
    print("torch" in sys.modules)
"""
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert "polyturn train FILE --nproc N" in done.stderr and "--ray" in done.stderr


def test_missing_folder_of_a_model_is_not_sought_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: ../models/mine}\ndata: {train: {files: tasks.jsonl}}\n")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "2+2?"}\n')
    assert_refused(call("train", tmp_path / "run.yaml"), "models/mine'", "'../models/mine'")
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("the hub was asked"))
    for name in (str(tmp_path), "./nowhere", "/nowhere/at/all", "a/b/c", "~/models"):
        assert only_cached(name) is False


@pytest.mark.parametrize(
    ("arguments", "key"),
    [(["--steps", "5"], "train.steps=5"), (["--max-steps=5"], "train.steps=5"), (["--lr"], "train.optim.lr=…")],
)
def test_key_written_as_an_option_is_answered_with_the_key(arguments: list[str], key: str) -> None:
    assert_refused(call("train", "config.yaml", *arguments), arguments[0].partition("=")[0], key)


def test_keys_that_agents_decide_are_named_when_served() -> None:
    keys = ["rollout.tools.functions=['a.py:b']", "rollout.scheduler=single_turn", "model.path=none"]
    assert unused_keys(load_config(RunConfig, None, keys).config) == ["rollout.tools.functions", "rollout.scheduler"]
    assert unused_keys(load_config(RunConfig, None, ["model.path=none"]).config) == []


def test_served_model_replaces_that_of_the_config(config: Path) -> None:
    flags = overrides_of(model="none/x", scheduler=None, max_turns=None, plugins=[], engine=None, config=config)
    model = load_config(RunConfig, config, flags).config.model
    assert (model.path, model.init, model.tokenizer) == ("none/x", None, None)


@pytest.mark.parametrize("name", ["smolm2", "Qwen/Qwen3-0.6B"])
def test_model_of_the_package_index_is_named_without_a_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("polyturn.tokens.hub.unreachable", lambda: "no route")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    refuses(lambda: only_cached(name), ConfigError, "'smollm2'")


@pytest.mark.slow
def test_unreachable_hub_is_asked_once(tmp_path: Path) -> None:
    """In a process of its own, because the library reads its settings when it is imported."""
    asked = (
        "import urllib.request, polyturn.tokens.codec as c\n"
        "n = []; real = urllib.request.urlopen\n"
        "urllib.request.urlopen = lambda *a, **k: (n.append(1), real(*a, **k))[1]\n"
        "try: c.load_codec('nobody/nothing')\n"
        "except Exception as problem: print(type(problem).__name__, len(n), problem)\n"
    )
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # does not listen
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path)}
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "http_proxy", "HTTP_PROXY"):
            environment.pop(name, None)
        for offline, words in ({}, "ConfigError 1"), ({"HF_HUB_OFFLINE": "1"}, "ConfigError 0"):
            line = [sys.executable, "-c", asked]
            done = subprocess.run(line, env=environment | offline, capture_output=True, text=True, check=True)
            assert done.stdout.startswith(words) and "'nobody/nothing'" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("check models/of/mine", "there is no folder 'models/of/mine'"),
        ("check .", "holds no tokenizer"),
        ("check config.yaml", "is a file"),
        ("serve --openai", "--model FOLDER"),
        ("serve --deadline=5", "--model FOLDER"),
        ("serve --deadline=0 --model x", "--deadline"),
        ("serve --openai --model empty", "no model in empty"),
        # options that have no meaning beside the others
        ("serve --sandbox --model x", "--model has no effect with --sandbox"),
        ("serve --sandbox rollout.limits.max_turns=3", "rollout.limits.max_turns=3 has no effect with --sandbox"),
        ("serve --search x --openai", "--openai has no effect with --search"),
        ("serve --mcp tools.yaml --stdio --port 3", "--port has no effect with --stdio"),
        ("serve --openai --model x --scheduler gym", "--scheduler has no effect with --openai"),
        ("serve --model x --record run", "--record has no effect"),
        ("eval config.yaml --tries 2", "--tries has no effect without --endpoint"),
        ("view --desk desk --terminal --port 3", "--port has no effect with --terminal"),
        ("run-as verl --runtime-env --dry-run", "--dry-run has no effect with --runtime-env"),
        ("run-as verl --runtime-env -- python x.py", "python x.py has no effect with --runtime-env"),
        ("data harbor empty --host-programs", "--host-programs has no effect with --backend podman"),
        ("show runs/none g0/0 --trajectory g0/1", "--trajectory g0/1 and g0/0 are two trajectories"),
        ("show runs/none g0/0 -n 3", "-n sets the length of a list"),
        # options of the command that another library's name is followed by
        ("run-as nothing python x.py --lr 3", "there is no stand-in for 'nothing'"),
        # runs that are not there
        ("train --resume", "train runs/NAME --resume"),
        ("train runs/none --resume", "'runs/none'"),
        ("train config.yaml --resume runs/none", "train runs/none --resume"),
        ("report runs/none", "no folder 'runs/none'"),
        ("report runs/none --metric reward/mean", "no folder 'runs/none'"),
        # folders of another kind
        ("report empty", "no run in 'empty'"),
        ("report empty --metric reward/mean", "no run in 'empty'"),
        ("config migrate empty", "'empty' is a folder"),
        ("config migrate .", "'.' is a folder"),
        ("config empty", "'empty' is a folder"),
        ("rescore config.yaml --reward gsm8k", "config.yaml'; use the folder of a run"),
        ("export rolled -o x", "no model in rolled; give a folder with config.json"),
        ("serve --openai --config config.yaml --record tasks.jsonl", "'tasks.jsonl'"),
        ("data index tasks.jsonl -o x --vectors empty.npy", "empty.npy cannot be read"),
        ("train empty --verl", "'empty' is a folder"),
        ("train empty --swift", "'empty' is a folder"),
        ("eval config.yaml --model tasks.jsonl", "no folder 'tasks.jsonl'"),
        # values that do not fit
        ("serve --model x --grace inf", "--grace is inf"),
        ("export x -o y --dtype nonsense", "Invalid value for '--dtype': 'nonsense' is not one of 'float32'"),
        ("train c.yaml --gpus many", "--gpus': it must be a whole number"),
        # options that are given twice
        ("rollout c.yaml --tasks 3 -n 5", "--tasks is given 2 times"),
        ("train c.yaml --resume --no-resume", "--resume is given 2 times"),
        ("config migrate c.yaml --out a --out b --out c", "--out is given 3 times"),
        ("run-as --dry-run --dry-run verl -- echo --x 1 --x 2", "--dry-run is given 2 times"),
    ],
)
def test_wrong_arguments_are_refused(config: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str) -> None:
    monkeypatch.chdir(config.parent)
    Path("empty").mkdir()
    Path("empty.npy").touch()
    Path("rolled/tokenizer").mkdir(parents=True)
    Path("rolled/tokenizer/tokenizer.json").touch()
    assert_refused(call(*words.split()), said)


def test_home_in_an_option_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert_refused(call("serve", "--sandbox", "--token-file=~/token"), f"'{tmp_path}/token'")


def test_character_that_the_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    prepare_process()
    Output().fact("reward", "0 → 1")
    sys.stdout.flush()
    assert b"reward         0 \\u2192 1" in written.getvalue()


def test_every_command_refuses_an_option_given_twice() -> None:
    def commands(group: Any) -> Iterator[Any]:
        for name in group.commands:
            each = group.get_command(typer.Context(group), name)
            yield from commands(each) if hasattr(each, "commands") else (each,)

    found = list(commands(typer.main.get_command(app)))
    assert len(found) > 20 and all(isinstance(each, Command) for each in found)
    repeated = call("run-as", "nothing", "--set", "a=1", "--set", "b=2")
    assert repeated.code == 2 and "times" not in repeated.err


def test_retired_command_names_its_replacement() -> None:
    assert_refused(call("simulate", "swe_like", "--policy", "fifo"), "engine/queue")
    for name, successor in (
        ("runs", "polyturn show"),
        ("plot", "polyturn report"),
        ("answer", "polyturn view --desk"),
    ):
        assert_refused(call(name, "x", "--option", "y"), successor)
        assert_refused(call(name, "--help"), successor)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["name=a", "name=b", "+name=c", "train.steps=1", "train.steps=2"], "name, train.steps;"),
        (["train.steps=3", "+train.steps=3"], ""),
        (["train.optim={lr: 1}", "train.optim={betas: [0.5, 0.6]}", "more.yaml"], ""),
    ],
)
def test_key_overridden_twice_is_logged(
    config: Path, overrides: list[str], keys: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    Path("more.yaml").write_text("train: {steps: 7}")
    call("config", "print", config, *overrides)
    lines = [message for message in caplog.messages if "more than once" in message]
    assert len(lines) == bool(keys) and all(keys in line for line in lines), lines


def test_tool_of_a_row_that_the_run_lacks_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, tasks = write_tiny_run(tmp_path), tmp_path / "tasks.jsonl"
    rows = [json.loads(line) for line in tasks.read_text().splitlines()]
    rows[0]["extra_info"]["tools_kwargs"] = {"shuot": {"create_kwargs": {}}}
    rows[1] |= {"tools": ["shout"], "tools_kwargs": {"shuot": {}}}
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    called = call("train", config, "--dry-run")
    assert called.code == 0, called.err
    (line,) = [message for message in caplog.messages if "'shuot'" in message]
    assert "'shout'?" in line


THEIRS = [
    ("actor_rollout_ref: {model: {path: x}}\ntrainer: {total_epochs: 1}\n", "--verl"),
    ("defaults: [ppo_trainer, _self_]\ndata: {train_files: a}\nactor_rollout_ref: {}\n", "--verl"),
    ("algorithm: {adv_estimator: grpo}\ntrainer: {n_gpus_per_node: 8}\n", "--verl"),
    ("hydra: {searchpath: [file://x]}\ndefaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 8}\n", "--verl"),
    ("rlhf_type: grpo\nmodel: x\ndataset: [a]\n", "--swift"),
]


@pytest.mark.parametrize(("text", "flag"), THEIRS)
def test_config_of_another_library_is_recognised(tmp_path: Path, text: str, flag: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    for words in ("train", "train --dry-run --gpus 8", "doctor", "config", "serve --config", "serve --openai --config"):
        assert_refused(call(*words.split(), tmp_path / "c.yaml"), f"add {flag}")


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("--dry-run", "--verl --dry-run"),
        ("--resume --dry-run", "--verl --resume --dry-run"),
        ("--dry-run --gpus 8 --nproc 2", "--verl --dry-run"),
    ],
)
def test_command_for_another_library_keeps_the_flags(config: Path, tmp_path: Path, words: str, flags: str) -> None:
    other = tmp_path / "c.yaml"
    other.write_text(THEIRS[0][0])
    assert_refused(call("train", other, *words.split()), command("train", other, *flags.split()))
    ours = [word for word in words.split()[:2] if word in ("--resume", "--dry-run")]
    assert_refused(call("train", config, "--verl", *ours), command("train", config, *ours))


def test_eval_warns_of_the_sampling_of_training(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    overrides = ("rollout.sampling.temperature=0.5", "+rollout.sampling={top_k: 3}", "rollout.max_concurrent=2")
    assert_refused(call("eval", config, *overrides, "evaluation.data.files=gone.jsonl"), "gone.jsonl")
    (line,) = [message for message in caplog.messages if "does not change it" in message]
    assert "evaluation.sets.greedy.sampling.temperature=0.5 '+evaluation.sets.greedy.sampling={top_k: 3}'" in line
    assert "max_concurrent" not in line


@pytest.mark.parametrize(
    "text", ["trainer: {steps: 1}\n", "modle: {path: x}\n", "data: {trian: x}\nalgorithm: {}\ndefaults: []\n"]
)
def test_mistake_in_our_config_is_not_taken_for_another_library(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    called = call("train", tmp_path / "c.yaml")
    assert called.code == 2 and "add --" not in called.err


def test_our_config_is_recognised_under_another_librarys_flag(config: Path, tmp_path: Path) -> None:
    for flag in ("--verl", "--swift"):
        called = call("train", config, flag)
        assert_refused(called, "has polyturn's keys", f"remove {flag}")
        assert "Did you mean" not in called.err
    assert_refused(call("config", "migrate", config), "already has polyturn's keys")
    shared = tmp_path / "shared.yaml"
    shared.write_text("data: {shuffle: false}\n")
    called = call("train", "--verl", shared, "actor_rollout_ref.rollout.name=hf", "data.train_files=gone.parquet")
    assert called.code == 2 and "own keys" not in called.err and "gone.parquet" in called.err


def test_folder_made_by_another_process_is_not_resumed(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def another_begins(folder: Path, _: object) -> tuple[Path, Path]:
        checkpoint = folder / "checkpoints/step-000000"
        checkpoint.mkdir(parents=True)
        return checkpoint, checkpoint

    monkeypatch.setattr(training, "_checkpoints_of", another_begins)
    assert_refused(call("train", config, "--resume"), "there is no checkpoint under")


@pytest.mark.parametrize("flags", [(), ("--openai",)])
def test_port_in_use_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    config = write_tiny_run(tmp_path)
    monkeypatch.setattr(build, "build_parts", lambda *_, **__: pytest.fail("a model is loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_refused(call("serve", *flags, "--config", config, "--port", port), "Address already in use")
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*another port"):
            ServeOptions(port=port).bind()
        with ServeOptions(first_port=port).bind() as found:
            assert found.getsockname()[1] != port


def test_printed_command_starts_this_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line = command("show", "my run", "task 7; rm -rf/0")
    assert shlex.split(line)[-3:] == ["show", "my run", "task 7; rm -rf/0"]
    own = Path(sys.executable).with_name("polyturn")
    if own.is_file():
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        assert Path(program()[0]).absolute() == own
        monkeypatch.setenv("PATH", str(own.parent))
        assert program() == ["polyturn"]
    (tmp_path / "polyturn").write_text("#!/bin/sh\necho another\n")
    (tmp_path / "polyturn").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() != ["polyturn"], "another program of this name is found first"


def test_version_is_printed() -> None:
    called = call("--version")
    assert (called.code, called.out.strip()) == (0, f"polyturn {polyturn.__version__}")
