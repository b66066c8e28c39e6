"""verl.experimental.agent_loop.tool_agent_loop: `ToolAgentLoop`, a state machine that users' own loops inherit.

    PENDING -> GENERATING -> PROCESSING_TOOLS | INTERACTING -> GENERATING … -> TERMINATED        one method `_handle_…` each

Rows with `tool_agent` are run by the native loop; this class is for subclasses that override a state. Tools are created and
released around each call, as in verl; the interaction is finalized once, even after an error. Messages after a completion
are encoded by the native encoder, so their tokens follow the model's template.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from polyturn.compat.verl.agent_loop import AgentData, AgentLoopBase, AgentLoopOutput, AgentState, ToolListWrap
from polyturn.compat.verl.function_tool import load_function_tools_from_path
from polyturn.compat.verl.profiler import simple_timer
from polyturn.compat.verl.tool_parser import FunctionCall, ToolParser
from polyturn.core.errors import ConfigError, one_line
from polyturn.infra.plugin_shape import has_parameter, takes_any_keyword
from polyturn.interactions.adapters import in_usual_form
from polyturn.interactions.registry import initialize_interactions_from_config
from polyturn.tools.adapters import methods_of
from polyturn.tools.registry import initialize_tools_from_config
from polyturn.tools.result_shape import normalize
from polyturn.tools.schema import ToolResponse
from polyturn.tools.truncate import truncate

__all__ = ["AgentData", "AgentLoopOutput", "AgentState", "FunctionCall", "ToolAgentLoop", "ToolParser"]

_LOADED: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str], Any]] = WeakKeyDictionary()
"""Event loop -> the tools and interactions of files, which all trajectories share."""


class ToolAgentLoop(AgentLoopBase):
    """Answers turns with tool results and an interaction, until a turn needs neither or a limit is reached."""

    def __init__(self, *args: Any, tools: ToolListWrap | None = None, **kwargs: Any) -> None:
        """Use `tools`, or load the tools of `multi_turn`."""
        super().__init__(*args, **kwargs)
        multi_turn = self.rollout_config.multi_turn
        self.max_user_turns = multi_turn.get("max_user_turns")
        self.max_assistant_turns = multi_turn.get("max_assistant_turns")
        self.max_parallel_calls = multi_turn.get("max_parallel_calls", 1)
        self.max_tool_response_length = multi_turn.get("max_tool_response_length", 256)
        self.tool_response_truncate_side = multi_turn.get("tool_response_truncate_side", "middle")
        self.tools: dict[str, Any] = {tool.name: tool for tool in (tools.tools if tools else tools_of(multi_turn))}
        self.tool_schemas = [tool.tool_schema.to_dict() for tool in self.tools.values()]
        self.tool_parser_name = multi_turn.get("format") or "hermes"
        self.tool_parser = ToolParser.get_tool_parser(self.tool_parser_name, self.tokenizer)
        self.prompt_length, self.response_length = self.rollout_config.prompt_length, self.rollout_config.response_length
        self.interaction_config_file = multi_turn.get("interaction_config_path")
        self.interaction_map = self._initialize_interactions(self.interaction_config_file)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run one trajectory."""
        request_id = uuid4().hex
        extra_info = kwargs.get("extra_info") or {}
        if selected := extra_info.get("tool_selection"):
            self.tools = {name: self.tools[name] for name in selected if name in self.tools}
            self.tool_schemas = [tool.tool_schema.to_dict() for tool in self.tools.values()]
        interaction, interaction_kwargs = await self._start_interaction(request_id, extra_info)
        agent_data = AgentData(
            messages=list(kwargs["raw_prompt"]),
            request_id=request_id,
            tools_kwargs=kwargs.get("tools_kwargs"),
            interaction=interaction,
            interaction_kwargs=interaction_kwargs,
        )
        try:
            await self._run_states(agent_data, sampling_params)
        finally:
            if interaction is not None:
                await _called(interaction.finalize_interaction, request_id)
        num = len(agent_data.response_mask)
        end = len(agent_data.prompt_ids) - num
        logprobs = agent_data.response_logprobs[: self.response_length]
        by_turn: list[float | None] = [*agent_data.turn_scores]
        if len(by_turn) == len(agent_data.scored_turns):  # subclasses may add scores without their turns
            scores = dict(zip(agent_data.scored_turns, by_turn, strict=True))
            by_turn = [scores.get(turn) for turn in range(agent_data.assistant_turns)]
        extra = {"turn_scores": by_turn, "tool_rewards": agent_data.tool_rewards}
        return AgentLoopOutput(
            prompt_ids=agent_data.prompt_ids[:end],
            response_ids=agent_data.prompt_ids[end:][: self.response_length],
            response_mask=agent_data.response_mask[: self.response_length],
            response_logprobs=logprobs or None,
            num_turns=agent_data.user_turns + agent_data.assistant_turns + 1,
            metrics=agent_data.metrics,
            extra_fields={**agent_data.extra_fields, **extra},
        )

    async def _run_states(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> None:
        state = AgentState.PENDING
        while state is not AgentState.TERMINATED:
            if state is AgentState.PENDING:
                state = await self._handle_pending_state(agent_data, sampling_params)
            elif state is AgentState.GENERATING:
                state = await self._handle_generating_state(agent_data, sampling_params)
            elif state is AgentState.PROCESSING_TOOLS:
                state = await self._handle_processing_tools_state(agent_data)
            else:
                state = await self._handle_interacting_state(agent_data)

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        """Render the prompt."""
        agent_data.prompt_ids = await self.ct_build_initial_tokens(agent_data.messages, tools=self.tool_schemas or None)
        return AgentState.GENERATING

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        """Run one turn of the model and return the next state."""
        with simple_timer("generate_sequences", agent_data.metrics):
            output = await self.server_manager.generate(
                request_id=agent_data.request_id,
                prompt_ids=agent_data.prompt_ids,
                sampling_params=sampling_params,
                image_data=agent_data.image_data,
                video_data=agent_data.video_data,
            )
        agent_data.assistant_turns += 1
        agent_data.response_ids = list(output.token_ids)
        merged, agent_data.response_mask, logprobs = await self.ct_merge_assistant_token(
            agent_data.prompt_ids,
            agent_data.response_ids,
            agent_data.response_mask,
            agent_data.response_logprobs,
            output.log_probs,
        )
        agent_data.prompt_ids, agent_data.response_logprobs = merged.token_ids, logprobs or []
        agent_data.extra_fields = {**agent_data.extra_fields, **output.extra_fields}
        if len(agent_data.response_mask) >= self.response_length and not ignore_termination:
            return AgentState.TERMINATED
        if self.max_assistant_turns and agent_data.assistant_turns >= self.max_assistant_turns:
            return AgentState.TERMINATED
        if self.max_user_turns and agent_data.user_turns >= self.max_user_turns:
            return AgentState.TERMINATED
        schemas = [tool.tool_schema for tool in self.tools.values()]
        content, agent_data.tool_calls = await self.tool_parser.extract_tool_calls(agent_data.response_ids, schemas)
        if self.interaction_config_file:  # an interaction gets the whole text of the model
            whole = self.tokenizer.decode(agent_data.response_ids, skip_special_tokens=True)
            agent_data.messages.append({"role": "assistant", "content": whole})
        else:
            agent_data.messages.append(self._build_assistant_message(content, agent_data))
        if agent_data.tool_calls:
            return AgentState.PROCESSING_TOOLS
        return AgentState.INTERACTING if self.interaction_config_file else AgentState.TERMINATED

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        """Execute the first `max_parallel_calls` calls concurrently and append their results; the others are dropped."""
        calls, before = agent_data.tool_calls[: self.max_parallel_calls], list(agent_data.messages)
        with simple_timer("tool_calls", agent_data.metrics):
            results = await asyncio.gather(*(self._call_tool(c, agent_data.tools_kwargs, agent_data) for c in calls))
        for call, (response, reward, _) in zip(calls, results, strict=True):
            if response.image or response.video:
                raise ConfigError(
                    f"the tool {call.name!r} returned media, which agent loops do not support; use the native loop for such "
                    "rows (agent_name tool_agent)"
                )
            arguments = {} if call.tool_call_id is None else {"tool_call_id": call.tool_call_id}
            agent_data.messages.append({"role": "tool", "content": response.text or "", **arguments})
            if reward is not None:
                agent_data.tool_rewards.append(reward)
        state = await self._append_messages(agent_data, before)
        agent_data.user_turns += state is AgentState.GENERATING
        return state

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        """Append the interaction's answer; the answer that ends the conversation is not encoded."""
        generate = agent_data.interaction.generate_response
        is_over, reply, score, _ = await _called(
            generate, agent_data.request_id, agent_data.messages, **agent_data.interaction_kwargs
        )
        before = list(agent_data.messages)
        agent_data.user_turns += 1
        agent_data.messages.append({"role": "user", "content": reply})
        if score is not None:
            agent_data.turn_scores.append(score)
            agent_data.scored_turns.append(agent_data.assistant_turns - 1)
        if is_over:
            return AgentState.TERMINATED
        return await self._append_messages(agent_data, before)

    async def _append_messages(self, agent_data: AgentData, before: list[dict[str, Any]]) -> AgentState:
        """Append the tokens of the messages after `before`, unless they leave no room for another turn."""
        merged, mask, logprobs = await self.ct_merge_context_msg(
            before,
            agent_data.messages,
            agent_data.prompt_ids,
            agent_data.response_mask,
            agent_data.response_logprobs or None,
            tools=self.tool_schemas,
        )
        if len(mask) >= self.response_length:
            return AgentState.TERMINATED
        agent_data.prompt_ids, agent_data.response_mask = merged.token_ids, mask
        agent_data.response_logprobs = logprobs or []
        return AgentState.GENERATING

    def _build_assistant_message(self, content: str, agent_data: AgentData) -> dict[str, Any]:
        """Return a turn as a message, with the calls that will be executed."""
        message: dict[str, Any] = {"role": "assistant", "content": content or ""}
        if agent_data.tool_calls:
            message["tool_calls"] = [_call_of(call) for call in agent_data.tool_calls[: self.max_parallel_calls]]
        return message

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: Mapping[str, Any], agent_data: AgentData
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Return a tool's answer, reward and metrics; errors become answers for the model."""
        name = tool_call.name
        if (tool := self.tools.get(name)) is None:
            return _problem(f"Unknown function {name!r}; there are {', '.join(sorted(self.tools)) or 'none'}.")
        try:
            arguments = json.loads(tool_call.arguments)
        except (ValueError, TypeError) as problem:
            return _problem(f"Invalid JSON in the arguments of {name!r}: {one_line(problem)}")
        instance_id, methods = None, methods_of(tool)
        try:
            create_kwargs = (tools_kwargs.get(name) or {}).get("create_kwargs") or {}
            if has_parameter(tool.create, "instance_id"):
                created = await _called(methods.create, str(uuid4()), **create_kwargs)
            else:
                created = await _called(tool.create, create_kwargs=create_kwargs)
            instance_id = created[0] if isinstance(created, tuple) else created
            takes_data = has_parameter(tool.execute, "agent_data") or takes_any_keyword(tool.execute)
            extra = {"agent_data": agent_data} if takes_data else {}
            response, reward, metrics = normalize(await _called(tool.execute, instance_id, arguments, **extra))
        except Exception as problem:
            return _problem(f"The tool {name!r} failed: {one_line(problem)}")
        finally:
            if instance_id is not None:
                await _called(methods.release, instance_id)
        text = response.text
        if text:
            text = truncate(text, max_chars=self.max_tool_response_length, side=self.tool_response_truncate_side)
        return response.model_copy(update={"text": text}), reward, dict(metrics)

    def _initialize_interactions(self, interaction_config_file: str | None) -> dict[str, Any]:
        """Return name -> interaction of a file."""
        if not interaction_config_file:
            return {}
        return _once("interactions", interaction_config_file, initialize_interactions_from_config)

    async def _start_interaction(self, request_id: str, extra_info: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not self.interaction_config_file:
            return None, {}
        kwargs = dict(extra_info.get("interaction_kwargs") or {})
        if "name" not in kwargs:
            raise ConfigError("'name' key is required in interaction_kwargs")
        if kwargs["name"] not in self.interaction_map:
            known = list(self.interaction_map)
            raise ConfigError(
                f"Interaction {kwargs['name']!r} not found in interaction_map. Available interactions: {known}"
            )
        interaction = in_usual_form(self.interaction_map[kwargs["name"]])
        try:
            await _called(interaction.start_interaction, request_id, **kwargs)
        except BaseException:
            await _called(interaction.finalize_interaction, request_id)
            raise
        return interaction, kwargs


async def _called(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a tool or an interaction; a plain one runs in a thread."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    returned = await asyncio.to_thread(method, *args, **kwargs)
    return await returned if inspect.isawaitable(returned) else returned


def tools_of(multi_turn: Mapping[str, Any]) -> list[Any]:
    """Return the tools of a config's files."""
    tools: list[Any] = []
    for key, load in (
        ("tool_config_path", initialize_tools_from_config),
        ("function_tool_path", load_function_tools_from_path),
    ):
        if path := multi_turn.get(key):
            tools += _once(key, path, load)
    return tools


def _once(key: str, path: str, load: Any) -> Any:
    loaded = _LOADED.setdefault(asyncio.get_running_loop(), {})
    if (key, path) not in loaded:
        loaded[key, path] = load(path)
    return loaded[key, path]


def _problem(text: str) -> tuple[ToolResponse, float, dict[str, Any]]:
    return ToolResponse(text=text), 0.0, {}


def _call_of(call: FunctionCall) -> dict[str, Any]:
    """Return a call for a message; arguments that are not a JSON object stay text."""
    try:
        read = json.loads(call.arguments)
    except (ValueError, TypeError):
        read = None
    arguments = read if isinstance(read, dict) else call.arguments
    call_id = {} if call.tool_call_id is None else {"id": call.tool_call_id}
    return {"type": "function", "function": {"name": call.name, "arguments": arguments}, **call_id}
