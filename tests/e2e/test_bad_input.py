"""Bad input is one sentence on stderr that names the thing, shows the value and says what to do, before anything is trained.

Each case changes one thing of a run that works, and says which words the sentence must have.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from polyturn.cli.main import main
from polyturn.store.stored_run import open_store
from polyturn.training.checkpoint import Checkpoints
from support.runs import call_command, write_tiny_run

call = functools.partial(call_command, main)


def row(folder: Path, **changes: Any) -> None:
    """Change the second row of the tasks; None takes a key out."""
    path = folder / "tasks.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1] = {key: value for key, value in {**rows[1], **changes}.items() if value is not None}
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def all_rows(folder: Path, **changes: Any) -> None:
    path = folder / "tasks.jsonl"
    rows = [{**json.loads(line), **changes} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def text(folder: Path, old: str, new: str, file: str = "config.yaml") -> None:
    path = folder / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def file(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing that is wrong."""

    name: str
    says: Sequence[str]
    """Words of the sentence: the thing, its value, what to do."""
    change: Callable[[Path], None] = lambda folder: None
    arguments: Sequence[str] = ()


CASES = [
    Case(
        "an unknown key in the file",
        ["'train.group_sise'", "4", "config.yaml", "Did you mean 'train.group_size'"],
        lambda f: text(f, "  group_size: 3", "  group_sise: 4"),
    ),
    Case(
        "an unknown key in an override",
        ["'rollout.limits.max_turn'", "3", "rollout.limits.max_turn=3", "Did you mean 'rollout.limits.max_turns'"],
        arguments=["rollout.limits.max_turn=3"],
    ),
    Case("a value of the wrong type", ["train.steps", "'many'"], arguments=["train.steps=many"]),
    Case("a missing data file", ["task.jsonl", "Did you mean 'tasks.jsonl'"], arguments=["data.train.files=task.jsonl"]),
    Case("a missing evaluation file", ["held_out.jsonl", "no file"], arguments=["evaluation.data.files=held_out.jsonl"]),
    Case("no tasks", ["data.train is not set", "name the tasks"], arguments=["data.train=null"]),
    Case("a row without a prompt", ["tasks.jsonl", "prompt"], lambda f: row(f, prompt=None)),
    Case(
        "an unknown interaction in a row",
        ["'mouse-1'", "Interaction 'couch' not found in interaction_map", "Did you mean 'coach'"],
        lambda f: row(f, extra_info={"interaction_kwargs": {"name": "couch"}}),
    ),
    Case(
        "an unknown tool in a row",
        ["'mouse-1'", "'shoot'", "Did you mean 'shout'"],
        lambda f: row(f, extra_info={"need_tools_kwargs": True, "tools_kwargs": {"shoot": {"create_kwargs": {}}}}),
    ),
    Case(
        "a list of interactions without class_name",
        ["interaction[0]", "class_name is None", "write the class as"],
        lambda f: text(f, 'class_name: "plugins.py:Coach", ', ""),
    ),
    Case(
        "a file of tools without class_name",
        ["tools.yaml", "class_name"],
        lambda f: file(f, "tools.yaml", "tools:\n  - config: {type: native}\n"),
        ["rollout.tools.file=tools.yaml"],
    ),
    Case(
        "a class that is not in its file",
        ["plugins.py", "'Couch'", "Did you mean 'Coach'"],
        lambda f: text(f, "plugins.py:Coach", "plugins.py:Couch"),
    ),
    Case(
        "a class whose module is missing",
        ["'nowhere.agents'", "cannot be imported", "check its spelling"],
        lambda f: text(f, "plugins.py:Coach", "nowhere.agents.Coach"),
    ),
    Case(
        "a function that is no tool",
        ["plugins.py:corpus", "@polyturn.tool"],
        arguments=["rollout.tools.functions=[plugins.py:corpus]"],
    ),
    Case(
        "a data_source without a reward",
        ["'tinny'", "reward.routes", "Did you mean 'tiny'"],
        lambda f: row(f, data_source="tinny"),
    ),
    Case(
        "a prompt longer than its limit",
        ["'mouse-1'", "tokens", "rollout.limits.max_prompt_tokens allows 320", "raise the limit"],
        lambda f: row(f, prompt=[{"role": "user", "content": "How loud is it? " * 40}]),
        ["rollout.limits.max_prompt_tokens=320"],
    ),
    Case(
        "a prompt longer than the context",
        ["'mouse-1'", "the model's context allows 447"],
        lambda f: row(f, prompt=[{"role": "user", "content": "How loud is it? " * 80}]),
    ),
    Case(
        "a template that cannot render tools",
        ["1 tool(s)", "chat template renders none", "use a template that does"],
        lambda f: file(
            f,
            "plain.jinja",
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ),
        ["model.chat_template=plain.jinja"],
    ),
    Case(
        "a template file that is missing",
        ["none.jinja", "model.chat_template"],
        arguments=["model.chat_template=none.jinja"],
    ),
    Case("both a path and an architecture", ["model.path", "model.init", "exactly one"], arguments=["model.path=there"]),
    Case("an unknown architecture", ["'qwen33'", "Did you mean"], arguments=["model.init.model_type=qwen33"]),
    Case(
        "more context than the model has positions",
        ["rollout.limits.max_context", "1000", "512", "lower it"],
        arguments=["rollout.limits.max_context=1000"],
    ),
    Case(
        "interactions that no row uses",
        ["rollout.interactions", "8 tasks of data.train", "drop rollout.interactions"],
        lambda f: all_rows(f, extra_info={}),
    ),
    Case(
        "a conversation that does not fit",
        ["conversation 0", "tokens", "rollout.limits.max_context"],
        lambda f: text(f, "How loud?", "How loud? " * 100, "conversations.jsonl"),
        ["warm_start.steps=2"],
    ),
    Case("nothing to resume from", ["no checkpoint", "checkpoints", "train without resume"], arguments=["--resume"]),
]


def check_one_sentence(err: str, says: Sequence[str]) -> None:
    shown = [line for line in err.splitlines() if line.strip() and not line.startswith("tiny: checking the configuration")]
    assert len(shown) == 1, err
    assert shown[0].startswith("polyturn: ") and "Traceback" not in err
    missing = [words for words in says if words not in shown[0]]
    assert not missing, f"{missing} not in {shown[0]!r}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_one_sentence_before_any_training(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def too_late(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("training time was spent before the problem was found")

    monkeypatch.setattr("polyturn.api.warm_starting.run_sft", too_late)
    monkeypatch.setattr("polyturn.training.loop.Trainer.run", too_late)
    config = write_tiny_run(tmp_path)
    case.change(tmp_path)
    called = call("train", config, *case.arguments)
    assert called.code == 2, called
    check_one_sentence(called.err, case.says)
    is_late = case.name == "a conversation that does not fit"  # it is encoded once the model is there
    assert (tmp_path / "runs").exists() == is_late


def test_a_missing_config_file_is_named_with_the_nearest_one(tmp_path: Path):
    write_tiny_run(tmp_path)
    called = call("train", tmp_path / "confg.yaml")
    assert called.code == 2
    check_one_sentence(called.err, ["confg.yaml", "does not exist", "Did you mean 'config.yaml'"])


def test_a_bad_evaluation_task_is_found_before_training_too(tmp_path: Path):
    config = write_tiny_run(tmp_path)
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"prompt": "How loud?", "data_source": "tinny"}) + "\n")
    called = call("train", config, "evaluation.data={files: held_out.jsonl}")
    assert called.code == 2 and not (tmp_path / "runs").exists()
    check_one_sentence(called.err, ["'tinny'", "Did you mean 'tiny'"])


def test_a_loss_that_is_not_finite_says_where_and_leaves_a_checkpoint_that_resumes(tmp_path: Path):
    config = write_tiny_run(tmp_path)
    with (tmp_path / "plugins.py").open("a") as plugins:
        plugins.write(
            "\n\nCALLS = []\n\n\ndef broken(logprobs_T, old_logprobs_T, advantages_T):\n"
            "    from polyturn.algorithms.losses import TokenLoss\n\n    CALLS.append(1)\n"
            "    return TokenLoss(logprobs_T * (float('nan') if len(CALLS) > 2 else -1.0), {})\n"
        )
    skips = "train.optim.max_skipped=1"
    called = call("train", config, "train.steps=6", skips, "algorithm.loss=plugins.py:broken")
    assert called.code == 2
    sentence = called.err.splitlines()[-1]
    assert sentence.startswith("polyturn: ") and "nan" in sentence and "Traceback" not in called.err
    run = tmp_path / "runs" / "tiny"
    latest = Checkpoints(run / "checkpoints").latest()
    assert latest is not None and latest.name == "step-000003", "one step was skipped, the next one ended the run"
    assert len(list(open_store(run).trajectories(split="train"))) == 18, "what was recorded is not lost"
    again = call("train", config, "train.steps=4", "--resume")
    assert again.code == 0, again.err


def test_failures_of_the_run_itself_are_one_sentence_too(tmp_path: Path):
    """An interaction that always raises ends the run with its reasons."""
    config = write_tiny_run(tmp_path)
    text(tmp_path, 'return False, "Say it again.", 0.5, {}', 'raise RuntimeError("no such room")', "plugins.py")
    with (tmp_path / "plugins.py").open("a") as plugins:
        plugins.write(
            "\n\nfrom polyturn.rollout.scheduler import MultiTurnScheduler\n\n\nclass Asks(MultiTurnScheduler):\n"
            "    def check_finished(self, episode, turn):\n        return None\n"
            "\n    async def step(self, episode, turn):\n        return await episode.ask_partner(turn)\n"
        )
    called = call("train", config, "rollout.scheduler=plugins.py:Asks", "train.steps=9", "evaluation.data=null")
    assert called.code == 2
    sentence = called.err.splitlines()[-1]
    assert "all 6 trajectories failed" in sentence and "no such room" in sentence
