"""From a config to live objects: the use of each setting, and refused ones."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from polyturn import build
from polyturn.algorithms.advantages import grpo
from polyturn.build.model import build_codec, build_media, build_outline
from polyturn.build.parts import build_scheduler
from polyturn.cli.main import main
from polyturn.core.errors import ConfigError, DataError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.task import InteractionRef, Task
from polyturn.core.trajectory import Trajectory
from polyturn.infra.live import LiveObject
from polyturn.rollout.limits import ContextPolicy
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.tracking.jsonl import read_metrics
from polyturn.training.observer import RunObserver
from support.refusals import refuses
from support.runs import call_command, tiny_source, write_tiny_run


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> build.Parts:
    return build.build_parts(
        tiny_source(
            tmp_path_factory.mktemp("parts"),
            "rollout.limits.context_policy=drop_oldest",
            "rollout.limits.timeout_s=7",
            "rollout.sampling.temperature=0.7",
            "rollout.sanity_every=3",
            "rollout.tools.max_parallel_calls=2",
        )
    )


def test_rollout_gets_the_settings_of_the_config(parts: build.Parts):
    context = parts.context
    assert (context.limits.max_turns, context.limits.max_context, context.limits.timeout_s) == (2, 448, 7.0)
    assert context.limits.context_policy is ContextPolicy.DROP_OLDEST
    assert (context.sampling.temperature, context.sampling.max_tokens) == (0.7, 6)
    assert set(context.tools.tools) == {"shout"} and context.tools.options.max_parallel_calls == 2
    assert set(context.interactions) == {"coach"}
    assert type(context.scheduler) is MultiTurnScheduler and context.sanity_every == 3
    assert parts.template.renders_tools


def test_own_processor_that_raises_is_a_sentence(parts: build.Parts, tmp_path: Path):
    source = tiny_source(tmp_path, "model.processor=looks.py:make")
    (tmp_path / "looks.py").write_text("def make(tokenizer):\n    raise RuntimeError('on fire')\n")
    refuses(lambda: build_media(source, parts.context.codec, None), ConfigError, "looks.py:make", "on fire", "line 2")


def test_rollout_workers_share_max_concurrent(parts: build.Parts, tmp_path: Path):
    several = tiny_source(tmp_path, "cluster.workers.count=3", "rollout.max_concurrent=8")
    pool = build.with_workers(dataclasses.replace(parts, source=several)).pool
    workers = [pickle.loads(worker._build).args[0].config for worker in pool._workers.values()]
    assert [(one.rollout.max_concurrent, one.cluster.workers.count) for one in workers] == [(3, 1)] * 3


def test_run_without_workers_takes_min_concurrent(tmp_path: Path):
    called = call_command(main, "train", write_tiny_run(tmp_path), "rollout.min_concurrent=2", "train.steps=1")
    assert called.code == 0, called.err
    assert any("rollout/concurrency" in row for row in read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl"))


def test_rollout_workers_refuse_min_concurrent(parts: build.Parts, tmp_path: Path):
    several = tiny_source(tmp_path, "cluster.workers.count=3", "rollout.min_concurrent=8")
    refuses(
        lambda: build.with_workers(dataclasses.replace(parts, source=several)), ConfigError, "rollout.min_concurrent is 8"
    )


def test_engine_samples_from_the_trainers_tensors(parts: build.Parts, tmp_path: Path):
    tasks = build.build_run_tasks(parts.source)
    trainer = build.build_trainer(parts, tasks, folder=tmp_path, observer=RunObserver(tmp_path, total_steps=1))
    mine = dict(parts.model.named_parameters())
    assert trainer.policy.backend.model is parts.model  # type: ignore[attr-defined]
    served = dict(parts.engine.module.named_parameters())
    assert {name: value.data_ptr() for name, value in served.items()} == {n: v.data_ptr() for n, v in mine.items()}
    assert trainer.settings.train.steps == 3


def test_seed_decides_the_model(tmp_path: Path, parts: build.Parts):
    def first(seed: int) -> torch.Tensor:
        where = tiny_source(tmp_path, f"seed={seed}")
        return next(build.build_model(where, parts.tokenizer).parameters())

    assert torch.equal(first(0), first(0)) and not torch.equal(first(0), first(1))


def test_saved_tokenizer_has_the_template_of_the_run(tmp_path: Path):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    codec = build.build_codec(tiny_source(tmp_path, "model.chat_template=own.jinja"))
    codec.tokenizer.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == (tmp_path / "own.jinja").read_text()


def test_scheduler_may_be_an_own_class(tmp_path: Path):
    where = tiny_source(tmp_path, "rollout.scheduler=plugins.py:Quiet")
    with (tmp_path / "plugins.py").open("a") as file:
        file.write(
            "\n\nfrom polyturn.rollout.scheduler import MultiTurnScheduler\n\n\nclass Quiet(MultiTurnScheduler):\n    pass\n"
        )
    assert type(build.build_scheduler(where)).__name__ == "Quiet"
    with pytest.raises(ConfigError, match="MultiTurnScheduler"):
        build.build_scheduler(
            build.ConfigSource(config=tiny_source(tmp_path, "rollout.scheduler=plugins.py:corpus").config, base=tmp_path)
        )


async def test_rewards_are_those_of_the_config(tmp_path: Path):
    where = tiny_source(
        tmp_path,
        "reward.function={name: 'plugins.py:fixed', value: 0.5}",
        "reward.routes={tiny: tools}",
        "reward.overlong={buffer: 10, max_tokens: 20}",
        "reward.rate={max_concurrent: 1, tokens_per_minute: 6000000}",
        "reward.text=turns",
    )
    with (tmp_path / "plugins.py").open("a") as file:
        file.write("\n\ndef fixed(data_source, solution_str, ground_truth, extra_info, value):\n    return value\n")
    router = build.build_rewarder(where)
    made = Trajectory(id="t/0", task=user("?", data_source="any"), segments=(), turns=(), stop_reason=StopReason.STOP)
    assert (await router.score(made)).components == {"outcome": 0.5, "tool_step": 0.0, "overlong": 0.0}
    assert router.route("tiny") == "tools"
    refuses(
        lambda: build.build_rewarder(tiny_source(tmp_path, "reward.overlong.buffer=10")),
        ConfigError,
        "set reward.overlong.max_tokens",
    )


def test_estimators_get_their_options(tmp_path: Path):
    bound = build.build_estimator(tiny_source(tmp_path, "algorithm.advantage.norm_by_std=false"))
    assert isinstance(bound, functools.partial) and bound.func is grpo and bound.keywords == {"norm_by_std": False}


def test_evaluation_sets_keep_order_sampling_and_limits(tmp_path: Path):
    sets = (
        "evaluation.sets={a: {sampling: {temperature: 0}}, "
        "b: {sampling: {temperature: 1, top_p: 0.9}, max_turns: 1, every: false}}"
    )
    a, b = build.build_eval_sets(tiny_source(tmp_path, sets))
    assert (a.name, a.sampling.temperature, a.max_turns, a.is_periodic) == ("a", 0, None, True)
    assert (b.name, b.sampling.top_p, b.max_turns, b.is_periodic) == ("b", 0.9, 1, False)
    assert len(a.tasks) == 2
    assert build.build_eval_sets(tiny_source(tmp_path, "evaluation.data=null")) == []


def test_evaluation_sets_without_tasks_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    build.build_run_tasks(tiny_source(tmp_path, "evaluation.data=null"))
    assert not caplog.messages
    build.build_run_tasks(tiny_source(tmp_path, "evaluation.data=null", "evaluation.sets={eight: {samples: 8}}"))
    (message,) = caplog.messages
    assert all(word in message for word in ("'eight'", "evaluation.sets", "set evaluation.data"))


def test_generator_may_make_the_tasks(tmp_path: Path):
    where = tiny_source(tmp_path, "data.train={files: null, generator: 'plugins.py:made', kwargs: {num: 3}}")
    with (tmp_path / "plugins.py").open("a") as file:
        file.write(
            "\n\ndef made(num):\n    return [polyturn.Task(id=str(i), prompt=(polyturn.Message(role='user', content='?'),)) "
            "for i in range(num)]\n"
        )
    assert [t.id for t in build.build_run_tasks(where).train] == ["0", "1", "2"]


def user(text: str, **fields: Any) -> Task:
    return Task(**{"id": "t0", "prompt": (Message(role="user", content=text),), "data_source": "tiny", **fields})


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (user("?", tools=("shoot",)), r"'t0' .*'shoot'.*'shout'"),
        (user("?", data_source="other"), "'other'"),
        (user("a b " * 300), r"'t0'.* 447"),
        (user("a \ud83d b"), r"'t0'.* half of a surrogate pair, '\\ud83d'"),
        (user("?", data_source=None, tools=()), "'t0'"),
    ],
)
def test_tasks_that_cannot_run_are_refused(parts: build.Parts, task: Task, says: str):
    with pytest.raises((DataError, ConfigError), match=says):
        build.check_run(parts, [task], name="data.train")


def test_unused_interactions_or_tools_are_refused(parts: build.Parts):
    alone, talking = user("?"), user("?", interaction=InteractionRef(name="coach"))
    toolless = [dataclasses.replace(t, id=f"n{i}", tools=()) for i, t in enumerate((alone, talking))]
    refuses(lambda: build.check_run(parts, [alone], name="data.train"), ConfigError, "data.train")
    refuses(lambda: build.check_run(parts, toolless, name="data.train"), ConfigError, "rollout.tools", "'shout'")
    misspelt = [dataclasses.replace(talking, tools=("shuot",), skips_unknown_tools=True)]
    refuses(lambda: build.check_run(parts, misspelt, name="data.train"), ConfigError, "'shuot'", "Did you mean 'shout'?")
    build.check_run(parts, [talking, *toolless], name="mixed tasks")


TIPS = f"{Path(__file__).parents[2] / 'examples/schedulers/thinking_tips.py'}:ThinkingTips"


@pytest.mark.parametrize(("name", "key"), [("black_box", "agent"), (TIPS, "judge")], ids=["black_box", "thinking_tips"])
def test_function_of_a_program_reaches_the_scheduler(parts: build.Parts, name: str, key: str):
    async def function() -> float:
        return 0.0

    kwargs = {"scheduler": name, "scheduler_kwargs": {key: LiveObject(function)}}
    rollout = parts.source.config.rollout.model_copy(update=kwargs)
    config = parts.source.config.model_copy(update={"rollout": rollout})
    scheduler = build_scheduler(dataclasses.replace(parts.source, config=config))
    assert any(value is function for value in vars(scheduler).values()), vars(scheduler)


def test_one_task_that_uses_an_interaction_is_enough(parts: build.Parts):
    held_out = dataclasses.replace(build.build_eval_sets(parts.source)[0], tasks=[user("?")])
    talking = user("?", interaction=InteractionRef(name="coach"))
    build.check_training(parts, build.RunTasks(train=[talking], eval_sets=[held_out]))
    with pytest.raises(ConfigError, match=r"data.train and evaluation.data"):
        build.check_training(parts, build.RunTasks(train=[user("?")], eval_sets=[held_out]))


def test_training_on_greedy_completions_is_warned_of(tmp_path: Path, parts: build.Parts, caplog: pytest.LogCaptureFixture):
    tasks = build.RunTasks(train=[user("?", interaction=InteractionRef(name="coach"))], eval_sets=[])
    build.check_training(parts, tasks)
    assert "temperature" not in caplog.text
    greedy = dataclasses.replace(parts, source=tiny_source(tmp_path, "rollout.sampling.temperature=0"))
    build.check_training(greedy, tasks)
    assert "rollout.sampling.temperature is 0: the members of a group repeat each other" in caplog.text


def test_prompts_that_end_with_an_answer_are_counted(parts: build.Parts, caplog: pytest.LogCaptureFixture):
    coach = {"interaction": InteractionRef(name="coach")}
    answer = Message(role="assistant", content="4")
    tasks = [user("?", **coach), *(user("?", **coach, id=name, prompt=(answer,)) for name in ("t1", "t2"))]
    build.check_run(parts, tasks[:1], name="data.train")
    assert not caplog.messages
    build.check_run(parts, tasks, name="data.train")
    (message,) = caplog.messages
    assert all(word in message for word in ("data.train", "2 of 3", "assistant", "'t1'"))


def test_prompt_length_is_checked_to_the_token(parts: build.Parts):
    """Length is counted in tokens of the rendered prompt, exactly, where bytes alone cannot tell."""

    def num_tokens(task: Task) -> int:
        return len(parts.context.encoder_for(task).start(task.prompt))

    fitting = next(t for n in range(600) if num_tokens(t := user("9" * n)) == parts.max_context - 1)
    coach = {"interaction": build.build_run_tasks(parts.source).train[0].interaction}
    build.check_run(parts, [user(fitting.prompt[0].text, **coach)], name="x")
    refuses(lambda: build.check_run(parts, [user(fitting.prompt[0].text + "9", **coach)], name="x"), DataError, "limit")


def test_short_prompt_is_checked_without_encoding(tmp_path: Path, parts: build.Parts, monkeypatch: pytest.MonkeyPatch):
    rows = [{"prompt": f"How loud is mouse {i}?", "data_source": "tiny", "interaction": "coach"} for i in range(100)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    where = tiny_source(tmp_path, "data.train.files=many.jsonl")
    tasks = build.build_run_tasks(where)
    monkeypatch.setattr(type(parts.context.codec), "encode", lambda *args: pytest.fail("a short prompt was encoded"))
    build.check_run(parts, tasks.eval_sets[0].tasks, name="evaluation.data")
    build.check_run(parts, list(tasks.train), name="data.train")


@pytest.mark.parametrize(
    ("gpu", "dtype", "expected"),
    [
        (None, "auto", torch.float32),
        (None, "bfloat16", torch.bfloat16),
        ("old", "auto", torch.float32),
        ("new", "auto", torch.bfloat16),
        ("new", "float32", torch.float32),
    ],
)
def test_parameters_are_bfloat16_where_the_gpu_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: str | None, dtype: str, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: gpu == "new")
    config = tiny_source(tmp_path, f"model.dtype={dtype}")
    assert build_outline(config, build_codec(config).tokenizer).dtype == expected


def test_gpu_without_bfloat16_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    config = tiny_source(tmp_path, "model.dtype=bfloat16")
    refuses(lambda: build_outline(config, build_codec(config).tokenizer), ConfigError, "Tesla T4", "model.dtype=float32")
