"""A project's own reward manager: how a config builds it, and the data that it gets of a trajectory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from polyturn.compat import install
from polyturn.compat.verl.managed_reward import as_batch, score
from polyturn.compat.verl.reward_manager import NaiveRewardManager, register
from polyturn.compat.verl_config.compose import compose_name
from polyturn.compat.verl_config.translate import translate
from polyturn.config.translate.translation import Translation
from polyturn.core.errors import ConfigError
from polyturn.core.trajectory import Trajectory
from polyturn.infra.plugins import import_attr
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from polyturn.testing.tiny_models import tiny_tokenizer
from support.refusals import refuses, refuses_later

pytestmark = pytest.mark.timeout(300)  # the first test imports torch's compiler

MANAGER = """
import signal

from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager


async def judge(text, *, bonus=0.0):
    return len(text) + bonus


@register("talkative")
class Talkative(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source", per_char=1.0):
        self.compute_score, self.per_char = compute_score, per_char

    def __call__(self, data, return_dict=False):
        import asyncio
        import torch

        assert "rm_scores" not in data.batch.keys()
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for i, messages in enumerate(data.non_tensor_batch["messages"]):
            said = [m.content for m in messages["messages"] if m.role == "assistant"]
            rewards[i, -1] = asyncio.run(self.compute_score(said[-1])) * self.per_char
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        truths = data.non_tensor_batch["ground_truth"].tolist()
        return {"reward_tensor": rewards, "reward_extra_info": {"truth": truths}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    install("verl")
    (tmp_path / "manager.py").write_text(MANAGER)
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "manager.py"


async def finished() -> Trajectory:
    context = scripted_context(["#### 5", "#### 4"], interactions={"gsm8k": Gsm8kInteraction({"name": "gsm8k"})})
    return await run_episode(context, task(interaction="gsm8k"), id="g0/0", seed=1)


async def test_manager_scores_a_trajectory_and_reports(file: Path) -> None:
    trajectory = await finished()
    row = as_batch(trajectory)
    assert len(row) == 1 and row.non_tensor_batch["ground_truth"][0] == trajectory.task.ground_truth
    assert row.non_tensor_batch["data_source"][0] == trajectory.task.data_source

    def call() -> dict[str, Any]:
        of = {"manager": "talkative", "function": f"{file}:judge", "tokenizer": str(file.parent / "model")}
        return score(trajectory, **of, manager_kwargs={"per_char": 0.5}, function_kwargs={"bonus": 4.0})

    assert await asyncio.to_thread(call) == {"score": 5.0, "truth": trajectory.task.ground_truth}


def translated(*overrides: str) -> Translation:
    required = ["actor_rollout_ref.model.path=m", "data.train_files=a.parquet", "data.val_files=null"]
    return translate(compose_name("ppo_trainer", folder=None, overrides=[*required, *overrides]))


@pytest.mark.parametrize("where", ["{file}", "file://{file}", "pkg://judges.of_mine"])
def test_config_names_a_manager_that_a_file_registers(where: str, file: Path) -> None:
    path = f"custom_reward_function.path={where.format(file=file)}"
    more = ["reward_model.reward_manager=talkative", "+reward_model.reward_kwargs.per_char=2"]
    function = translated(path, "custom_reward_function.name=judge", *more).native["reward"]["function"]
    assert function["name"] == "polyturn.compat.verl.managed_reward:score"
    assert function["function"] in (f"{file}:judge", "judges.of_mine:judge")
    assert function["manager_kwargs"] == {"per_char": 2}


def test_forking_agent_loop_has_room_for_its_forks(tmp_path: Path) -> None:
    rollout = "actor_rollout_ref.rollout"
    (tmp_path / "agents.yaml").write_text("- {name: forks, _target_: forks.Loop}\n")
    turns = [f"{rollout}.multi_turn.{key}" for key in ("enable=True", "max_assistant_turns=3", "max_user_turns=2")]
    turns += [f"{rollout}.multi_turn.num_repeat_rollouts=3", "data.max_response_length=100"]
    native = translated(*turns, f"{rollout}.agent.agent_loop_config_path={tmp_path / 'agents.yaml'}").native["rollout"]
    limits = native["limits"]
    assert (limits["max_turns"], limits["max_user_turns"], limits["max_tokens"]) == (12, 8, 400)
    assert limits["max_tokens_per_turn"] == 100
    config = native["scheduler_kwargs"]["config"]["actor_rollout_ref"]["rollout"]["multi_turn"]
    assert (config["num_repeat_rollouts"], config["max_assistant_turns"]) == (3, 3)


def test_mended_file_registers_its_manager_again(file: Path) -> None:
    broken = file.with_name("broken.py")
    broken.write_text(MANAGER.replace("talkative", "mended") + "\nraise RuntimeError('no key')\n")
    refuses(lambda: import_attr(f"{broken}:judge"), ConfigError, "no key")
    broken.write_text(MANAGER.replace("talkative", "mended"))
    import_attr(f"{broken}:judge")
    refuses(lambda: register("mended")(NaiveRewardManager), ConfigError, "already been registered")


OF_ROWS = """
import signal

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.abstract import AbstractRewardManager


class Single(RewardManagerBase):
    def __init__(self, config, tokenizer, compute_score, reward_router_address, reward_model_tokenizer, bonus=0.0):
        super().__init__(config, tokenizer, compute_score)
        self.bonus = bonus

    async def run_single(self, data):
        text = [m.content for m in data[0].non_tensor_batch["messages"]["messages"] if m.role == "assistant"][-1]
        score = await self.loop.run_in_executor(None, lambda: float(len(text)) + self.bonus)
        return {"reward_score": score, "reward_extra_info": {"n": self.config.actor_rollout_ref.rollout.n}}


class Naive(NaiveRewardManager):
    async def run_single(self, data):
        found = await super().run_single(data)
        return {**found, "reward_score": found["reward_score"] + 10}


class Once(RewardManagerBase):
    async def run_single(self, data):
        return {"reward_score": 1.0, "reward_extra_info": {"made": id(self)}}


class Batch(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source"):
        self.compute_score = compute_score

    def __call__(self, data, return_dict=False):
        import torch
        return {"reward_tensor": torch.ones(len(data), 3), "reward_extra_info": {"late": []}}


class Bare:
    __init__ = Batch.__init__
    __call__ = Batch.__call__


class Neither:
    pass


async def half(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.5, "seen": "#### 4" in solution_str}


def signals(data_source, solution_str, ground_truth, extra_info=None, **more):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return {"score": 0.5, **more}
"""


def imported(cls: str, file: object, *more: str, at: str = "reward_manager") -> dict[str, Any]:
    """Return the reward function of a config that takes the manager from a file."""
    overrides = [f"{at}.source=importlib", f"{at}.name={cls}", f"{at}.module.path={file}", *more]
    return translated(*overrides).native["reward"]["function"]


@pytest.mark.parametrize(
    ("cls", "of", "found"),
    [
        ("Single", "file", {"score": 6.0, "n": 8}),
        ("Naive", "file", {"score": 10.5, "seen": True}),
        ("Batch", "verl", {"score": 3.0, "late": None}),
        ("Bare", "verl", {"score": 3.0, "late": None}),
    ],
)
async def test_manager_of_a_file_scores_rows_or_batches(cls: str, of: str, found: dict[str, Any], file: Path) -> None:
    managers = file.with_name(f"{cls}_{of}.py")
    managers.write_text(OF_ROWS)
    model = f"actor_rollout_ref.model.path={file.parent / 'model'}"
    more = [f"custom_reward_function.path={managers}", "custom_reward_function.name=half"] if of == "file" else []
    more += ["+reward_model.reward_kwargs.bonus=0.0"] if cls == "Single" else []
    given = imported(cls, managers, model, "actor_rollout_ref.rollout.n=8", *more)
    trajectory = await finished()
    del given["name"]
    assert await asyncio.to_thread(lambda: score(trajectory, **given)) == found


async def test_function_of_a_row_manager_may_use_signals(file: Path) -> None:
    rows = file.with_name("signals.py")
    rows.write_text(OF_ROWS)
    trajectory, model = await finished(), str(file.parent / "model")
    of = {"manager": f"{rows}:Naive", "function": f"{rows}:signals", "tokenizer": model, "function_kwargs": {"bound": 2}}
    assert await asyncio.to_thread(lambda: score(trajectory, **of)) == {"score": 10.5, "bound": 2}


async def test_concurrent_calls_share_a_manager(file: Path) -> None:
    slow = file.with_name("once.py")
    slow.write_text(OF_ROWS.replace("class Once", "import time; time.sleep(0.05)\n\n\nclass Once"))
    trajectory = await finished()
    of = {"manager": f"{slow}:Once", "tokenizer": str(file.parent / "model")}
    found = await asyncio.gather(*(asyncio.to_thread(score, trajectory, **of) for _ in range(8)))
    assert len({one["made"] for one in found}) == 1


async def test_manager_of_neither_kind_is_refused(file: Path) -> None:
    (file.parent / "neither.py").write_text(OF_ROWS)
    given = imported("Neither", file.parent / "neither.py", f"actor_rollout_ref.model.path={file.parent / 'model'}")
    trajectory = await finished()
    del given["name"]
    await refuses_later(
        lambda: asyncio.to_thread(lambda: score(trajectory, **given)), ConfigError, "is not a reward manager; inherit"
    )


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["reward_model.reward_manager=talkativ"], "'talkativ'"),
        (["reward_model.reward_manager=talkativ", "custom_reward_function.path={file}"], "'talkativ'"),
        *[
            ([f"{at}.{override}" for override in overrides], names)
            for at in ("reward_manager", "reward.reward_manager")
            for overrides, names in (
                (["source=importlib", "name=Talkativ", "module.path={file}"], "'Talkative'"),
                (["source=importlib", "name=Talkative", "module.path=nowhere.py"], r"nowhere\.py"),
                (["source=importlib"], "file"),
                (["source=import"], "'importlib'"),
            )
        ],
    ],
)
def test_missing_manager_is_named(overrides: list[str], names: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=names):
        translated(*(override.format(file=file) for override in overrides))


def test_reward_loop_keys_name_a_manager(file: Path) -> None:
    keys = ("source=importlib", f"module_path={file}", "class_name=Talkative")
    native = translated(*(f"+reward_model.reward_loop_{key}" for key in keys)).native
    assert native["reward"]["function"]["manager"] == f"{file}:Talkative"
    notices = translated(f"reward_manager.module.path={file}").notices()
    assert any(line.startswith("reward_manager.module.path: ignored") for line in notices)
