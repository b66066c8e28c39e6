"""docs/guides/openai.md runs as it stands."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import openai
import yaml

from polyturn.build import ConfigSource, build_scheduler
from polyturn.config.models import RolloutConfig, RunConfig
from polyturn.rollout.run_episode import run_episode
from polyturn.serving.listen import bind
from polyturn.serving.openai.endpoint import EndpointOptions
from polyturn.serving.openai.hosted_episodes import OpenAIService
from polyturn.serving.openai.scheduler import BlackBox
from polyturn.testing.episodes import scripted_context, task

PAGE = (Path(__file__).parents[3] / "docs/guides/openai.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CONFIG = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


async def test_agent_trains_as_it_is_configured(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(CODE[0])
    config = RunConfig(
        model={"init": {"model_type": "qwen3"}, "tokenizer": "x"},  # type: ignore[arg-type]
        rollout=RolloutConfig(**yaml.safe_load(CONFIG[0])["rollout"]),
    )
    made = build_scheduler(ConfigSource(config=config, base=tmp_path))
    t = await run_episode(scripted_context(["5", "it is 4"], scheduler=made), task(data_source=None), id="e")
    assert t.reward is not None and t.reward.total == 1.0
    assert [turn.message.text for turn in t.turns] == ["5", "it is 4"] and len(t.segments) == 1


def test_command_line_agents_are_made_as_written(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(CODE[1])
    settings = yaml.safe_load(CONFIG[1])["rollout"]["scheduler_kwargs"]
    assert BlackBox(**settings).reward == "final"
    for name in ("mine", "short"):
        BlackBox(agent=f"agents.py:{name}", base=tmp_path)


async def test_episode_of_a_server_is_created_as_written() -> None:
    names: dict[str, Any] = {}
    exec(CODE[2], names)

    async def agent(base_url: str, api_key: str) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "2+2?"}])

    service = OpenAIService(scripted_context(["4"]), EndpointOptions())
    bound, until = bind("127.0.0.1", 0), asyncio.Event()
    running = asyncio.create_task(service.serve(bound, until, grace_s=0.1))
    trajectory = await names["one_episode"](f"http://127.0.0.1:{bound.getsockname()[1]}", agent)
    assert trajectory["reward"]["total"] == 1.0 and len(trajectory["segments"]) == 1
    until.set()
    await running
