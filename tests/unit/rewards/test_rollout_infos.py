"""What steps report about an episode, and the columns of its row, reach the reward function."""

from __future__ import annotations

from typing import Any

from polyturn.data.rows import task_from_row
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.testing.episodes import scripted_context


class Reports(MultiTurnScheduler):
    async def step(self, episode: Any, turn: Any) -> Reply | None:
        if turn.index == 1:
            return None
        return Reply.of("more").__class__(
            messages=Reply.of("more").messages, info={"tries": turn.index, "images": ["shown.png"], "seen": True}
        )

    async def on_turn_end(self, episode: Any, turn: Any) -> None:
        turn.info["tries"] = turn.index + 1


async def test_infos_and_columns_reach_the_reward_function_and_media_replace_the_rows() -> None:
    told: dict[str, Any] = {}

    def score(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> float:
        told.update(extra_info)
        return 1.0

    row = {
        "prompt": "What?", "data_source": "mine", "ground_truth": "4", "difficulty": 3, "env_config": {"seed": 1},
        "extra_info": {"index": 7, "images": ["row.png"]},
    }  # fmt: skip
    task = task_from_row(row, index=0, split="train", source="rows.jsonl")
    assert {"difficulty": 3, "env_config": {"seed": 1}, "index": 7}.items() <= dict(task.extra).items()
    context = scripted_context(["a", "b"], scheduler=Reports(), rewards={"mine": score})
    t = await run_episode(context, task, id="e")
    assert not t.is_failed, t.error
    assert told["rollout_infos"] == {"tries": 2, "seen": True, "images": ["shown.png"], "num_turns": 2}
    assert told["images"] == ["shown.png"] and told["difficulty"] == 3 and told["env_config"] == {"seed": 1}
