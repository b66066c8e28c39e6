"""What a person reads who made a mistake: what is wrong, which value, what to do; no traceback, and no run folder."""

from __future__ import annotations

import functools
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from polyturn import build
from polyturn.api import training
from polyturn.cli.arguments import Command
from polyturn.cli.main import app, main
from support.runs import call_command, write_tiny_run

call = functools.partial(call_command, main)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.advantage=groop", "algorithm.advantage: there is no 'groop'. Did you mean 'rloo' or 'grpo'?"),
        ("algorithm.loss=ppo", "algorithm.loss: there is no 'ppo'. Known: 'cispo'"),
        ("algorithm.loss_scale=last", "algorithm.loss_scale: there is no 'last'."),
        ("algorithm.kl.target=0.1", "set coef to a first weight"),
        ("algorithm.advantage=turn.py:nothing", "there is no file"),
        ("reward.function=gsm9k", "reward: there is no 'gsm9k'. Did you mean 'gsm8k'"),
        ("rollout.parser=hermess", "rollout.parser: there is no 'hermess'. Did you mean 'hermes'?"),
        (
            "warm_start={steps: 3, conversations: shwn.jsonl}",
            "warm_start.conversations is 'shwn.jsonl', and there is no such",
        ),
        ("warm_start={steps: 3, conversations: null}", "steps is 3 and warm_start.conversations is not set; name a jsonl"),
        ("out=/proc/none", "the folder '/proc/none' cannot be made or written (FileNotFoundError"),
    ],
)
def test_a_name_that_is_nothing_is_told_with_its_key_and_leaves_no_run_folder(tmp_path: Path, override: str, said: str):
    config = write_tiny_run(tmp_path)
    called = call("train", config, override)
    assert called.code == 2 and said in called.err and "Traceback" not in called.err
    assert not (tmp_path / "runs").exists()


def test_a_wrong_key_is_told_before_pytorch_is_imported(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("model: {path: somewhere}\ntrain: {stesp: 3}\n", encoding="utf-8")
    script = """
import sys
from polyturn.cli.main import main
for command in ("train", "rollout", "eval", "sft"):
    try:
        main([command, "run.yaml"])
    except SystemExit:
        assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = "polyturn: unknown key 'train.stesp', set to 3 (in run.yaml). Did you mean 'train.steps'?"
    assert done.stderr.count(said) == 4, done.stderr


def test_a_mistake_that_needs_no_model_is_told_before_pytorch_is_imported(tmp_path: Path):
    write_tiny_run(tmp_path)
    rows = (tmp_path / "tasks.jsonl").read_text()
    (tmp_path / "unknown.jsonl").write_text(rows.replace('"coach"', '"couch"'))
    script = """
import sys
from polyturn.cli.main import main
for command, override in (
    ("train", "reward.function=plugins.py:nothing"),
    ("train", "reward.function=gsm9k"),
    ("train", "out=/proc/none"),
    ("train", "evaluation={every: 2, data: null}"),
    ("train", "evaluation.data.files=nowhere.jsonl"),
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


def test_a_file_that_fails_when_it_is_imported_is_named_with_the_line(tmp_path: Path):
    config = write_tiny_run(tmp_path)
    (tmp_path / "mine.py").write_text("import math\n\nSIZE = math.sqrt(-1)\n", encoding="utf-8")
    called = call("train", config, "reward.function=mine.py:score")
    assert "mine.py' fails when imported, at line 3: ValueError: " in called.err


@pytest.mark.parametrize(
    "override",
    ["reward.function=ends.py:f", "plugins=[ends.py]", "rollout.tools.functions=['ends:f']", "rollout.scheduler=ends.py:S"],
)
@pytest.mark.parametrize(
    ("leave", "said"), [("sys.exit(3)", "SystemExit: 3"), ("raise KeyboardInterrupt", "KeyboardInterrupt")]
)
def test_a_file_that_ends_the_program_when_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, leave: str, said: str
):
    config = write_tiny_run(tmp_path)
    (tmp_path / "ends.py").write_text(f"import sys\n\n{leave}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    called = call("train", config, override, "--dry-run")
    assert called.code == 2 and "ends" in called.err and said in called.err, called.err


@pytest.mark.parametrize("leave", ["sys.exit(0)", "raise KeyboardInterrupt"])
def test_a_plugin_that_ends_the_program_when_it_is_made_is_named(tmp_path: Path, leave: str):
    config = write_tiny_run(tmp_path)
    text = f"import sys, polyturn\n\nclass S(polyturn.MultiTurnScheduler):\n    def __init__(self):\n        {leave}\n"
    (tmp_path / "leaves.py").write_text(text, encoding="utf-8")
    called = call("train", config, "rollout.scheduler=leaves.py:S", "rollout.limits.max_turns=2", "--dry-run")
    assert called.code == 2 and "(leaves.py, line 5)" in called.err and "interrupted" not in called.err, called


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("corpus = 3", "which is 3; name a function that returns texts"),
        ("def corpus(): return [1]", "returned 1 among its texts"),
        ("def corpus(): return None", "raised TypeError"),
        ("def corpus(): raise OSError('gone')", "raised OSError: gone (texts.py, line 1)"),
    ],
)
def test_a_corpus_that_is_none_is_told_with_its_key(tmp_path: Path, text: str, said: str):
    config = write_tiny_run(tmp_path)
    (tmp_path / "texts.py").write_text(text + "\n", encoding="utf-8")
    called = call("train", config, "model.tokenizer.corpus=texts.py:corpus", "--dry-run")
    assert called.code == 2 and "model.tokenizer.corpus" in called.err and said in called.err, called.err


def test_a_tab_in_a_config_is_called_one(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("model:\n\tpath: x\n", encoding="utf-8")
    called = call("train", tmp_path / "run.yaml")
    assert called.err.strip().endswith("run.yaml line 2: this is not YAML (a tab indents it; YAML takes spaces alone)")


def test_a_folder_of_a_model_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("model: {path: ../models/mine}\n", encoding="utf-8")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "2+2?"}\n', encoding="utf-8")
    called = call("train", tmp_path / "run.yaml", f"data.train.files={tmp_path / 'tasks.jsonl'}")
    assert "models/mine', which the config calls '../models/mine'; name a model's folder" in called.err


def test_what_a_server_should_serve_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for flag in ("--openai", "--deadline=5"):
        assert "give --model FOLDER" in call("serve", flag).err
    (tmp_path / "empty").mkdir()
    assert "there is no model in empty" in call("serve", "--openai", "--model", "empty").err


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "models/of/mine",
            "there is no folder 'models/of/mine'; name the folder of a model or a tokenizer, or one on the hub",
        ),
        (".", "the folder '.' holds no tokenizer (tokenizer.json)"),
    ],
)
def test_a_model_that_is_none_is_told_in_the_librarys_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, said: str
):
    monkeypatch.chdir(tmp_path)
    assert said in call("check", model).err


def test_a_section_that_is_set_to_null_is_told_what_to_do(tmp_path: Path):
    called = call("train", write_tiny_run(tmp_path), "evaluation=null")
    assert "evaluation is None (from the override 'evaluation=null'); it must be a section" in called.err
    assert called.err.strip().endswith("leave it out for its defaults")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model=Qwen/x", "it must be a section, with keys of its own (path, revision, init, tokenizer, chat_template, "),
        ("data.train=rows.jsonl", "with keys of its own (files, dataset, subset, split, "),
        ("tracking=wandb", "it must be a list, such as [wandb]"),
        ("rollout.interactions={name: a}", "is {'name': 'a'} (from the override 'rollout.interactions={name: a}')"),
    ],
)
def test_a_value_of_the_wrong_form_is_told_which_form_and_where_it_came_from(tmp_path: Path, override: str, said: str):
    assert said in call("train", write_tiny_run(tmp_path), override).err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve --sandbox --model x", "--model means nothing with --sandbox"),
        ("serve --sandbox --idle 600", "--idle means nothing with --sandbox"),
        ("serve --sandbox rollout.limits.max_turns=3", "rollout.limits.max_turns=3 means nothing with --sandbox"),
        ("serve --search x --openai", "--openai means nothing with --search"),
        ("serve --mcp tools.yaml --stdio --port 3", "--port means nothing with --stdio"),
        ("serve --mcp tools.yaml --record run", "--record means nothing with --mcp"),
        ("serve --openai --model x --scheduler gym", "--scheduler means nothing with --openai"),
        ("serve --model x --record run", "--record means nothing where rollouts are served"),
        ("serve --model x --topk 4", "--topk means nothing where rollouts are served"),
        ("eval config.yaml --tries 2", "--tries means nothing without --endpoint"),
        ("eval config.yaml --concurrency 32", "--concurrency means nothing without --endpoint"),
    ],
)
def test_what_has_no_meaning_beside_the_rest_is_refused(words: str, said: str):
    told = call(*words.split())
    assert told.code == 2 and said in told.err, told.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rollout c.yaml --tasks 3 -n 5", "--tasks is given 2 times; keep one of them"),
        ("train c.yaml --resume --no-resume", "--resume is given 2 times; keep one of them"),
        ("data gsm8k out --variant tool --variant tool", "--variant is given 2 times; keep one of them"),
        ("config migrate c.yaml --out a --out b --out c", "--out is given 3 times; keep one of them"),
        ("run-as --dry-run --dry-run verl -- echo --x 1 --x 2", "--dry-run is given 2 times; keep one of them"),
    ],
)
def test_an_option_that_is_given_twice_is_refused(words: str, said: str):
    told = call(*words.split())
    assert told.code == 2 and said in told.err, told.err


def test_every_command_refuses_an_option_that_is_given_twice():
    def commands(group: Any) -> Iterator[Any]:
        for each in group.commands.values():
            yield from commands(each) if hasattr(each, "commands") else (each,)

    found = list(commands(typer.main.get_command(app)))
    assert len(found) > 20 and all(isinstance(each, Command) for each in found)


def test_an_option_that_may_be_repeated_is_taken_twice():
    told = call(*["simulate", "nothing", "--policy", "fifo", "--policy", "oracle"])
    assert told.code == 2 and "times" not in told.err, told.err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.steps=3", "name=a", "train.steps=4"], "overridden more than once: train.steps;"),
        (["name=a", "name=b", "+name=c", "train.steps=1", "train.steps=2"], "overridden more than once: name, train.steps;"),
        (["train.steps=3", "+train.steps=3"], ""),
        (["train.optim={lr: 1}", "train.optim={betas: [0.5, 0.6]}"], ""),
        (["train.steps=3", "more.yaml", "train.optim.lr=0.1"], ""),
    ],
)
def test_a_key_that_is_overridden_twice_in_one_command_is_told(
    tmp_path: Path, overrides: list[str], said: str, caplog: Any, monkeypatch: Any
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.yaml").write_text("train: {steps: 7}")
    call("config", "print", write_tiny_run(tmp_path), *overrides)
    lines = [r.getMessage() for r in caplog.records if "more than once" in r.getMessage()]
    assert len(lines) == bool(said) and all(said in line for line in lines), lines


@pytest.mark.parametrize(("text", "said"), [("off", "YAML reads"), ("yes", "YAML reads"), ("5", "write it in quotes")])
def test_a_text_that_yaml_reads_as_something_else_is_told_to_be_quoted(tmp_path: Path, text: str, said: str):
    config = write_tiny_run(tmp_path)
    config.write_text(config.read_text().replace("name: tiny", f"name: {text}"))
    told = call("train", config, "--dry-run")
    assert told.code == 2 and said in told.err and "quotes" in told.err, told.err


@pytest.mark.parametrize("name", ["../elsewhere", "/tmp/elsewhere", "a/../../b"])
def test_a_run_is_never_written_outside_its_folder_of_runs(name: str, tmp_path: Path) -> None:
    called = call_command(main, "train", write_tiny_run(tmp_path), f"name={name}", "--dry-run")
    assert called.code == 2 and "lies below `out`" in called.err and name in called.err


def test_a_name_that_no_folder_can_have_is_refused(tmp_path: Path) -> None:
    called = call("train", write_tiny_run(tmp_path), f"name={'é' * 101}", "--dry-run")
    assert called.code == 2 and "200 bytes are room enough" in called.err


@pytest.mark.parametrize("flag", ["--verl", "--swift"])
def test_our_own_config_under_the_flag_of_another_library_is_recognised(flag: str, tmp_path: Path) -> None:
    called = call("train", write_tiny_run(tmp_path), flag, "--dry-run")
    assert called.code == 2 and "is written in polyturn's own keys, not in those of" in called.err
    assert f"leave out {flag}: " in called.err and "Did you mean" not in called.err


def test_a_config_whose_keys_two_libraries_share_is_not_taken_for_ours_beside_overrides_of_the_other(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {shuffle: false}\n")
    called = call("train", "--verl", path, "actor_rollout_ref.rollout.name=hf", "data.train_files=gone.parquet", "--dry-run")
    assert called.code == 2 and "own keys" not in called.err and "gone.parquet" in called.err


def test_a_tool_of_the_rows_that_the_run_does_not_have_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, tasks = write_tiny_run(tmp_path), tmp_path / "tasks.jsonl"
    rows = [json.loads(line) for line in tasks.read_text().splitlines()]
    rows[0]["extra_info"]["tools_kwargs"] = {"shuot": {"create_kwargs": {}}}
    rows[1] |= {"tools": ["shout"], "tools_kwargs": {"shuot": {}}}
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    called = call("train", config, "--dry-run")
    assert called.code == 0, called.err
    told = called.err + caplog.text
    assert "data.train: 2 of 6 tasks name the tool 'shuot'" in told and "Did you mean 'shout'?" in told


@pytest.mark.parametrize("flags", [(), ("--openai",)])
def test_a_config_of_another_library_is_recognised_by_a_server_too(tmp_path: Path, flags: tuple[str, ...]):
    config = tmp_path / "theirs.yaml"
    config.write_text("actor_rollout_ref: {model: {path: x}}\ntrainer: {total_epochs: 1}\n", encoding="utf-8")
    called = call("serve", *flags, "--config", config)
    assert called.code == 2 and "is written in the keys of verl, not in polyturn's; add --verl" in called.err, called.err


def test_a_key_that_stands_a_section_too_high_is_looked_for_below_its_own_section_first(tmp_path: Path):
    called = call("train", write_tiny_run(tmp_path), "train.lr=0.1")
    assert "unknown key 'train.lr'" in called.err and "Did you mean 'train.optim.lr'" in called.err, called.err


def test_a_folder_that_another_process_makes_meanwhile_is_not_resumed_without_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = write_tiny_run(tmp_path)

    def another_begins(folder: Path, _: object) -> tuple[Path, Path]:
        checkpoint = folder / "checkpoints/step-000000"
        checkpoint.mkdir(parents=True)
        return checkpoint, checkpoint

    monkeypatch.setattr(training, "_checkpoints_of", another_begins)
    called = call("train", config, "--resume")
    assert called.code == 2 and "there is no checkpoint under" in called.err, called


@pytest.mark.parametrize("flags", [(), ("--openai",)])
def test_a_port_in_use_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
):
    config = write_tiny_run(tmp_path)
    monkeypatch.setattr(build, "build_parts", lambda *_, **__: pytest.fail("a model is loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        called = call("serve", *flags, "--config", config, "--port", taken.getsockname()[1])
    assert called.code == 2 and "Address already in use; end what listens there" in called.err, called.err
