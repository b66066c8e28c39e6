"""A wrong argument in a notebook is one sentence with the right call in it, before anything is loaded."""

from __future__ import annotations

import functools
import json
import re
import shlex
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import polyturn
from polyturn.api.given import GivenArguments, read
from polyturn.api.keywords import OWN, path_of
from polyturn.api.signals import Signals, run_beside
from polyturn.api.stepping import StepHooks, TrainingStep
from polyturn.build import build_eval_sets, build_train_tasks
from polyturn.config.models import RunConfig
from polyturn.config.schema import schema_table
from polyturn.config.well_known import WELL_KNOWN
from polyturn.core.lifecycle import StopReason
from polyturn.core.sample import SampleId, TrainSample
from polyturn.core.trajectory import Segment, Span, SpanSource, Trajectory, TrajectoryGroup
from polyturn.data.conversations import generate_conversations
from polyturn.rewards.router import RewardRouter
from support.refusals import refuses

ROWS = [{"prompt": "What is 1 + 1?", "ground_truth": "2"}]


class Customer(polyturn.BaseInteraction):
    async def generate_response(self, instance_id: str, messages: list[Any], **kwargs: Any) -> Any:
        return True, "", 0.0, {}


class Priced(Customer):
    def __init__(self, prices: dict[str, int]) -> None:
        super().__init__({})
        self.prices = prices


class Headless:
    """A model without a head, as transformers' AutoModel loads it."""

    config = save_pretrained = None

    def get_output_embeddings(self) -> None:
        return None


class Score:
    def __call__(self, trajectory: Any) -> float:
        return 0.0


class Game:
    """Has a method that a model may call."""

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The number.
        """
        return str(number)


class NoTool(polyturn.BaseTool):
    pass


class Columns(list[Any]):
    """Rows with columns, as a data set of Hugging Face has."""

    def rename_column(self, old: str, new: str) -> None:
        raise NotImplementedError


class Alone:
    async def generate_response(self, instance_id: str, messages: list[Any], **kwargs: Any) -> Any:
        return True, "", 0.0, {}


class Stream:
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(ROWS)


async def load() -> list[dict[str, Any]]:
    return ROWS


async def stream() -> Any:
    yield ROWS[0]


def rows() -> Iterator[dict[str, Any]]:
    yield from ROWS


def of_split(split: str) -> list[dict[str, Any]]:
    return ROWS


def undescribed(item: str) -> str:
    return item


def said(**given: Any) -> str:
    with pytest.raises(polyturn.PolyturnError) as caught:
        polyturn.train(**{"model": "tiny", "tasks": ROWS, **given})
    text = str(caught.value)
    assert "\n" not in text, "one sentence"
    return text


def used_up() -> Iterator[dict[str, Any]]:
    made = rows()
    list(made)
    return made


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    # tasks
    "async function": ({"tasks": load}, ["tasks is async", "tasks=await load(…)"]),
    "async generator": ({"tasks": stream}, ["tasks is async", "await stream(…)"]),
    "generator used twice": ({"tasks": used_up()}, ["once", "tasks=rows"]),
    "function with arguments": ({"tasks": of_split}, ["of_split", "tasks=of_split(…)"]),
    "class": ({"tasks": polyturn.TaskDataset}, ["class TaskDataset", "tasks=TaskDataset(…)"]),
    "no rows": ({"tasks": []}, ["tasks has no row"]),
    "rows without a prompt": ({"tasks": [{"question": "?", "answer": "2"}]}, ["'question'", "'prompt': row['question']"]),
    "columns without a prompt": ({"tasks": Columns([{"question": "?"}])}, ["rename_column('question', 'prompt')"]),
    "splits": ({"tasks": {"train": ROWS, "test": ROWS}}, ["['test', 'train']"]),
    "dict of columns": ({"tasks": {"prompt": ["?"], "ground_truth": ["2"]}}, ["Dataset.from_dict(tasks)"]),
    "conversations": ({"tasks": [[{"role": "user", "content": "?"}]]}, ["{'prompt': messages} for messages in tasks"]),
    "ShareGPT": ({"tasks": [{"conversations": [{"from": "human", "value": "?"}]}]}, ["ShareGPT", "'messages'"]),
    "rows without a length": ({"tasks": Stream()}, ["Stream", "tasks=list(itertools.islice("]),
    "number": ({"tasks": 3}, ["tasks is 3", "jsonl or parquet"]),
    "set": ({"tasks": {"a", "b"}}, ["tasks is a set", "tasks=sorted(tasks)"]),
    "missing file": ({"tasks": "nowhere.jsonl"}, ["nowhere.jsonl"]),
    "csv with spaces": ({"tasks": "my big data/rows.csv"}, ["pandas.read_csv('my big data/rows.csv')"]),
    "csv": ({"tasks": "rows.csv"}, ["pandas.read_csv('rows.csv')"]),
    "text": ({"tasks": "What is 1 + 1?"}, ["'What is 1 + 1?'", "tasks=[…]"]),
    "none": ({"tasks": None}, ["data.train is not set", "tasks=rows"]),
    "eval_tasks": ({"eval_tasks": [{"problem": "?"}]}, ["eval_tasks", "row['problem']"]),
    # model, tokenizer, engine, config
    "function for the model": ({"model": undescribed}, ["model is <function", "model='Qwen/Qwen3-0.6B'"]),
    "class for the model": ({"model": Score}, ["class Score", "Score.from_pretrained("]),
    "weights for the model": ({"model": {"embed.weight": np.zeros(2)}}, ["dict of weights", "load_state_dict(…)"]),
    "model without a head": ({"model": Headless()}, ["Headless", "AutoModelForCausalLM.from_pretrained("]),
    "no model": ({"model": None}, ["model is not given"]),
    "unknown engine": ({"engine": "vlm"}, ["engine.kind", "'vlm'", "vllm"]),
    "number for the config": ({"config": 3}, ["config is 3", "YAML"]),
    "folder to resume from": ({"resume": "runs/mine"}, ["resume is 'runs/mine'", "resume=True"]),
    # reward, tools, interaction, scheduler, environment
    "class for the reward": ({"reward": Score}, ["class Score", "reward=Score(…)"]),
    "list of rewards": ({"reward": [undescribed, undescribed]}, ["list of 2", "lambda trajectory: sum("]),
    "number for the reward": ({"reward": 1.0}, ["reward is 1.0", "lambda trajectory: 1.0"]),
    "class for a tool": ({"tools": [NoTool]}, ["tools[0]", "NoTool(config, tool_schema)"]),
    "tool without a docstring": ({"tools": [undescribed]}, ["'undescribed'", "docstring"]),
    "partial for a tool": ({"tools": [functools.partial(of_split, "train")]}, ["not a function", "tools=[price]"]),
    "name for a tool": ({"tools": "price"}, ["'price'", "without quotes and without a call: tools=[price]"]),
    "object for a tool": ({"tools": [Game()]}, ["a Game", "tools=[it.guess]"]),
    "class with methods for a tool": ({"tools": [Game]}, ["class Game", "tools=[it.guess]"]),
    "method of a class for a tool": ({"tools": [Game.guess]}, ["method of a class", "tools=[it.guess]"]),
    "interaction for a tool": ({"tools": [Customer]}, ["not a tool", "interaction=Customer"]),
    "scheduler for a tool": ({"tools": [polyturn.MultiTurnScheduler()]}, ["not a tool", "scheduler=MultiTurnScheduler"]),
    "function for an interaction": ({"interaction": undescribed}, ["interaction is <function", "interaction=Customer"]),
    "interaction with arguments": ({"interaction": Priced}, ["(prices)", "interaction=Priced(…)"]),
    "entry without a class": ({"interaction": [{"name": "shop"}]}, ["'name': 'shop'", "class_name", "interaction=Customer"]),
    "class without a base": ({"interaction": Alone}, ["`start_interaction`", "polyturn.BaseInteraction"]),
    "function for a scheduler": ({"scheduler": undescribed}, ["scheduler", "scheduler=MyScheduler"]),
    "object for an environment": ({"env": Game()}, ["object of Game"]),
    "class that is not an environment": ({"env": Game}, ["`guess`", "`reset`"]),
    "async callback": ({"on_step": load}, ["on_step must not be async", "def on_step(step, metrics)"]),
    "callback without arguments": ({"on_step": lambda: None}, ["on_step", "def on_step(step, metrics)"]),
    "async callback of a dry run": ({"on_step": load, "dry_run": True}, ["on_step must not be async"]),
    "text for a callback": ({"on_step": "print"}, ["on_step is 'print'"]),
    "no conversation": ({"warm_start": {"conversations": []}}, ["warm_start.conversations has no row"]),
    "row that is not a conversation": (
        {"warm_start": {"conversations": [{"prompt": 3}]}},
        ["warm_start.conversations[0]", "messages"],
    ),
    "row without a prompt in evaluation": ({"evaluation": {"data": [{"question": "?"}]}}, ["evaluation.data", "'question'"]),
    # keywords
    "misspelt keyword": ({"step": 3}, ["'step'", "'steps'"]),
    "keyword like no other": ({"zzz": 3}, ["'zzz'", "model, tokenizer, tasks"]),
    "misspelt key": ({"rollout.limits.max_turn": 3}, ["rollout.limits.max_turn", "Did you mean"]),
    "another trainer's argument": ({"reward_funcs": [undescribed]}, ["'reward_funcs'", "reward=my_reward"]),
    "name of several keys": ({"timeout_s": 3}, ["rollout.limits.timeout_s, engine.timeout_s"]),
    "last name of a deep key": ({"max_cooldown_s": 3}, ["'max_cooldown_s'"]),
    "retired key": ({"reasoning_parser": "qwen3"}, ["'reasoning_parser'", "rollout.parser.reasoning"]),
    "wrong value": ({"steps": "many"}, ["train.steps is 'many'"]),
    "two values of a key": (
        {"steps": 5, "train.steps": 10},
        ["'steps' sets train.steps to 5, and 'train.steps' to 10"],
    ),
    "section with another value": (
        {"steps": 2, "train": {"steps": 1}},
        ["'train' sets train.steps to 1, and 'steps' to 2"],
    ),
    "no name": ({"name": ""}, ["name is ''", "out/name"]),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_argument_is_one_sentence_with_the_right_call(name: str) -> None:
    given, words = CASES[name]
    text = said(**given)
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: polyturn.rollout("tiny", ROWS, num_tasks="few"), "num_tasks is 'few'; give a number of at least 1"),
        (lambda: polyturn.rollout("tiny", ROWS, num_tasks=True), "num_tasks is True; give a number of at least 1"),
        (lambda: polyturn.rollout("tiny", ROWS, num_tasks=0), "num_tasks is 0; give a number of at least 1"),
        (lambda: polyturn.rollout("tiny", ROWS, resume=True), "'resume' is for polyturn.train"),
        (lambda: polyturn.evaluate("tiny", ROWS, eval_tasks=ROWS), "'eval_tasks' is for polyturn.train"),
        (lambda: polyturn.evaluate("tiny"), "evaluation.data is not set.*tasks=rows"),
        (lambda: polyturn.evaluate("tiny", [1]), r"^the first row of tasks is 1; a row must be a dict"),
        (lambda: polyturn.steps("tiny", config="Qwen/Qwen3-0.6B"), "to pass a model, write model='Qwen/Qwen3-0.6B'"),
        (lambda: polyturn.steps("nowhere.yaml"), "nowhere.yaml"),
        (lambda: polyturn.train("tiny", ROWS, Score()), r"^polyturn\.train takes .* by position, and got 3 arguments; name"),
    ],
)
def test_other_functions_answer_too(call: Any, words: str) -> None:
    with pytest.raises(polyturn.PolyturnError, match=words):
        call()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": 0.8}, "temperature does not change it; write sets={'greedy': {'sampling': {'temperature': 0.8}}}"),
        ({"rollout": {"sampling": {"top_p": 0.5}}}, "rollout does not change it; write sets={'greedy': {'sampling': "),
        ({"sets": {"warm": {}}, "top_k": 2}, "top_k does not change it; write sets={'warm': {'sampling': {'top_k': 2}}}"),
        ({"max_turns": 2, "rollout": {"max_concurrent": 2}}, ""),
    ],
)
def test_evaluation_warns_of_the_sampling_of_training(
    given: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with pytest.raises(polyturn.PolyturnError):
        polyturn.evaluate(tmp_path / "nowhere", ROWS, **given)
    assert words in caplog.text
    assert words or "does not change" not in caplog.text


def test_missing_cells_of_a_frame_are_missing_values() -> None:
    frame = pytest.importorskip("pandas").DataFrame(
        [{"prompt": "a", "interaction": "x"}, {"prompt": "b", "ground_truth": 1}]
    )
    source, _ = read(GivenArguments(model="tiny", tasks=frame))
    first, second = build_train_tasks(source)
    assert (first.ground_truth, second.ground_truth, second.interaction) == (None, 1, None)


def test_polars_frame_is_read_as_rows() -> None:
    class Frame:
        """The methods of polars.DataFrame that tell it from a pandas frame, which has no `to_dicts`."""

        columns = ("prompt", "ground_truth")

        def to_dict(self) -> dict[str, list[object]]:
            return {"prompt": ["a", "b"], "ground_truth": [None, 1]}

        def to_dicts(self) -> list[dict[str, object]]:
            return [{"prompt": "a", "ground_truth": None}, {"prompt": "b", "ground_truth": 1}]

        def __getitem__(self, name: str) -> list[object]:
            return self.to_dict()[name]

        def __len__(self) -> int:
            return 2

    source, _ = read(GivenArguments(model="tiny", tasks=Frame()))
    assert [one.ground_truth for one in build_train_tasks(source)] == [None, 1]


@pytest.mark.parametrize("pattern", ["*.jsonl", ["row?.jsonl"], "*"])
def test_pattern_of_tasks_is_of_a_folder_with_brackets(
    pattern: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs [1]"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    monkeypatch.chdir(folder)
    source, _ = read(GivenArguments(model="tiny", tasks=pattern))
    assert len(build_train_tasks(source)) == 1


def test_path_of_tasks_may_have_spaces(tmp_path: Path) -> None:
    path = tmp_path / "a folder with spaces" / "rows.jsonl"
    source, _ = read(GivenArguments(model="tiny", tasks=str(path)))
    assert source.config.data.train is not None
    assert source.config.data.train.files == str(path)


@pytest.mark.parametrize("given", [{"train.group_size": 2, "train.passes": 2}, {"train": {"group_size": 2, "passes": 2}}])
def test_rollout_warns_only_of_keys_that_it_does_not_read(
    given: dict[str, Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with pytest.raises(polyturn.PolyturnError):
        polyturn.rollout(tmp_path / "nowhere", ROWS, **given)
    assert "so train.passes has no effect" in caplog.text


@pytest.mark.parametrize("given", [{"group_size": 4}, {"train.group_size": 4}, {"train": {"group_size": 4}}])
def test_rollout_takes_the_group_size_of_any_keyword(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes: list[int] = []

    def record(source: Any, resolved: Any, **options: Any) -> Any:
        sizes.append(source.config.train.group_size)
        raise polyturn.ConfigError("recorded")

    monkeypatch.setattr("polyturn.api.rolling.roll_out", record)
    refuses(lambda: polyturn.rollout("tiny", ROWS, **given), polyturn.ConfigError, "recorded")
    assert sizes == [4]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run: run.filter(3), r"condition is 3; .*run\.filter\('reward < 1'\)"),
        (lambda run: run.filter(lambda t: t.reward < 1), r"condition is <function"),
        (lambda run: run.search(["lamp"]), r"is \['lamp'\]; use words"),
        (lambda run: run.trajectories[1.5], r"no trajectory 1\.5; the run has none yet"),
        (lambda run: run.trajectories[0], r"no trajectory 0; the run has none yet"),
        (lambda run: run.select(stp=3), r"no column 'stp'\. Did you mean 'step'"),
        (lambda run: polyturn.tiny(None), r"needs the name of a model: polyturn\.tiny\('Qwen/"),
        (lambda run: polyturn.tiny(), r"needs the name of a model: polyturn\.tiny\('Qwen/"),
    ],
)
def test_wrong_question_to_a_run_is_one_sentence(call: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    run = polyturn.Run(tmp_path)
    assert run.trajectories[:3] == []
    with pytest.raises(polyturn.PolyturnError, match=words):
        call(run)


@pytest.mark.parametrize("name", WELL_KNOWN)
def test_keyword_of_another_trainer_leads_to_ours(name: str) -> None:
    """Each `key=` of the answer is an argument or a key of the configuration."""
    with pytest.raises(polyturn.ConfigError, match="; write ") as caught:
        path_of(name, 3)
    answer = str(caught.value).partition("; write ")[2]
    keys = re.findall(r"(?<![\w{'.])(\w+)=", answer)
    assert [key for key in keys if key not in (*OWN, "on_step") and path_of(key) is None] == []
    whole = {row.key for row in schema_table(RunConfig)}
    assert set(re.findall(r"\*\*\{'([\w.]+)'", answer)) <= whole
    assert set(WELL_KNOWN[name].keys) <= whole


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("learning_rate", 3e-5, "write lr=3e-05"),
        ("beta", 0.1, r"write \*\*\{'algorithm.kl.coef': 0.1\}"),
        ("max_steps", 3, "write steps=3"),
        ("num_generation", 4, "'num_generations', write group_size=4"),
        ("batch_size", 8, r"groups_per_step=8 or group_size=8 or .*'warm_start.batch_size': 8"),
        ("eval_every", 5, r"'evaluation.every': 5"),
        ("replicass", 5, r"'engine.launch.replicas'"),
    ],
)
def test_answer_to_a_keyword_has_the_users_value(name: str, value: Any, answer: str) -> None:
    with pytest.raises(polyturn.ConfigError, match=answer):
        path_of(name, value)


def test_all_wrong_keywords_are_reported_together() -> None:
    with pytest.raises(polyturn.ConfigError) as caught:
        polyturn.train("tiny", [{"prompt": "2+2?"}], num_generations=4, steps=3, learning_rate=1e-5)
    lines = str(caught.value).splitlines()
    assert ["group_size=4" in lines[0], "lr=1e-05" in lines[1], len(lines)] == [True, True, 2]


def test_traceback_ends_at_the_call_of_the_library() -> None:
    """It ends with the error of the caller's function, without a line of the library."""

    def source() -> Any:
        raise polyturn.DataError("the disk is not there") from OSError("not mounted")

    for given, of_caller, behind in (({"tasks": []}, [], "None"), ({"tasks": source}, ["source"], "not mounted")):
        with pytest.raises(polyturn.DataError) as caught:
            polyturn.train("tiny", **given)
        lines = [entry for entry in caught.traceback if "polyturn/api" not in str(entry.path)]
        assert [entry.name for entry in lines[1:]] == of_caller
        assert str(caught.value.__cause__) == behind


@pytest.mark.parametrize("what", ["tasks", "tools", "reward", "interaction", "scheduler", "model"])
def test_coroutine_without_await_is_named(what: str) -> None:
    given = load()
    text = said(**{what: [given] if what == "tools" else given})
    assert "load is async and was called without await" in text
    assert "=await load(…)" in text


def test_reward_with_other_arguments_is_refused() -> None:
    def of_trl(completions: list[str], **kwargs: Any) -> list[float]:
        return [0.0 for _ in completions]

    with pytest.raises(polyturn.ConfigError, match=r"no argument has the name 'completions' .*'solution_strs'"):
        RewardRouter(function=of_trl)


def test_generator_is_read_once_and_kept() -> None:
    source, _ = read(GivenArguments(model="tiny", tasks=rows()))
    assert source.config.data.train is not None
    assert [t.ground_truth for t in build_train_tasks(source)] == ["2"]
    assert [t.ground_truth for t in build_train_tasks(source)] == ["2"]


@pytest.mark.parametrize("key", ["conversations", "warm_start.conversations", "warm_start"])
def test_rows_may_stand_for_conversations(key: str) -> None:
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}] * 2
    given = {"conversations": rows} if key == "warm_start" else rows
    source, _ = read(GivenArguments(model="tiny", tasks=ROWS, overrides={key: given, "warm_start.steps": 1}))
    path = source.config.warm_start.conversations
    assert path is not None
    assert [len(one.messages) for one in generate_conversations(path)] == [2, 2]


def test_rows_may_stand_for_a_section_of_tasks() -> None:
    given = {"evaluation.data": ROWS, "data": {"train": ROWS}}
    source, _ = read(GivenArguments(model="tiny", overrides=given))
    assert [task.ground_truth for task in build_train_tasks(source)] == ["2"]
    assert [task.ground_truth for one in build_eval_sets(source) for task in one.tasks] == ["2"]


def test_text_that_can_be_no_path_is_a_name() -> None:
    for name in ("~nobodyhere/x", "x" * 300):
        source, _ = read(GivenArguments(model=name, tasks=name))
        assert source.config.model.path == name
        assert source.config.data.train is not None and source.config.data.train.dataset == name


def test_section_of_an_engine_may_have_paths() -> None:
    engine = {"kind": "vllm", "launch": {"python": Path("/opt/python")}}
    config: Any = read(GivenArguments(model="tiny", tasks=ROWS, engine=engine))[0].config
    assert config.engine.launch.python == "/opt/python"


def test_interaction_needs_no_config() -> None:
    assert Customer().config == {}
    source, _ = read(GivenArguments(model="tiny", tasks=ROWS, interaction=Customer()))
    assert source.config.rollout.interactions


@pytest.mark.parametrize("key", [None, "alice"])
def test_section_of_an_interaction_gets_its_name(key: str | None) -> None:
    section = {"class_name": "shop.sales.Customer"}
    source, _ = read(GivenArguments(model="tiny", tasks=ROWS, interaction=section if key is None else {key: section}))
    assert source.config.data.train.interaction == (key or "customer")


def test_number_of_numpy_is_the_number() -> None:
    source, _ = read(GivenArguments(model="tiny", tasks=ROWS, overrides={"steps": np.int64(3), "lr": np.float32(0.5)}))
    assert (source.config.train.steps, source.config.train.optim.lr) == (3, 0.5)


def _numbers() -> Iterator[str]:
    for row in schema_table(RunConfig):
        of_number = {"int", "float"} & set(row.type.split(" | ")) and not ({"<", "["} & set(row.key) or row.of)
        if of_number and row.default not in ("null", "required") and "str" not in row.type.split(" | "):
            yield row.key


def test_text_of_a_number_is_the_number() -> None:
    """As YAML and the environment have them: `steps=os.environ["STEPS"]`."""
    of_numbers = set(_numbers())
    defaults = {row.key: json.loads(row.default) for row in schema_table(RunConfig) if row.key in of_numbers}
    numbers = {key: value for key, value in defaults.items() if isinstance(value, int | float)}
    assert len(numbers) > 50
    given = {"model": "tiny", "tasks": ROWS}
    as_numbers, as_texts = (
        read(GivenArguments(**given, overrides=values))[0].config
        for values in (numbers, {key: str(value) for key, value in numbers.items()})
    )
    assert as_texts == as_numbers.model_copy(update={"data": as_texts.data})  # their rows differ


def test_run_as_a_model_means_its_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-00000{step}" / "model").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-00000{step}" / "model" / "config.json").touch()
    for model in (polyturn.Run(tmp_path), tmp_path, str(tmp_path)):
        source, _ = read(GivenArguments(model=model, tasks=ROWS))
        assert source.config.model.path == str(tmp_path / "checkpoints" / "step-000002" / "model")


@pytest.mark.parametrize("folder", [None, 3, b"runs/mine", ["runs/mine"], "runs/nowhere", __file__])
def test_folder_without_a_run_is_refused(folder: Any) -> None:
    refuses(lambda: polyturn.Run(folder), polyturn.DataError, "runs/NAME")


def test_damaged_run_opens_and_each_read_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train: [1, {\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss/total": 2.0}\n{"step": 2, "loss')
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "part-000001.parquet").write_bytes(b"PAR1 and no more")
    run = polyturn.Run(tmp_path)
    assert (len(run), run.metrics["step"], list(run.problems)) == (0, [1], ["part-000001.parquet"])
    reads = (lambda: run.config, run.model, run.tokenizer, lambda: run.trajectories["g1/0"], run.resume)
    wanted = ("config.yaml cannot be read", "no model in", "no tokenizer", "no trajectory", "resume=True")
    for read_it, says in zip(reads, wanted, strict=True):
        with pytest.raises(polyturn.PolyturnError, match=says) as told:
            read_it()
        assert "\n" not in str(told.value)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(polyturn.DataError, match=r"config\.yaml cannot be read"):
        _ = polyturn.Run(tmp_path).config


def test_resumed_run_takes_arguments_and_keeps_its_place() -> None:
    given = GivenArguments(model="tiny", tasks=ROWS, overrides={"steps": 1, "lr": 0.5, "name": "mine"})
    changed = given.changed({"tasks": ["1 + 2?"], "reward": Score(), "steps": 2}, name="mine-2")
    assert (changed.tasks, type(changed.reward), changed.model) == (["1 + 2?"], Score, "tiny")
    again = changed.changed({"train": {"steps": 3}}, name="mine-2")
    for arguments, steps in (changed, 2), (again, 3):
        config = read(arguments)[0].config
        assert (config.train.steps, config.train.optim.lr, config.name) == (steps, 0.5, "mine-2")
    for name in ("name", "out", "resume", "config"):
        with pytest.raises(polyturn.ConfigError, match=rf"so '{name}' cannot change; remove it"):
            given.changed({name: "other"}, name="mine")


def test_resumed_run_takes_another_callback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    calls: list[str] = []

    def run_training(source: Any, resolved: Any, options: Any) -> Any:
        options.on_step(1, {})
        return SimpleNamespace(folder=tmp_path, model=None)

    monkeypatch.setattr("polyturn.api.training.run_training", run_training)
    run = polyturn.train("tiny", ROWS, out=str(tmp_path.parent), on_step=lambda step, metrics: calls.append("first"))
    run.resume(on_step=lambda step, metrics: calls.append("second")).resume()
    assert calls == ["first", "second", "second"]


def test_line_that_says_how_to_view_a_run_quotes_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    (folder / "config.yaml").touch()
    finished = SimpleNamespace(folder=folder, model=None)
    monkeypatch.setattr("polyturn.api.training.run_training", lambda *_: finished)
    with caplog.at_level("INFO", logger="polyturn"):
        polyturn.train("tiny", ROWS, out=str(tmp_path))
    (line,) = [line for line in caplog.messages if "polyturn view" in line]
    assert shlex.split(line.partition("in a shell: ")[2]) == ["polyturn", "view", str(folder)]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_every_rank_of_torchrun_is_refused(rank: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = {"model": str(tmp_path / "none"), "tasks": ROWS, "reward": Score(), "out": str(tmp_path)}
    words = rf"RANK={rank} and WORLD_SIZE=2.*--nproc N.*ranks=N.*--ray.*unset WORLD_SIZE"
    for train in (
        polyturn.train,
        functools.partial(polyturn.train, dry_run=True),
        lambda **given: list(polyturn.steps(**given)),
    ):
        with pytest.raises(polyturn.ConfigError, match=words):
            train(**arguments)
    monkeypatch.setenv("WORLD_SIZE", "1")
    refuses(lambda: polyturn.train(**arguments), polyturn.ConfigError, "none")


IDS = np.arange(3, dtype=np.int32)
SAMPLE = TrainSample(id=SampleId("g", "g/0", 0), token_ids=IDS, loss_weights=np.ones(3, np.float32), turn_ids=IDS)
GROUP = TrajectoryGroup(id="g", task=polyturn.Task(id="t", prompt=()), trajectories=())


def group_of(token: int) -> TrajectoryGroup:
    """Return a group whose one trajectory has this token."""
    segment = Segment(spans=(Span(ids=[0, token], source=SpanSource.PROMPT),))
    member = Trajectory(id="g/0", task=GROUP.task, segments=(segment,), turns=(), stop_reason=StopReason.STOP)
    return TrajectoryGroup(id="g", task=GROUP.task, trajectories=(member,))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        *((name, None, rf"step\.{name} .*NoneType") for name in ("groups", "samples", "advantages")),
        ("groups", [1], r"step\.groups .*int"),
        ("groups", [GROUP, GROUP], r"step\.groups .*twice"),
        ("groups", [group_of(3)], r"step\.groups: .*'g/0'.* 3"),
        ("groups", [group_of(-1)], r"step\.groups: .*'g/0'.* -1"),
        ("samples", [SAMPLE.replace(token_ids=[0, 1, 3])], r"step\.samples: .*g/0.* 3.* from 0 to 2"),
        ("samples", [SAMPLE.replace(loss_weights=[np.nan, 1.0, 1.0])], r"loss_weights with nan at token 0"),
        ("advantages", [1.0, 1.0], r"step\.advantages has 2 entries .* 1 samples"),
        ("advantages", [1.0], r"step\.advantages\[0\] .*\(\).* 3 tokens"),
        ("advantages", [[0.0, np.inf, 0.0]], r"advantages with inf at token 1 of .*g/0"),
    ],
)
def test_step_refuses_wrong_data(name: str, value: Any, says: str) -> None:
    step = TrainingStep(1, [], [SAMPLE], {}, vocab_size=3)
    with pytest.raises(polyturn.ConfigError, match=says):
        setattr(step, name, value)


def test_step_keeps_what_it_was_given() -> None:
    step = TrainingStep(1, [GROUP], [SAMPLE], {}, vocab_size=3)
    for held in (step.samples, step.advantages, step.groups):
        assert isinstance(held, tuple), "one that is set in a list of its own would be lost"
    step.advantages = [np.zeros(3, np.float32)]
    with pytest.raises(AttributeError, match="'advantage'"):
        step.advantage = []  # type: ignore[attr-defined]
    for temperature in (0.0, np.nan):
        with pytest.raises(polyturn.ConfigError, match="temperature"):
            SAMPLE.replace(temperature=temperature)


def test_refused_data_does_not_count_as_set() -> None:
    step = TrainingStep(1, [], [], {}, vocab_size=3)
    with pytest.raises(polyturn.ConfigError, match=r"step\.groups"):
        step.groups = [1]  # type: ignore[list-item]
    step.samples = []
    with pytest.raises(polyturn.ConfigError, match="step 1 already has new samples"):
        step.groups = []


async def test_interrupt_reaches_a_run_that_still_loads() -> None:
    came = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        is_waiting = any(each.f_code.co_name == "wait_for" for each, _ in traceback.walk_stack(frame))
        if is_waiting and not came.is_set():
            came.set()
            raise KeyboardInterrupt

    def work(signals: Callable[[], Signals]) -> set[int]:
        while not came.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        run, noted = signals(), threading.Event()
        run.on_signal = noted.set
        assert run.received or noted.wait(30)
        return set(run.received)

    former = signal.signal(signal.SIGINT, on_interrupt)
    try:
        assert run_beside(work) == {signal.SIGINT}
    finally:
        signal.signal(signal.SIGINT, former)


def test_steps_that_are_left_end_a_run_that_still_loads() -> None:
    hooks = StepHooks()
    hooks.stop()
    assert hooks.signals().received == [signal.SIGTERM]


def test_error_in_a_script_has_no_context_of_event_loops() -> None:
    with pytest.raises(polyturn.DataError) as told:
        run_beside(lambda signals: polyturn.Run("runs/nowhere"))
    assert told.value.__context__ is None
