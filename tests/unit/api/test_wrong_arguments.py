"""What somebody in a notebook gets wrong is one sentence with the right call in it, before anything is loaded."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyturn
from polyturn.api.event_loop import run_beside
from polyturn.api.given import GivenArguments, read
from polyturn.api.keywords import ELSEWHERE, OWN, path_of
from polyturn.api.ranks import this_rank
from polyturn.api.stepping import TrainingStep
from polyturn.config.models import RunConfig
from polyturn.config.schema import schema_table
from polyturn.core.lifecycle import StopReason
from polyturn.core.sample import SampleId, TrainSample
from polyturn.core.trajectory import Segment, Span, SpanSource, Trajectory, TrajectoryGroup
from polyturn.rewards.router import RewardRouter

ROWS = [{"prompt": "What is 1 + 1?", "ground_truth": "2"}]


class Customer(polyturn.BaseInteraction):
    async def generate_response(self, instance_id: str, messages: list[Any], **kwargs: Any) -> Any:
        return True, "", 0.0, {}


class Priced(Customer):
    def __init__(self, prices: dict[str, int]) -> None:
        super().__init__({})
        self.prices = prices


class Headless:
    """As transformers' AutoModel loads one."""

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


class Many:
    def __repr__(self) -> str:
        return "Many\nwith   lines"


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
    "an async function for tasks": ({"tasks": load}, ["tasks is async", "tasks=await load(…)"]),
    "an async generator": ({"tasks": stream}, ["tasks is async", "await stream(…)"]),
    "a generator used twice": ({"tasks": used_up()}, ["gives its rows once", "rows = list(…)", "tasks=rows"]),
    "a function with arguments": (
        {"tasks": of_split},
        ["of_split, which needs", "tasks=of_split(…)", "reward=of_split"],
    ),
    "a class for tasks": ({"tasks": polyturn.TaskDataset}, ["is the class TaskDataset", "tasks=TaskDataset(…)"]),
    "no rows": ({"tasks": []}, ["tasks has no row", "tasks=[{'prompt': '…'}]"]),
    "rows without a prompt": (
        {"tasks": [{"question": "1 + 1?", "answer": "2"}]},
        ["['question', 'answer']", "'prompt': row['question']"],
    ),
    "a data set without prompts": (
        {"tasks": Columns([{"question": "1 + 1?"}])},
        ["none of them is 'prompt'", "tasks=tasks.rename_column('question', 'prompt')"],
    ),
    "a data set with its splits": ({"tasks": {"train": ROWS, "test": ROWS}}, ["['test', 'train']", "give one split"]),
    "a row that is none": ({"tasks": [1, 2]}, ["first row 1", "{'prompt':"]),
    "a number for tasks": ({"tasks": 3}, ["tasks is 3", "path of a jsonl or parquet file"]),
    "no file of that name": ({"tasks": "nowhere.jsonl"}, ["nowhere.jsonl"]),
    "tasks for the evaluation": ({"eval_tasks": [{"problem": "?"}]}, ["eval_tasks has the columns", "row['problem']"]),
    "a class for the reward": ({"reward": Score}, ["reward is the class Score", "reward=Score(…)"]),
    "a list of rewards": (
        {"reward": [undescribed, undescribed]},
        ["is a list of 2", "reward=lambda trajectory: sum("],
    ),
    "a number for the reward": ({"reward": 1.0}, ["reward is 1.0", "reward=lambda trajectory: 1.0"]),
    "a class for a tool": ({"tools": [NoTool]}, ["tools[0] is the class NoTool", "NoTool(config, tool_schema)"]),
    "a function without a docstring": ({"tools": [undescribed]}, ["tool 'undescribed'", "no docstring"]),
    "a number for a tool": ({"tools": [3]}, ["tools[0] is 3", "tools=[price]"]),
    "a dict of tools": ({"tools": {"price": undescribed}}, ["tools is a dict", "tools=[price]"]),
    "a function for an interaction": ({"interaction": undescribed}, ["interaction is <function", "interaction=Customer"]),
    "a function for a scheduler": ({"scheduler": undescribed}, ["`step(self, episode, turn)`", "scheduler=MyScheduler"]),
    "a number for the engine": ({"engine": 3}, ["engine is 3", "engine='embedded', 'vllm' or 'sglang'"]),
    "an engine that is not": ({"engine": "vlm"}, ["engine.kind", "'vlm'", "vllm"]),
    "a number for the config": ({"config": 3}, ["config is 3", "the path of a YAML file"]),
    "a class for the model": ({"model": Score}, ["model is the class Score", "Score.from_pretrained("]),
    "a function for the model": ({"model": undescribed}, ["model is <function", "model='Qwen/Qwen3-0.6B'"]),
    "a misspelt keyword": ({"step": 3}, ["no keyword 'step'", "Did you mean 'steps'"]),
    "a misspelt argument": ({"interactions_": Customer}, ["no keyword 'interactions_'", "'interactions'"]),
    "another trainer's argument": ({"reward_funcs": [undescribed]}, ["no keyword 'reward_funcs'; write reward=right"]),
    "another trainer's setting": ({"num_generations": 8}, ["write group_size=8"]),
    "another trainer's adapters": ({"peft_config": 3}, ["write **{'model.lora.rank': 16}"]),
    "a keyword like no other": ({"zzz": 3}, ["no keyword 'zzz'. A keyword is one of model, tokenizer, tasks"]),
    "an object with methods for a tool": ({"tools": [Game()]}, ["is a Game; give methods of an object: tools=[it.guess]"]),
    "a partial for a tool": ({"tools": [functools.partial(of_split, "train")]}, ["which is no function", "tools=[price]"]),
    "a schema for a tool": ({"tools": [{"type": "function"}]}, ["which is no function", "tools=[price]"]),
    "an environment": ({"environment": Game}, ["no keyword 'environment'; write env=Game"]),
    "a data set": ({"dataset": ROWS}, ["no keyword 'dataset'; write tasks=dataset"]),
    "an object for an environment": ({"env": Game()}, ["is an object of Game; give the class, Game"]),
    "a class that is no environment": ({"env": Game}, ["Game defines `guess`, but an environment needs `reset`"]),
    "a number for a path": ({"out": None}, ["out is None", "must be a valid string"]),
    "part of a step": ({"steps": 1.5}, ["train.steps is 1.5", "must be a valid integer"]),
    "a rate below zero": ({"lr": -1}, ["train.optim.lr is -1", "must be greater than 0"]),
    "tasks before the model": (
        {"model": ROWS, "tasks": "tiny"},
        ["model is [{'prompt'", "model='Qwen/Qwen3-0.6B'"],
    ),
    "a set": ({"tasks": {"a", "b"}}, ["tasks is a set", "tasks=sorted(tasks)"]),
    "conversations for rows": (
        {"tasks": [[{"role": "user", "content": "1 + 1?"}]]},
        ["tasks=[{'prompt': messages} for messages in tasks]"],
    ),
    "a text for tasks": ({"tasks": "What is 1 + 1?"}, ["tasks is a text, 'What is 1 + 1?'", "tasks=[…]"]),
    "an empty text for tasks": ({"tasks": ""}, ["tasks is a text, ''", "tasks=[…]"]),
    "an empty text for the model": ({"model": " "}, ["model is ' '", "model='Qwen/Qwen3-0.6B'"]),
    "nearly another trainer's setting": ({"learn_rate": 1}, ["If you mean 'learning_rate', write lr=1e-6."]),
    "a table of text": ({"tasks": "rows.csv"}, ["jsonl or parquet", "tasks=pandas.read_csv('rows.csv')"]),
    "a name of several keys": (
        {"timeout_s": 3},
        ["may be any of rollout.limits.timeout_s, engine.timeout_s", "**{'rollout.limits.timeout_s': …}"],
    ),
    "the last name of a key deep down": ({"max_cooldown_s": 3}, ["no keyword 'max_cooldown_s'"]),
    "a retired key": ({"min_lr_ratio": 0.1}, ["no keyword 'min_lr_ratio' any more; write schedule: {name: cosine"]),
    "a value of another kind": ({"steps": "many"}, ["train.steps is 'many'"]),
    "a list for the model": ({"model": [Many()]}, ["model is [Many with lines]", "model='Qwen/Qwen3-0.6B'"]),
    "weights for the model": (
        {"model": {"embed.weight": np.zeros(2)}},
        ["model is a dict of weights", "model.load_state_dict(…)"],
    ),
    "no model": ({"model": None}, ["model is not given", "model='Qwen/Qwen3-0.6B'"]),
    "no tasks": ({"tasks": None}, ["data.train is not set", "in Python: tasks=rows"]),
    "a model without a head": (
        {"model": Headless()},
        ["Headless, which predicts no tokens", "AutoModelForCausalLM.from_pretrained("],
    ),
    "a class for the tokenizer": ({"tokenizer": Score}, ["tokenizer is the class Score", "Score.from_pretrained('…')"]),
    "a name in quotes for a tool": ({"tools": "price"}, ["tools[0] is the text 'price'", "without quotes: tools=[price]"]),
    "a name in quotes for an interaction": ({"interaction": "Customer"}, ["is the text 'Customer'", "interaction=Customer"]),
    "a class with methods for a tool": (
        {"tools": [Game]},
        ["is the class Game; give methods of an object", "tools=[it.guess]"],
    ),
    "an interaction for a tool": ({"tools": [Customer]}, ["Customer, which is no tool", "interaction=Customer"]),
    "a scheduler for a tool": (
        {"tools": [polyturn.MultiTurnScheduler()]},
        ["which is no tool", "scheduler=MultiTurnScheduler"],
    ),
    "a class with arguments of its own for an interaction": (
        {"interaction": Priced},
        ["the class Priced, which takes (prices)", "interaction=Priced(…)"],
    ),
    "a method of a class for a tool": ({"tools": [Game.guess]}, ["method of a class", "tools=[it.guess]"]),
    "a class of its own for an interaction": (
        {"interaction": Alone},
        ["Alone defines no `start_interaction`", "inherit polyturn.BaseInteraction, which has it"],
    ),
    "a dict of columns": (
        {"tasks": {"prompt": ["1 + 1?"], "ground_truth": ["2"]}},
        ["tasks is a dict of columns", "tasks=datasets.Dataset.from_dict(tasks)"],
    ),
    "rows that can only be iterated": (
        {"tasks": Stream()},
        ["a Stream, which has no length", "tasks=list(itertools.islice("],
    ),
    "rows of ShareGPT": (
        {"tasks": [{"conversations": [{"from": "human", "value": "1 + 1?"}]}]},
        ["This is ShareGPT's form: write 'messages' in place of 'conversations'"],
    ),
    "a folder to resume from": ({"resume": "runs/mine"}, ["resume is 'runs/mine'", "write resume=True"]),
    "no name": ({"name": ""}, ["name is ''", "out/name"]),
    "a whole key that is none": ({"rollout.limits.max_turn": 3}, ["rollout.limits.max_turn", "Did you mean"]),
}


@pytest.mark.parametrize("name", CASES)
def test_one_sentence_with_the_right_call_in_it(name: str) -> None:
    given, words = CASES[name]
    text = said(**given)
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: polyturn.rollout("tiny", ROWS, num_tasks="few"), "num_tasks is 'few'; give a number of tasks from 1 on"),
        (lambda: polyturn.rollout("tiny", ROWS, num_tasks=True), "num_tasks is True; give a number of tasks from 1 on"),
        (lambda: polyturn.rollout("tiny", ROWS, num_tasks=0), "num_tasks is 0; give a number of tasks from 1 on"),
        (lambda: polyturn.rollout("tiny", ROWS, resume=True), "'resume' is for polyturn.train"),
        (lambda: polyturn.evaluate("tiny", ROWS, eval_tasks=ROWS), "'eval_tasks' is for polyturn.train"),
        (lambda: polyturn.evaluate("tiny"), "evaluation.data is not set.*tasks=rows"),
        (lambda: polyturn.evaluate("tiny", [1]), r"^tasks has a first row 1; a row is a dict"),
        (lambda: polyturn.steps("tiny", config="Qwen/Qwen3-0.6B"), "a model is given as model='Qwen/Qwen3-0.6B'"),
        (lambda: polyturn.steps("nowhere.yaml"), "nowhere.yaml"),
        (lambda: polyturn.train("tiny", ROWS, Score()), r"^polyturn\.train takes .* by position, and 3 were given; name"),
    ],
)
def test_what_is_given_to_another_function_is_answered_too(call: Any, words: str) -> None:
    with pytest.raises(polyturn.PolyturnError, match=words):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run: run.filter(3), r"condition is 3; .*run\.filter\('reward < 1'\)"),
        (lambda run: run.filter(lambda t: t.reward < 1), r"condition is <function"),
        (lambda run: run.search(["lamp"]), r"is \['lamp'\]; write words"),
        (lambda run: run.trajectories[1.5], r"no trajectory 1\.5; give an id"),
        (lambda run: run.trajectories[0], r"no trajectory 0; .* below 0"),
        (lambda run: run.select(stp=3), r"no column 'stp'\. Did you mean 'step'"),
        (lambda run: polyturn.tiny(None), r"needs the name of a model: polyturn\.tiny\('Qwen/"),
        (lambda run: polyturn.tiny(), r"needs the name of a model: polyturn\.tiny\('Qwen/"),
    ],
)
def test_what_a_run_cannot_be_asked_is_one_sentence(call: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    run = polyturn.Run(tmp_path)
    assert run.trajectories[:3] == []
    with pytest.raises(polyturn.PolyturnError, match=words):
        call(run)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_another_trainer_calls_a_keyword_is_answered_with_keywords_that_there_are(name: str) -> None:
    """Each `key=` of the answer is an argument or a key of the configuration."""
    keys = re.findall(r"(?<![\w{])(\w+)=", ELSEWHERE[name])
    assert [key for key in keys if key not in OWN and path_of(key) is None] == []
    with pytest.raises(polyturn.ConfigError, match="; write "):
        path_of(name)


def test_a_traceback_ends_where_the_library_is_called() -> None:
    """With what a function of the caller's raised behind it, and no line of the library's own."""

    def source() -> Any:
        raise polyturn.DataError("the disk is not there") from OSError("not mounted")

    for given, of_caller, behind in (({"tasks": []}, [], "None"), ({"tasks": source}, ["source"], "not mounted")):
        with pytest.raises(polyturn.DataError) as caught:
            polyturn.train("tiny", **given)
        lines = [entry for entry in caught.traceback if "polyturn/api" not in str(entry.path)]
        assert [entry.name for entry in lines[1:]] == of_caller
        assert str(caught.value.__cause__) == behind


@pytest.mark.parametrize("what", ["tasks", "tools", "reward", "interaction", "scheduler", "model"])
def test_a_coroutine_that_nobody_awaited_is_named(what: str) -> None:
    given = load()
    text = said(**{what: [given] if what == "tools" else given})
    assert "load is async and was called without await" in text
    assert "=await load(…)" in text


def test_a_reward_with_other_arguments_is_told_which_there_are() -> None:
    def of_trl(completions: list[str], **kwargs: Any) -> list[float]:
        return [0.0 for _ in completions]

    with pytest.raises(polyturn.ConfigError, match=r"nothing is told under the name 'completions' .*'solution_strs'"):
        RewardRouter(function=of_trl)


def test_a_generator_is_read_once_and_kept() -> None:
    source, _ = read(GivenArguments(model="tiny", tasks=rows()))
    assert source.config.data.train is not None
    from polyturn.build import build_train_tasks

    assert [t.ground_truth for t in build_train_tasks(source)] == ["2"]
    assert [t.ground_truth for t in build_train_tasks(source)] == ["2"]


def test_a_number_of_numpy_is_the_number() -> None:
    source, _ = read(GivenArguments(model="tiny", tasks=ROWS, overrides={"steps": np.int64(3), "lr": np.float32(0.5)}))
    assert (source.config.train.steps, source.config.train.optim.lr) == (3, 0.5)


def _numbers() -> Iterator[str]:
    for row in schema_table(RunConfig):
        of_number = {"int", "float"} & set(row.type.split(" | ")) and not ({"<", "["} & set(row.key) or row.of)
        if of_number and row.default not in ("null", "required") and "str" not in row.type.split(" | "):
            yield row.key


def test_the_text_of_a_number_is_the_number_for_every_keyword() -> None:
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
    assert as_texts == as_numbers.model_copy(update={"data": as_texts.data})  # of which each has rows of its own


def test_a_run_for_the_model_means_its_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-00000{step}" / "model").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-00000{step}" / "model" / "config.json").touch()
    for model in (polyturn.Run(tmp_path), tmp_path, str(tmp_path)):
        source, _ = read(GivenArguments(model=model, tasks=ROWS))
        assert source.config.model.path == str(tmp_path / "checkpoints" / "step-000002" / "model")


@pytest.mark.parametrize("folder", [None, 3, b"runs/mine", ["runs/mine"], "runs/nowhere", __file__])
def test_what_is_no_folder_of_a_run_is_told_so(folder: Any) -> None:
    with pytest.raises(polyturn.DataError, match=r"runs/NAME"):
        polyturn.Run(folder)


def test_a_damaged_run_opens_and_each_thing_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
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


def test_a_resumed_run_takes_the_arguments_of_train_but_stays_where_it_is() -> None:
    given = GivenArguments(model="tiny", tasks=ROWS, overrides={"steps": 1, "lr": 0.5, "name": "mine"})
    changed = given.changed({"tasks": ["1 + 2?"], "reward": Score(), "steps": 2}, name="mine-2")
    assert (changed.tasks, type(changed.reward), changed.model) == (["1 + 2?"], Score, "tiny")
    assert changed.overrides == {"steps": 2, "lr": 0.5, "name": "mine-2"}
    for name in ("name", "out", "resume", "config"):
        with pytest.raises(polyturn.ConfigError, match=rf"so '{name}' cannot change; leave it out"):
            given.changed({name: "other"}, name="mine")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "a", "WORLD_SIZE": "2"}, "RANK=a and WORLD_SIZE=2, which are no rank and number of ranks"),
        ({"RANK": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK=3 .*which are no rank"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set; begin with torchrun"),
    ],
)
def test_half_a_launcher_is_told_what_begins_several_ranks(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(polyturn.ConfigError, match=words):
        this_rank()


def test_what_a_step_cannot_be_given_is_one_sentence() -> None:
    step = TrainingStep(1, [], [], {}, vocab_size=3)
    for name in ("groups", "samples", "advantages"):
        with pytest.raises(polyturn.ConfigError, match=rf"step\.{name} is a NoneType"):
            setattr(step, name, None)
    with pytest.raises(polyturn.ConfigError, match=r"step\.advantages has 1 entries and the step 0 samples"):
        step.advantages = [1.0]
    with pytest.raises(AttributeError, match="'advantage'"):
        step.advantage = []  # type: ignore[attr-defined]
    ids = np.arange(3, dtype=np.int32)
    sample = TrainSample(id=SampleId("g", "g/0", 0), token_ids=ids, loss_weights=np.ones(3, np.float32), turn_ids=ids)
    step = TrainingStep(1, [], [sample], {}, vocab_size=3)
    with pytest.raises(polyturn.ConfigError, match=r"step\.advantages\[0\] has the shape \(\) and its sample 3 tokens"):
        step.advantages = [1.0]
    for value in (np.nan, np.inf):
        with pytest.raises(polyturn.ConfigError, match=r"step 1 was given advantages with (nan|inf) at token 1 of .*g/0"):
            step.advantages = [[0.0, value, 0.0]]
        with pytest.raises(polyturn.ConfigError, match=r"step 1 was given loss_weights with (nan|inf) at token 0"):
            step.samples = [sample.replace(loss_weights=[value, 1.0, 1.0])]
    for unknown in (3, -1):
        with pytest.raises(polyturn.ConfigError, match=rf"step\.samples: .*g/0.* has the token id {unknown}.* from 0 to 2"):
            step.samples = [sample.replace(token_ids=[0, 1, unknown])]
        segment = Segment(spans=(Span(ids=[0, unknown], source=SpanSource.PROMPT),))
        odd = Trajectory(
            id="g/0", task=polyturn.Task(id="t", prompt=()), segments=(segment,), turns=(), stop_reason=StopReason.STOP
        )
        with pytest.raises(polyturn.ConfigError, match=rf"step\.groups: trajectory 'g/0' has the token id {unknown}"):
            step.groups = [TrajectoryGroup(id="g", task=polyturn.Task(id="t", prompt=()), trajectories=(odd,))]
    for temperature in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(polyturn.ConfigError, match=r"its temperature is .*; give a number above 0, and 1 for greedy"):
            sample.replace(temperature=temperature)
    for held in (step.samples, step.advantages, step.groups):
        assert isinstance(held, tuple), "one that is set in a list of its own would be lost"
    step.advantages = [np.zeros(3, np.float32)]


def test_a_step_is_not_given_a_group_twice() -> None:
    group = TrajectoryGroup(id="g", task=polyturn.Task(id="t", prompt=()), trajectories=())
    step = TrainingStep(1, [group], [], {}, vocab_size=3)
    with pytest.raises(polyturn.ConfigError, match=r"step\.groups has a group twice"):
        step.groups = [group, group]
    step.groups = [group]


def test_what_a_step_refused_does_not_count_as_set() -> None:
    step = TrainingStep(1, [], [], {}, vocab_size=3)
    with pytest.raises(polyturn.ConfigError, match=r"step\.groups has a int"):
        step.groups = [1]  # type: ignore[list-item]
    step.samples = []
    with pytest.raises(polyturn.ConfigError, match="step 1 has other samples already"):
        step.groups = []


def test_an_error_in_a_script_does_not_come_with_one_about_event_loops() -> None:
    with pytest.raises(polyturn.DataError) as told:
        run_beside(lambda signals: polyturn.Run("runs/nowhere"))
    assert told.value.__context__ is None
