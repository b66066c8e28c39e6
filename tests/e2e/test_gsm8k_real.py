"""Two optimizer steps on real GSM8K problems, with Qwen's real vocabulary and chat template, with and without the tool.

The model is a random Qwen2 of two layers. A short warm start teaches it the form of an answer, or of a tool call, so that it
ends its turns and uses them; its answers are nearly always wrong. The rewards are a function of this test with variance
in every group. Only the public interface is used: RunConfig, `build`, `Trainer`. The data and the template are real, and
looked up beside the checkout.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from polyturn import build
from polyturn.config.models import RunConfig
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.protocols import Engine
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.data.dataset import TaskDataset
from polyturn.data.prepare import prepare_gsm8k
from polyturn.evaluation.report import EvalReport
from polyturn.store.schema import Trained
from polyturn.training.observer_base import Observer
from polyturn.training.options import SftOptions
from polyturn.training.sft import run_sft
from support.invariants import check_invariants, sampled_turns

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not SHARED.is_dir(), reason=f"{SHARED} is absent: the real problems, tokenizer and template are there"
    ),
]

NUM_TASKS, GROUP_SIZE, STEPS = 24, 2, 2
TEMPERATURE = 0.7
NUM_PROBLEMS = {"train": 7473, "test": 1319}
INTERACTIONS = [{"name": "gsm8k", "class_name": "polyturn.interactions.gsm8k:Gsm8kInteraction"}]
TOOLS = "tools: [{class_name: polyturn.tools.gsm8k.Gsm8kTool, config: {}}]\n"
REWARD = '''
def by_number_of_tokens(trajectory):
    """Differs between the members of a group, unlike the right answer, which this model never finds."""
    return trajectory.num_sampled_tokens % 7 / 7 + len(trajectory.turns[-1].message.text) % 5
'''


@dataclass
class Recorder:
    """Notes every request and its completion on their way between the episodes and the engine."""

    engine: Engine
    exchanges: dict[str, list[tuple[list[int], Completion]]] = field(default_factory=dict)

    async def generate(self, request: GenerateRequest) -> Completion:
        seen = request.prompt_ids.tolist()
        completion = await self.engine.generate(request)
        self.exchanges.setdefault(request.session_id, []).append((seen, completion))
        return completion

    async def end_session(self, session_id: str) -> None:
        await self.engine.end_session(session_id)


@dataclass
class Seen(Observer):
    """Keeps the steps of a run."""

    steps: list[tuple[dict[str, float], list[TrajectoryGroup]]] = field(default_factory=list)

    def on_group(self, group: TrajectoryGroup, *, phase: str, total: int) -> None:
        assert phase == "rollout"

    def on_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[TrajectoryGroup],
        trained: Mapping[str, Trained] | None = None,
    ) -> None:
        self.steps.append((dict(metrics), list(groups)))

    def on_eval(self, step: int, name: str, report: EvalReport, groups: Sequence[TrajectoryGroup]) -> None:
        raise AssertionError("this run has no evaluation")


@dataclass(frozen=True)
class Run:
    """A finished run of two steps."""

    variant: str
    steps: list[tuple[dict[str, float], list[TrajectoryGroup]]]
    exchanges: dict[str, list[tuple[list[int], Completion]]]
    before: PreTrainedModel
    after: PreTrainedModel

    def trajectories(self) -> Iterator[tuple[TrajectoryGroup, Trajectory]]:
        for _, groups in self.steps:
            for group in groups:
                for trajectory in group.trajectories:
                    yield group, trajectory


def conversations(variant: str, files: Sequence[Path], *, count: int) -> Iterator[dict[str, Any]]:
    """Yield demonstrations of the form: a digit as the answer, checked with the tool first if there is one."""
    for index, task in enumerate(TaskDataset.open(files, split="train")[:count]):
        digit = str(1 + index % 9)
        messages: list[dict[str, Any]] = [m.to_openai() for m in task.prompt]
        if variant == "tool":
            call = {"function": {"name": "calc_gsm8k_reward", "arguments": {"answer": digit}}}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": f"Current parsed answer='{digit}' reward=0.0", "name": "calc_gsm8k_reward"},
            ]
        yield {"messages": [*messages, {"role": "assistant", "content": f"#### {digit}"}]}


def config_of(variant: str) -> RunConfig:
    """Return the configuration; paths are relative to the folder of the run."""
    partner: dict[str, Any] = {"interactions": INTERACTIONS}
    if variant == "tool":
        partner = {"tools": {"file": "tools.yaml"}}
    return RunConfig.model_validate(
        {
            "num_threads": 1,
            "model": {
                "init": {
                    "model_type": "qwen2",
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 1,
                    "max_position_embeddings": 2048,
                    "tie_word_embeddings": True,
                },
                "tokenizer": str(SHARED / "tokenizers" / "qwen2"),
                "chat_template": str(SHARED / "chat_templates" / "qwen2_5.jinja"),
            },
            "data": {"train": {"files": "data/train.parquet", "limit": NUM_TASKS}},
            "rollout": {
                "limits": {"max_turns": 3, "max_tokens_per_turn": 28, "max_context": 1024},
                "sampling": {"temperature": TEMPERATURE},
                "max_concurrent": 16,
                "sanity_every": 1,
                **partner,
            },
            "engine": {"num_slots": 16},
            "reward": {"routes": {"openai/gsm8k": "reward.py:by_number_of_tokens"}},
            "algorithm": {"drop_zero_variance": False},
            "warm_start": {
                "conversations": "conversations.jsonl",
                "steps": 70 if variant == "tool" else 20,
                "batch_size": 2,
                "max_tokens_per_batch": 400,
                "optim": {"lr": 2e-2, "warmup_steps": 2, "betas": [0.9, 0.98]},
            },
            "train": {
                "steps": STEPS,
                "groups_per_step": NUM_TASKS // STEPS,
                "group_size": GROUP_SIZE,
                "max_tokens_per_batch": 400,
                "optim": {"lr": 1e-3},
            },
        }
    )


@pytest.fixture(scope="module", params=["interaction", "tool"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Prepare the real rows, warm up, and take two optimizer steps."""
    variant: str = request.param
    base = tmp_path_factory.mktemp(variant)
    files = prepare_gsm8k(SHARED / "gsm8k", variant=request.param, out=base / "data")
    for path in files:
        assert len(TaskDataset.open(path, split=path.stem)) == NUM_PROBLEMS[path.stem]
    (base / "tools.yaml").write_text(TOOLS)
    (base / "reward.py").write_text(REWARD)
    lines = [json.dumps(c) for c in conversations(variant, files[:1], count=64)]
    (base / "conversations.jsonl").write_text("\n".join(lines))

    place = build.ConfigSource(config=config_of(variant), base=base)
    parts = build.build_parts(place)
    sft = place.config.warm_start
    policy = build.build_policy(parts, sft.optim.over(sft.steps), max_tokens_per_batch=sft.max_tokens_per_batch)
    run_sft(policy, build.warm_start_samples(parts), SftOptions(steps=sft.steps, batch_size=sft.batch_size))

    tasks = build.build_run_tasks(place)
    build.check_training(parts, tasks)
    recorder, seen, before = Recorder(parts.engine), Seen(), copy.deepcopy(parts.model)
    parts.context.engine = recorder  # type: ignore[assignment]
    trainer = build.build_trainer(parts, tasks, folder=base / "run", observer=seen)
    asyncio.run(trainer.run())
    return Run(variant=variant, steps=seen.steps, exchanges=recorder.exchanges, before=before, after=parts.model)


def test_every_task_is_rolled_out_and_trained_once(run: Run) -> None:
    ids = [group.task.id for _, groups in run.steps for group in groups]
    assert len(run.steps) == STEPS
    assert len(ids) == len(set(ids)) == NUM_TASKS
    for metrics, _ in run.steps:
        assert metrics["rollout/failed"] == 0
        assert metrics["buffer/samples_kept"] == NUM_TASKS // STEPS * GROUP_SIZE
        assert metrics["tokens/trained"] == metrics["tokens/sampled"] > 0
        assert metrics["loss/grad_norm"] > 0
        assert metrics["loss/skipped_steps"] == 0
    before, after = run.before.state_dict(), run.after.state_dict()
    assert all(torch.isfinite(value).all() for value in after.values())
    assert not any(torch.equal(before[name], after[name]) for name in before if "layers" in name)


def test_environment_answers_many_turns(run: Run) -> None:
    trajectories = [trajectory for _, trajectory in run.trajectories()]
    observed = [turn for trajectory in trajectories for turn in trajectory.turns if turn.observation]
    if run.variant == "interaction":
        asked_again = [t for t in observed if t.observation[0].text.startswith("Your response is incorrect!")]
        assert len(asked_again) > len(trajectories)
        assert all(turn.score == 0.0 and turn.observation[0].role == "user" for turn in asked_again)
    else:
        results = [result for turn in observed for result in turn.tool_results]
        valid = [result for result in results if result.error is None]
        assert len(valid) > 0.25 * len(trajectories)
        assert all(str(r.content).startswith("Current parsed answer=") and r.reward in (0.0, -0.05) for r in valid)
        assert sum(len(trajectory.turns) > 1 for trajectory in trajectories) > 0.25 * len(trajectories)


def test_i1_to_i4_tokens_are_those_of_the_engine(run: Run) -> None:
    for step, (_, groups) in enumerate(run.steps):
        for trajectory in (t for group in groups for t in group.trajectories):
            exchanges = run.exchanges[trajectory.id]
            check_invariants(trajectory, [(np.array(seen), completion) for seen, completion in exchanges])
            assert all(completion.policy_versions == ((0, step),) for _, completion in exchanges)


def test_i8_logprobs_of_the_engine_are_the_trainers(run: Run) -> None:
    """The trainer's own comparison covers every token of both steps; a plain forward pass checks the first step's again."""
    for metrics, _ in run.steps:
        assert metrics["policy/rollout_difference_max"] < 1e-4
    compared = 0
    for group in run.steps[0][1]:
        for trajectory in group.trajectories:
            for _, segment, start, end in sampled_turns(trajectory):
                ids = torch.from_numpy(segment.token_ids[None, :end].astype(np.int64))
                with torch.no_grad():
                    hidden = run.before.base_model(input_ids=ids).last_hidden_state[0, start - 1 : end - 1]
                    logits = run.before.get_output_embeddings()(hidden) / TEMPERATURE
                    expected = torch.log_softmax(logits, -1).gather(1, ids[0, start:end, None])[:, 0]
                np.testing.assert_allclose(segment.logprobs[start:end], expected.numpy(), atol=1e-4, rtol=0)
                compared += end - start
    assert compared == run.steps[0][0]["tokens/trained"]
