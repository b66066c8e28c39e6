"""Loops that inherit verl's `ToolAgentLoop`: tools around each call, an interaction that is finalized."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn.compat.verl.agent_loop import AgentLoopBase, AgentLoopOutput, TokenOutput, ToolListWrap
from polyturn.compat.verl.base_tool import BaseTool
from polyturn.compat.verl.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
from polyturn.compat.verl.tool_parser import FunctionCall, KimiToolParser
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.task import InteractionRef, Task, ToolKwargs
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.interactions.base import BaseInteraction
from polyturn.rollout.limits import Limits
from polyturn.testing.episodes import task, tiny_codec
from polyturn.tools.schema import OpenAIFunctionToolSchema, ToolResponse
from support.compat_parts import play_loop

EVENTS: list[str] = []
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


class Add(BaseTool):
    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        EVENTS.append(f"create {kwargs['create_kwargs']['to']}")
        return "tool-1", ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[ToolResponse, float, dict]:
        assert isinstance(kwargs["agent_data"], AgentData)
        if parameters.get("a") == "fails":
            raise ValueError("no number")
        return ToolResponse(text=f"it is {parameters['a'] + 2}, as everybody knows"), 0.5, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        EVENTS.append(f"release {instance_id}")


class Doubts(BaseInteraction):
    async def generate_response(
        self, instance_id: str, messages: list[dict], **kwargs: Any
    ) -> tuple[bool, str, float, dict]:
        said = messages[-1]["content"]
        if said == "raise":
            raise RuntimeError("nobody is here")
        return said == "4", "Are you sure?", 1.0 if said == "4" else 0.25, {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        EVENTS.append("started")
        return await super().start_interaction(instance_id, **kwargs)

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        EVENTS.append("finalized")


SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "What."}},
            "required": ["a"],
        },
    },
}


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    EVENTS.clear()
    tools, interactions = tmp_path / "tools.json", tmp_path / "interactions.json"
    tools.write_text(json.dumps({"tools": [{"class_name": f"{__name__}.Add", "config": {}, "tool_schema": SCHEMA}]}))
    item = {"name": "doubts", "class_name": f"{__name__}.Doubts", "config": {}}
    interactions.write_text(json.dumps({"interaction": [item]}))
    paths = {"tool_config_path": str(tools), "interaction_config_path": str(interactions), "max_tool_response_length": 7}
    return {"actor_rollout_ref": {"rollout": {"multi_turn": {**paths, "tool_response_truncate_side": "right"}}}}


def row(**extra: Any) -> Task:
    return dataclasses.replace(
        task("2+2?", tools_kwargs={"add": ToolKwargs(create_kwargs={"to": "two"})}, extra=extra),
        interaction=InteractionRef(name="doubts", kwargs={"name": "doubts"}),
    )


async def play(loop: type[AgentLoopBase], says: list[str], tree: dict[str, Any], **extra: Any) -> Trajectory:
    return await play_loop(loop, says, config=tree, row=row(**extra), interactions={"doubts": Doubts({"name": "doubts"})})


async def test_overridden_state_keeps_tools_and_the_interaction(tree: dict[str, Any]) -> None:
    class Counts(ToolAgentLoop):
        async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
            EVENTS.append("interacting")
            return await super()._handle_interacting_state(agent_data)

    trajectory = await play(Counts, [f"Hm. {CALL}", "five", "4"], tree)
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.STOP, None)
    assert EVENTS == ["started", "create two", "release tool-1", "interacting", "interacting", "finalized"]
    (segment,) = trajectory.segments
    assert np.array_equal(segment.loss_weights > 0, segment.sampled_mask)
    codec = tiny_codec()
    heard = [codec.decode(s.ids) for s in segment.spans if s.source is SpanSource.OBSERVATION]
    assert "it is 4...(truncated)" in heard[0] and "Are you sure?" in heard[1] and len(heard) == 2
    prompt = codec.template.render([Message(role="user", content="2+2?")], tools=[SCHEMA], add_generation_prompt=True)
    assert codec.decode(segment.token_ids).startswith(prompt)
    assert trajectory.turns[-1].info["tool_rewards"] == [0.5]
    assert [t.scores.get("interaction") for t in trajectory.turns] == [None, 0.25, 1.0]


@pytest.mark.parametrize(
    ("arguments", "heard"),
    [('{"name": "sub", "arguments": {}}', "Unknown"), ('{"name": "add", "arguments": {"a": "fails"}}', "The to")],
)
async def test_failing_call_is_reported_to_the_model(tree: dict[str, Any], arguments: str, heard: str) -> None:
    trajectory = await play(ToolAgentLoop, [f"<tool_call>{arguments}</tool_call>", "4"], tree)
    spans = [s for s in trajectory.segments[0].spans if s.source is SpanSource.OBSERVATION]
    assert heard in tiny_codec().decode(spans[0].ids) and EVENTS[-1] == "finalized"


async def test_failing_interaction_is_finalized_and_ends_the_episode(tree: dict[str, Any]) -> None:
    trajectory = await play(ToolAgentLoop, ["raise"], tree)
    assert trajectory.stop_reason is StopReason.ERROR and "nobody is here" in str(trajectory.error)
    assert EVENTS == ["started", "finalized"]


async def test_interaction_that_fails_to_start_is_finalized(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_interaction(self: Any, instance_id: str | None = None, **kwargs: Any) -> str:
        raise RuntimeError("no seat is free")

    monkeypatch.setattr(Doubts, "start_interaction", start_interaction)
    trajectory = await play(ToolAgentLoop, ["4"], tree)
    assert "no seat is free" in str(trajectory.error) and EVENTS == ["finalized"]


async def test_methods_may_be_plain_and_lack_the_id(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class PlainAdd(BaseTool):
        def create(self, instance_id: str | None = None, **kwargs: Any) -> str:  # type: ignore[override]
            return "tool-2"

        def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:  # type: ignore[override]
            return "four"

        def release(self) -> None:  # type: ignore[override]
            EVENTS.append("release")

    class PlainDoubts(BaseInteraction):
        def generate_response(self, instance_id: str, messages: list[dict], **kwargs: Any) -> Any:  # type: ignore[override]
            return messages[-1]["content"] == "4", "Are you sure?", 0.25, {}

        def finalize_interaction(self) -> None:  # type: ignore[override]
            EVENTS.append("finalized")

    monkeypatch.setattr(f"{__name__}.Add", PlainAdd)
    monkeypatch.setattr(f"{__name__}.Doubts", PlainDoubts)
    trajectory = await play(ToolAgentLoop, [CALL, "five", "4"], tree)
    assert (trajectory.error, EVENTS) == (None, ["release", "finalized"])
    assert [t.scores.get("interaction") for t in trajectory.turns] == [None, 0.25, 0.25]
    observed = [s for s in trajectory.segments[0].spans if s.source is SpanSource.OBSERVATION]
    assert "four" in tiny_codec().decode(observed[0].ids)


async def test_answer_that_leaves_no_room_ends_the_episode_with_its_score(tree: dict[str, Any]) -> None:
    row_of_doubts = {"row": row(), "interactions": {"doubts": Doubts({"name": "doubts"})}}
    trajectory = await play_loop(ToolAgentLoop, ["five", "4"], config=tree, limits=Limits(max_tokens=8), **row_of_doubts)
    assert [t.scores for t in trajectory.turns] == [{"interaction": 0.25}]
    assert (trajectory.error, EVENTS) == (None, ["started", "finalized"])


async def test_overridden_state_may_add_scores_without_turns(tree: dict[str, Any]) -> None:
    class Scores(ToolAgentLoop):
        async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
            agent_data.turn_scores.append(0.75)
            return AgentState.TERMINATED

    trajectory = await play(Scores, ["five"], tree)
    assert ([t.scores for t in trajectory.turns], trajectory.error) == ([{"interaction": 0.75}], None)


async def test_row_may_choose_no_tool(tree: dict[str, Any]) -> None:
    trajectory = await play(ToolAgentLoop, [CALL, "4"], tree, tool_selection=["other"])
    assert EVENTS == ["started", "finalized"] and trajectory.stop_reason is StopReason.STOP


async def test_last_form_of_a_loop_gets_its_tools_and_builds_on_tokens(tree: dict[str, Any]) -> None:
    class Base(AgentLoopBase):
        def __init__(self, trainer_config: Any, *, data_config: Any, tools: ToolListWrap, **kwargs: Any) -> None:
            super().__init__(trainer_config, data_config=data_config, **kwargs)
            self.tools = tools.tools

        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            media = await self.process_multi_modal_info(messages := list(kwargs["raw_prompt"]))
            schemas = [tool.tool_schema.to_dict() for tool in self.tools]
            ids, mask = await self.ct_build_initial_tokens(messages, tools=schemas, images=media.get("images")), []
            num, logprobs = len(ids), []
            for text in ("sure?", None):
                said: TokenOutput = await self.server_manager.generate("r", prompt_ids=ids, sampling_params=sampling_params)
                merged, mask, logprobs = await self.ct_merge_assistant_token(
                    ids, said.token_ids, mask, logprobs, said.log_probs
                )
                ids, before = merged.token_ids, list(messages)
                messages.append({"role": "assistant", "content": self.tokenizer.decode(said.token_ids[:-1])})
                if text:
                    messages.append({"role": "user", "content": text})
                    merged, mask, logprobs = await self.ct_merge_context_msg(
                        [*before, messages[-2]], messages, ids, mask, logprobs, tools=schemas
                    )
                    ids = merged.token_ids
            assert len(mask) == len(logprobs or ()) == len(ids) - num
            return AgentLoopOutput(
                prompt_ids=ids[:num], response_ids=ids[num:], response_mask=mask, response_logprobs=logprobs
            )

    class Own(Base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            assert [tool.name for tool in self.tools] == ["add"], "also where only a base class names them"

    trajectory = await play(Own, ["five", "four"], tree)
    (segment,) = trajectory.segments
    assert np.array_equal(segment.loss_weights > 0, segment.sampled_mask) and len(trajectory.turns) == 2, trajectory.error


async def test_kimi_calls_keep_their_ids() -> None:
    class Text:
        eos_token_id = None

        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            call = '<|tool_call_begin|>call-get_sum-0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
            return f"Hm.<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"

    schemas = [
        OpenAIFunctionToolSchema.model_validate({**SCHEMA, "function": {**SCHEMA["function"], "name": n}})  # type: ignore[dict-item]
        for n in ("get_sum", "search")
    ]
    _, calls = await KimiToolParser(Text()).extract_tool_calls([1], schemas)
    assert calls == [FunctionCall(name="get_sum", arguments='{"a": 1}', tool_call_id="call-get_sum-0")]
