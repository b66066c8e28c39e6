"""The dumps: documented keys under their documented names, with turns and roles beside them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from polyturn.core.lifecycle import StopReason
from polyturn.core.reward import Reward
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task, tiny_codec
from polyturn.tracking.dump import TrajectoryDump


def dump(folder: Path) -> TrajectoryDump:
    return TrajectoryDump(folder, lambda ids: str(tiny_codec().tokenizer.decode(ids, skip_special_tokens=True)))


async def played(id: str = "g0/0", **info: Any) -> Trajectory:
    context = scripted_context(["#### 5", "#### 4"], interactions={"gsm8k": Gsm8kInteraction({"name": "gsm8k"})})
    made = await run_episode(context, task(interaction="gsm8k"), id=id)
    return dataclasses.replace(made, reward=Reward(total=1.0, components={"outcome": 1.0}, info=info))


def write(folder: Path, *members: Trajectory, step: int = 7, name: str = "") -> list[dict[str, Any]]:
    group = TrajectoryGroup(id="g0", task=members[0].task, trajectories=members)
    path = dump(folder).write(step, [group], name=name)
    return [json.loads(line) for line in path.read_text().splitlines()]


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


async def test_line_has_the_documented_keys(tmp_path: Path) -> None:
    """Users' scripts read these names."""
    (line,) = write(tmp_path, await played(acc=1.0))
    assert {key: line[key] for key in ("gts", "score", "step", "acc", "request_id", "uid")} == {
        "gts": "4", "score": 1.0, "step": 7, "acc": 1.0, "request_id": "g0/0", "uid": "g0"
    }  # fmt: skip
    assert "What is 2+2?" in line["input"] and "####" not in line["input"]
    assert "#### 5" in line["output"] and "#### 4" in line["output"] and "incorrect" in line["output"]
    assert "<|im_end|>" not in line["input"] + line["output"]
    assert [m["role"] for m in line["messages"]] == ["user", "assistant", "user", "assistant", "user"]
    assert [(t["index"], t["role"], t["text"], t["score"]) for t in line["turns"]] == [
        (0, "assistant", "#### 5", 0.0),
        (1, "assistant", "#### 4", 1.0),
    ]
    assert line["turns"][0]["observation"][0]["role"] == "user"
    assert line["stop_reason"] == "env_done"


async def test_extra_results_of_a_reward_keep_their_names(tmp_path: Path) -> None:
    (line,) = write(tmp_path, await played(turns=2, step=99))
    assert line["turns"] == 2 and line["step"] == 7


async def test_every_line_of_a_step_has_the_same_keys(tmp_path: Path) -> None:
    failed = dataclasses.replace(await played("g0/1"), reward=None, stop_reason=StopReason.ERROR, error="it broke")
    first, second = write(tmp_path, await played(acc=float("nan"), input="mine"), failed)
    assert set(first) == set(second)
    assert (first["acc"], second["acc"], second["score"], second["error"]) == (None, None, None, "it broke")
    assert first["input"] != "mine"


async def test_repeated_step_overwrites_its_file(tmp_path: Path) -> None:
    made = await played()
    write(tmp_path, made, made)
    assert len(write(tmp_path, made)) == 1
    write(tmp_path, made, step=8)
    write(tmp_path, made, step=8, name="sampled")
    assert files(tmp_path) == ["7.jsonl", "8.jsonl", "sampled/8.jsonl"]
