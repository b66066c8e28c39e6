"""The same turn logic, written natively and for ms-swift, leaves the same tokens, weights, logprobs, scores and infos."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyturn.compat.swift.adapter import SwiftScheduler
from polyturn.compat.swift.base import MultiTurnScheduler
from polyturn.core.trajectory import Trajectory
from polyturn.rollout.run_episode import run_episode
from polyturn.serving.outputs import rollout_outputs
from polyturn.testing.episodes import task, tiny_codec
from support.scripted_scheduler import SchedulerPlan, ScriptedScheduler, plan_context, random_plan

pytestmark = pytest.mark.timeout(300)  # a test plays a hundred episodes


class PlaysPlan(MultiTurnScheduler):
    """Plays a plan in ms-swift's interface."""

    def __init__(self, *args: Any, plan: SchedulerPlan, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plan = plan

    def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        move = self.plan.moves[current_turn - 1]
        done = {"done": True} if move.kind == "done" else {}
        return done if done and move.score is None else {**done, "score": move.score}

    async def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        is_over = super().check_finished(infer_request, response_choice, current_turn)
        return is_over or self.plan.moves[current_turn - 1].kind == "finish"

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        move, ids = self.plan.moves[current_turn - 1], response_choice.token_ids
        kept = self.plan.kept(current_turn - 1, len(ids))
        result: dict[str, Any] = {"infer_request": infer_request, "rollout_infos": dict(move.info)}
        if move.kind == "go_on":
            infer_request.messages[-1]["content"] += move.text
            return result
        if move.kind == "cut":
            added = tiny_codec().encode_plain(move.text).tolist()
            infer_request.messages[-1]["content"] += move.text  # only the ids matter
            mask = [1] * kept + [0] * len(added)
            return {**result, "response_token_ids": ids[:kept] + added, "response_loss_mask": mask}
        if move.kind == "edit":
            infer_request.messages = infer_request.messages[:1]
        if move.kind == "mask":
            result["response_token_ids"] = ids
            result["response_loss_mask"] = [int(i < kept) for i in range(len(ids))]
        infer_request.messages.append({"role": "user", "content": move.text})
        if move.kind == "say_twice":
            infer_request.messages.append({"role": "user", "content": "And?"})
        return result


def shape(trajectory: Trajectory) -> dict[str, Any]:
    """Return everything that training reads."""
    infos = {k: v for turn in trajectory.turns for k, v in turn.info.items() if not k.startswith("_")}
    return {
        "error": trajectory.error,
        "stop": trajectory.stop_reason,
        "ids": [s.token_ids.tolist() for s in trajectory.segments],
        "weights": [s.loss_weights.tolist() for s in trajectory.segments],
        "logprobs": [s.logprobs.tolist() for s in trajectory.segments],
        "turns": [s.turn_ids.tolist() for s in trajectory.segments],
        "scores": trajectory.turn_scores,
        "infos": infos,
    }


async def play_natively(plan: SchedulerPlan) -> Trajectory:
    return await run_episode(plan_context(plan, scheduler=ScriptedScheduler(plan)), task(), id=f"p{plan.seed}")


async def play_as_swift(plan: SchedulerPlan) -> Trajectory:
    scheduler = SwiftScheduler(PlaysPlan, max_turns=plan.max_turns, plan=plan)
    return await run_episode(plan_context(plan, scheduler=scheduler), task(), id=f"p{plan.seed}")


@pytest.mark.parametrize("seeds", [range(50), pytest.param(range(50, 200), marks=pytest.mark.slow)], ids=str)
async def test_random_schedulers_leave_the_same_in_both_interfaces(seeds: range) -> None:
    num_tokens = num_segments = 0
    for seed in seeds:
        plan = random_plan(seed)
        native, swift = await play_natively(plan), await play_as_swift(plan)
        assert native.error is None
        assert shape(swift) == shape(native), plan
        num_tokens += sum(len(s) for s in native.segments)
        num_segments += len(native.segments)
        outputs = rollout_outputs(swift)
        if len(native.segments) == 1:
            ours, theirs = (o.model_dump(exclude={"response", "messages"}) for o in (*rollout_outputs(native), *outputs))
            assert ours == theirs
        for output in outputs:
            logprobs_of_a_turn = zip(
                output.response_token_ids, output.response_loss_mask, output.rollout_logprobs, strict=True
            )
            assert all(len(ids) == len(mask) and sum(mask) == len(probs) for ids, mask, probs in logprobs_of_a_turn)
            assert output.rollout_infos["num_turns"] >= 1
            assert output.messages is not None and output.messages[-1]["role"] == "assistant"
            assert np.isfinite(sum(map(sum, output.rollout_logprobs)))
    assert num_tokens > 50 * len(seeds) and num_segments > len(seeds), "the plans hold something"
