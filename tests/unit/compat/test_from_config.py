"""A configuration names an agent loop and an estimator that were written for verl, in files of the user's, and trains."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from polyturn import build
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.rollout.run_episode import run_episode
from polyturn.training.observer import RunObserver
from support.runs import write_tiny_run

pytestmark = pytest.mark.timeout(300)  # a test trains a step

LOOP = """
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput, register


@register("mine")
class Mine(AgentLoopBase):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.response_length = self.config.actor_rollout_ref.rollout.response_length

    async def run(self, sampling_params, **kwargs):
        ids = self.tokenizer.apply_chat_template(list(kwargs["raw_prompt"]), add_generation_prompt=True, tokenize=True)
        said = await self.server_manager.generate(request_id="r", prompt_ids=ids, sampling_params=sampling_params)
        out = said.token_ids[: self.response_length]
        return AgentLoopOutput(prompt_ids=ids, response_ids=out, response_mask=[1] * len(out), num_turns=2)
"""

ESTIMATOR = """
from verl.trainer.ppo.core_algos import register_adv_est


@register_adv_est("centred")
def centred(token_level_rewards, response_mask, index, config=None, **kwargs):
    scores = token_level_rewards.sum(-1)
    scores = scores - scores.mean()
    return scores.unsqueeze(-1) * response_mask, token_level_rewards
"""


def test_own_loop_and_estimator_take_a_step(tmp_path: Path) -> None:
    file = write_tiny_run(tmp_path)
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "estimator.py").write_text(ESTIMATOR)
    overrides = ("rollout.scheduler=loop.py:Mine", "algorithm.advantage=estimator.py:centred", "train.steps=1")
    place = build.ConfigSource(config=load_config(RunConfig, file, overrides).config, base=tmp_path)
    parts = build.build_parts(place)
    tasks = build.build_run_tasks(place)

    trajectory = asyncio.run(run_episode(parts.context, tasks.train[0], id="e"))
    assert trajectory.error is None
    (segment,) = trajectory.segments
    assert segment.loss_weights.any() and np.array_equal(segment.loss_weights > 0, segment.sampled_mask)

    before = {name: value.detach().clone() for name, value in parts.model.named_parameters()}
    observer = RunObserver(tmp_path / "run", total_steps=1)
    trainer = build.build_trainer(parts, tasks, folder=tmp_path / "run", observer=observer)
    asyncio.run(trainer.run())
    assert any((value != before[name]).any() for name, value in parts.model.named_parameters())
