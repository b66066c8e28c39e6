"""A project as its owner would bring it: tools and interactions of several releases of verl, an estimator and a loss.

Nothing in it was written for this library; a tiny run starts from its own script. tests/unit/compat/test_from_config.py
trains with an agent loop.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import polyturn.compat
from polyturn.store.stored_run import open_store
from support.models import write_brief_model
from support.runs import trained_steps

TOOLS = '''
from typing import Any, Optional, Tuple
from uuid import uuid4

from transformers.utils import get_json_schema
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import gsm8k
from verl.utils.rollout_trace import rollout_trace_op


class CalcTool(BaseTool):
    """The first releases: create returns a string, execute a text and no numbers."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}

    async def create(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs) -> str:
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth}
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], scale=1, **kwargs) -> Tuple[str, float, dict]:
        self._instance_dict[instance_id]["response"] = "#### " + str(parameters.get("answer", ""))
        return f"scale={scale}", None, None

    async def calc_reward(self, instance_id: str, bonus=0.0, **kwargs) -> float:
        d = self._instance_dict[instance_id]
        return bonus + gsm8k.compute_score(d["response"], d["ground_truth"], method="flexible", format_score=0.0, score=1.0)

    async def release(self, instance_id: str, why=None, **kwargs) -> None:
        assert why == "end"
        del self._instance_dict[instance_id]


class LookupTool(BaseTool):
    """Later releases: nested create_kwargs, ToolResponse, the schema from a method, agent_data."""

    def __init__(self, config, tool_schema=None):
        super().__init__(config, tool_schema)
        self._d = {}

    def lookup(self, key: str) -> str:
        """Look a number up.

        Args:
            key: The name.
        """
        return "7"

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema(**get_json_schema(self.lookup))

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self._d[instance_id] = kwargs.get("create_kwargs", {})["ground_truth"]
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        return ToolResponse(text=self.lookup(**parameters)), 0.1, {"ok": kwargs["agent_data"] is not None}

    async def release(self, instance_id: str, **kwargs) -> None:
        self._d.pop(instance_id)
'''
INTERACTIONS = '''
from verl.interactions.base import BaseInteraction


class NaggingInteraction(BaseInteraction):
    """The first release: no ids where it scores and ends."""

    async def generate_response(self, instance_id, messages, **kwargs):
        return False, "try again " + kwargs["ground_truth"], await self.calculate_score(), {}

    async def calculate_score(self):
        return 0.25

    async def finalize_interaction(self):
        pass


class StepsInteraction(BaseInteraction):
    def __init__(self, config):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self._instance_dict[instance_id] = {"attempts": 0}
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        instance = self._instance_dict[instance_id]
        instance["attempts"] += 1
        return instance["attempts"] == 2, "Good attempt.", await self.calculate_score(instance_id), {}

    async def calculate_score(self, instance_id, **kwargs):
        return 0.1 * self._instance_dict[instance_id]["attempts"]

    async def finalize_interaction(self, instance_id, **kwargs):
        del self._instance_dict[instance_id]
'''
MAIN = """
from collections import defaultdict

import torch
import verl.utils.torch_functional as verl_F
from verl.trainer.main_ppo import main
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss


@register_adv_est("my_grpo")
def my_grpo(token_level_rewards, response_mask, index, config=None, **kwargs):
    scores = token_level_rewards.sum(-1)
    groups = defaultdict(list)
    for i in range(len(index)):
        groups[index[i]].append(scores[i])
    found = torch.stack([scores[i] - torch.stack(groups[index[i]]).mean() for i in range(len(index))])
    return found.unsqueeze(-1) * response_mask, found.unsqueeze(-1) * response_mask


@register_policy_loss("my_loss")
def my_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **kwargs):
    ratio = torch.exp(log_prob - old_log_prob).clamp(max=1 + config.clip_ratio_high)
    kl = verl_F.masked_mean(old_log_prob - log_prob, response_mask)
    loss = agg_loss(loss_mat=-advantages * ratio, loss_mask=response_mask, loss_agg_mode=loss_agg_mode)
    return loss, {"actor/my_kl": kl.detach().item()}


if __name__ == "__main__":
    main()
"""
REWARD = """
def many(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    with open("calls.txt", "a") as file:
        file.write(f"{len(solution_strs)}\\n")
    return [len(set(s)) / 100 for s in solution_strs]
"""
TOOL_FILE = """
tools:
  - class_name: "outsider.tools.CalcTool"
    config: {}
    tool_schema:
      type: "function"
      function:
        name: "calc"
        description: "Check an answer."
        parameters: {type: object, properties: {answer: {type: string, description: The answer.}}, required: [answer]}
  - class_name: "outsider.tools.LookupTool"
    config: {type: native}
"""
INTERACTION_FILE = """
interaction:
  - {name: nagging, class_name: outsider.interactions.NaggingInteraction, config: {}}
  - {class_name: outsider.interactions.StepsInteraction, config: {}}
"""
CONFIG = """
hydra:
  searchpath: ["file://verl/trainer/config"]
defaults: [ppo_trainer, _self_]
data: {max_prompt_length: 1024, max_response_length: 96, train_batch_size: 256, return_raw_chat: True}
actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: sglang
    multi_turn: {enable: True, max_assistant_turns: 3, max_user_turns: 3}
"""
KWARGS = {
    "calc": {"calc_reward_kwargs": {"bonus": 0.5}, "execute_kwargs": {"scale": 2}, "release_kwargs": {"why": "end"}},
    "lookup": {},
}


def row(i: int) -> dict[str, Any]:
    """Return a row of the project: the tools and the interactions take turns."""
    name = ("calc", "lookup")[i % 2]
    extra = {
        "split": "train",
        "index": i,
        "need_tools_kwargs": True,
        "tools_kwargs": {name: {"create_kwargs": {"ground_truth": str(i)}, **KWARGS[name]}},
        "interaction_kwargs": {"name": ("nagging", "steps")[i % 2], "query": f"{i}?", "ground_truth": str(i)},
    }
    prompt = [{"role": "system", "content": "Answer #### <answer>."}, {"role": "user", "content": f"What is {i}?"}]
    truth = {"style": "rule", "ground_truth": str(i)}
    return {"data_source": "mine/sums", "prompt": prompt, "reward_model": truth, "extra_info": extra}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the project's folder, which is the working directory."""
    write_brief_model(tmp_path / "model")
    files = {
        "outsider/__init__.py": "",
        "outsider/tools.py": TOOLS,
        "outsider/interactions.py": INTERACTIONS,
        "main_mine.py": MAIN,
        "reward.py": REWARD,
        "tools.yaml": TOOL_FILE,
        "interactions.yaml": INTERACTION_FILE,
        "config/mine.yaml": CONFIG,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    pq.write_table(pa.Table.from_pylist([row(i) for i in range(4)]), tmp_path / "train.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert polyturn.compat.install("verl")
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_script_trains_with_the_loss_it_registers(project: Path, monkeypatch: pytest.MonkeyPatch):
    turns = "actor_rollout_ref.rollout.multi_turn"
    command = [
        *("main_mine.py", f"--config-path={project / 'config'}", "--config-name=mine"),
        f"actor_rollout_ref.model.path={project / 'model'}",
        f"data.train_files={project / 'train.parquet'}",
        f"data.val_files={project / 'train.parquet'}",
        *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2"),
        f"{turns}.tool_config_path={project / 'tools.yaml'}",
        f"{turns}.interaction_config_path={project / 'interactions.yaml'}",
        f"custom_reward_function.path={project / 'reward.py'}",
        *("custom_reward_function.name=many", "reward_model.reward_manager=batch"),
        *("trainer.total_training_steps=1", "trainer.val_before_train=False", "data.val_max_samples=1"),
        *("trainer.logger=[console,wandb]", "trainer.n_gpus_per_node=8", f"trainer.default_local_dir={project / 'out'}"),
        *("algorithm.adv_estimator=my_grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=my_loss"),
    ]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path("main_mine.py", run_name="__main__")
    (metrics,) = trained_steps(project / "out")
    assert "policy/actor/my_kl" in metrics
    assert metrics["loss/policy"] != 0
    found = list(open_store(project / "out").trajectories(split="train"))
    assert [t.error for t in found] == [None] * 8
    assert {t.task.tools for t in found} == {("calc",), ("lookup",)}
    assert {t.reward.components.get("tool/calc") for t in found if t.reward} == {0.5, None}
    scores = {t.task.interaction.name: t.turn_scores for t in found if t.task.interaction and len(t.turn_scores) > 1}
    assert scores["nagging"][:2] == (0.25, 0.25)
    assert scores["steps"] == (0.1, 0.2)
    assert (project / "calls.txt").read_text().split() == ["8", "1"], "a step's trajectories in one call, then validation's"
