"""The multi-turn dialogue with reasoning and a tool call that users compare systems by, pinned to the letter: with a
template that strips the reasoning of all but the last turn, and with its repaired form; with histories that grow, and with
each turn sampled from what the template renders at inference.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import polyturn
from polyturn.batching.samples import to_samples
from polyturn.core.messages import Message
from polyturn.core.task import Task, as_rows
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.rollout.episode import Episode
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.parsers import HermesParser

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
WHY = "两个加两个等于四，因为这是一个基本的算术运算。"
DIALOGUE: list[dict[str, Any]] = [
    {"role": "system", "content": "你是一个有帮助的助手。"},
    {"role": "user", "content": "2 + 2 等于多少？"},
    {"role": "assistant", "content": "<think>用户询问一个简单的数学问题。</think> 2 + 2 = 4."},
    {"role": "user", "content": "解释一下原因。"},
    {
        "role": "assistant",
        "content": "<think>用户想知道答案背后的推理。寻找一个好的解释</think>",
        "tool_calls": [{"id": "tool1", "type": "search", "arguments": {"query": "为什么 2 + 2 = 4？"}}],
    },
    {"role": "tool", "content": WHY},
    {"role": "assistant", "content": f"<think>工具提供了一个好的解释。</think>{WHY}"},
]
"""As the reference page has it, the call in its flat form included."""

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "为什么 2 + 2 = 4？"}}\n</tool_call>'
SAYS = (DIALOGUE[2]["content"], DIALOGUE[4]["content"] + "\n" + CALL, DIALOGUE[6]["content"])
"""What the model samples, turn by turn."""


@polyturn.tool
async def search(query: str) -> str:
    """Search for an explanation.

    Args:
        query: What to explain.
    """
    return WHY


class Asks(MultiTurnScheduler):
    """The user asks why after the first answer."""

    async def step(self, episode: Episode, turn: OpenTurn) -> Any:
        if turn.message.tool_calls:
            return await episode.call_tools(turn)
        return DIALOGUE[3]["content"] if turn.index == 0 else None


async def told(template: str, *, at_inference: bool) -> tuple[Trajectory, list[str], Codec]:
    """Run the dialogue; return the trajectory, the prompts that the engine was shown, and the codec."""
    codec = Codec(tiny_tokenizer(), chat_template=(TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8"))
    shown: list[str] = []

    def says(request: Any) -> str:
        shown.append(codec.decode(request.prompt_ids))
        return SAYS[len(shown) - 1]

    context = scripted_context(says, tools=[search], scheduler=Asks(), renders_history=at_inference)
    context.codec = codec
    prompt = tuple(Message.from_openai(m) for m in DIALOGUE[:2])
    trajectory = await run_episode(context, Task(id="t", prompt=prompt), id="e")
    return trajectory, shown, codec


def trained(trajectory: Trajectory, codec: Codec) -> list[str]:
    """Return the text of each sample's tokens with a weight."""
    group = TrajectoryGroup(id="g", task=trajectory.task, trajectories=(trajectory,))
    return [codec.decode(s.token_ids[s.loss_weights > 0]) for s in to_samples(group, temperature=1.0)]


def prompt_text() -> str:
    system, user = (m["content"] for m in DIALOGUE[:2])
    schema = json.dumps(search.schema, ensure_ascii=False)
    tools = f"\n\n# Tools\n<tools>\n{schema}\n</tools>"
    return f"<|im_start|>system\n{system}{tools}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


ASKS = "<|im_end|>\n<|im_start|>user\n解释一下原因。<|im_end|>\n<|im_start|>assistant\n"
ANSWERS = f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{WHY}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("template", ["strips_reasoning", "keeps_reasoning"])
async def test_default_history_keeps_all_reasoning(template: str) -> None:
    trajectory, shown, codec = await told(template, at_inference=False)
    assert shown[0] == prompt_text()
    assert shown[1] == prompt_text() + SAYS[0] + ASKS
    assert shown[2] == prompt_text() + SAYS[0] + ASKS + SAYS[1] + ANSWERS
    assert len(trajectory.segments) == 1
    assert trained(trajectory, codec) == ["".join(f"{said}<|im_end|>" for said in SAYS)]


async def test_sanity_check_counts_stripped_reasoning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="polyturn.rollout.context")
    trajectory, _, _ = await told("strips_reasoning", at_inference=False)
    assert trajectory.metrics["sanity_reasoning_stripped"] == 2.0  # both turns but the last
    checks = [(r.levelname, r.getMessage().partition("token check of e: ")[2].split()[:1]) for r in caplog.records]
    assert checks == [("INFO", ["reasoning_stripped"]), ("INFO", ["whitespace"])], "nothing to do, so no warning"
    repaired, _, _ = await told("keeps_reasoning", at_inference=False)
    assert "sanity_reasoning_stripped" not in repaired.metrics


async def test_rendered_history_drops_earlier_reasoning() -> None:
    trajectory, shown, codec = await told("strips_reasoning", at_inference=True)
    answer = SAYS[0].partition("</think>")[2].strip()
    assert shown[0] == prompt_text()
    without = shown[1].replace(" ", "")
    assert without == (prompt_text() + answer + ASKS).replace(" ", "")
    assert "<think>" not in shown[2].partition("</tools>")[2]
    assert shown[2].endswith(CALL + ANSWERS)
    assert len(trajectory.segments) == 3
    assert trained(trajectory, codec) == [f"{said}<|im_end|>" for said in SAYS]


async def test_sampled_tokens_train_in_their_own_context() -> None:
    for template in ("strips_reasoning", "keeps_reasoning"):
        trajectory, shown, codec = await told(template, at_inference=True)
        group = TrajectoryGroup(id="g", task=trajectory.task, trajectories=(trajectory,))
        texts = [codec.decode(s.token_ids) for s in to_samples(group, temperature=1.0)]
        for prompt, said in zip(shown, SAYS, strict=True):
            assert any(text.startswith(f"{prompt}{said}<|im_end|>") for text in texts)


def test_flat_call_equals_the_nested_one() -> None:
    flat = Message.from_openai(DIALOGUE[4])
    wire = {"id": "tool1", "type": "function", "function": {"name": "search", "arguments": {"query": "为什么 2 + 2 = 4？"}}}
    assert flat == Message.from_openai({**DIALOGUE[4], "tool_calls": [wire]})
    assert (flat.tool_calls[0].name, dict(flat.tool_calls[0].arguments)) == ("search", {"query": "为什么 2 + 2 = 4？"})


def test_completions_parse_as_the_dialogue() -> None:
    for said, written in zip(SAYS, (DIALOGUE[2], DIALOGUE[4], DIALOGUE[6]), strict=True):
        read = HermesParser().parse(said)
        assert f"<think>{read.reasoning}</think>{read.content}".replace(" ", "") == written["content"].replace(" ", "")
        flat = Message.from_openai(written).tool_calls
        assert [(c.name, c.arguments) for c in read.tool_calls] == [(c.name, c.arguments) for c in flat]


def test_dialogue_renders_with_last_or_all_reasoning() -> None:
    messages = as_rows(Message.from_openai(m) for m in DIALOGUE)
    for template, num_thoughts in (("strips_reasoning", 1), ("keeps_reasoning", 3)):
        codec = Codec(tiny_tokenizer(), chat_template=(TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8"))
        text = codec.decode(DeltaEncoder(codec).full(messages))
        assert text.count("<think>") == num_thoughts
        assert text.count(CALL) == 1
