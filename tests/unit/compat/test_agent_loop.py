"""An agent loop of a user's own, as the scheduler of an episode: exact ids, its masks as weights, limits and errors ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import numpy as np
import pytest

from polyturn.compat.verl.agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    get_agent_loop_class,
    get_trajectory_info,
    register,
)
from polyturn.compat.verl.agent_scheduler import AgentLoopScheduler
from polyturn.compat.verl.profiler import simple_timer
from polyturn.compat.verl.tool_parser import FunctionCall, Qwen3XMLToolParser, ToolParser
from polyturn.core.errors import ConfigError, DataError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context, tiny_codec


def a_task(**extra: Any) -> Task:
    return Task(id="t", prompt=(Message(role="user", content="2+2?"),), data_source="s", ground_truth="4", extra=extra)


async def run(loop: Any, says: Any, *, task: Task | None = None, limits: Limits | None = None) -> Trajectory:
    scheduler = loop if isinstance(loop, AgentLoopScheduler) else AgentLoopScheduler(loop)
    rewards = {"s": lambda trajectory: 1.0}
    context = scripted_context(says, scheduler=scheduler, rewards=rewards, limits=limits)
    return await run_episode(context, task or a_task(), id="e")


class TwoTurns(AgentLoopBase):
    """Asks, adds feedback of its own, asks again."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        metrics: dict[str, float] = {}
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        with simple_timer("generate_sequences", metrics):
            one = await self.server_manager.generate(request_id="r", prompt_ids=prompt_ids, sampling_params=sampling_params)
        assert one.log_probs is not None and len(one.log_probs) == len(one.token_ids)
        feedback = self.tokenizer.encode(f" really, {kwargs['reward_model']['ground_truth']}?", add_special_tokens=False)
        ids = [*prompt_ids, *one.token_ids, *feedback]
        two = await self.server_manager.generate(request_id="r", prompt_ids=ids, sampling_params=sampling_params)
        tail = self.tokenizer.encode(" thanks", add_special_tokens=False)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=[*one.token_ids, *feedback, *two.token_ids, *tail],
            response_mask=[1] * len(one.token_ids) + [0] * len(feedback) + [1] * len(two.token_ids) + [0] * len(tail),
            num_turns=4,
            metrics=metrics,
            extra_fields={"turn_scores": [0.25, 0.5], "note": "kept"},
        )


async def test_its_tokens_are_those_the_engine_sampled_and_the_rest_observations() -> None:
    trajectory = await run(TwoTurns, ["five", "four"])
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.STOP, None)
    (segment,) = trajectory.segments
    assert [s.source for s in segment.spans] == [
        SpanSource.PROMPT,
        SpanSource.SAMPLED,
        SpanSource.OBSERVATION,
        SpanSource.SAMPLED,
    ]
    codec = tiny_codec()
    assert codec.decode(segment.spans[2].ids) == " really, 4?"
    assert np.array_equal(segment.loss_weights > 0, segment.sampled_mask)
    assert (segment.logprobs[segment.sampled_mask] != 0).all()
    assert trajectory.turn_scores == (0.25, 0.5)
    assert trajectory.turns[-1].info["note"] == "kept"
    assert [t.message.text for t in trajectory.turns] == ["five", "four"]


async def test_a_mask_of_zero_leaves_sampled_tokens_out_of_the_loss() -> None:
    class FirstOnly(TwoTurns):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            output = await super().run(sampling_params, **kwargs)
            first = output.response_mask.index(0)
            mask = [1] * first + [0] * (len(output.response_mask) - first)
            return output.model_copy(update={"response_mask": mask})

    trajectory = await run(FirstOnly, ["five", "four"])
    weights = [trajectory.span(t.spans[0]).loss_weights for t in trajectory.turns]
    assert weights[0].all() and not weights[1].any()


async def test_an_output_that_is_cut_trains_what_is_left_of_it() -> None:
    class Cut(TwoTurns):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            o = await super().run(sampling_params, **kwargs)
            return o.model_copy(update={"response_ids": o.response_ids[:2], "response_mask": o.response_mask[:2]})

    trajectory = await run(Cut, ["five and more", "four"])
    assert sum(float(s.loss_weights.sum()) for s in trajectory.segments[0].spans) == 2.0


async def test_ids_that_were_not_sampled_are_never_trained(caplog: pytest.LogCaptureFixture) -> None:
    class Retokenises(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
            said = await self.server_manager.generate("r", prompt_ids=ids, sampling_params=sampling_params)
            other = [said.token_ids[0] + 1, *said.token_ids[1:]]
            return AgentLoopOutput(prompt_ids=ids, response_ids=other, response_mask=[1] * len(other))

    trajectory = await run(Retokenises, ["four"])
    assert not trajectory.segments[0].loss_weights.any()
    assert trajectory.turns[0].info["unsampled_masked_tokens"] == trajectory.num_sampled_tokens
    assert "did not sample there" in caplog.text


async def test_a_history_that_is_rewritten_opens_a_segment_and_each_output_claims_its_own() -> None:
    class Forgets(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
            outputs = []
            for question in ("one?", "two?"):
                ids = await self.apply_chat_template([{"role": "user", "content": question}])
                said = await self.server_manager.generate("r", prompt_ids=ids, sampling_params=sampling_params)
                outputs.append(
                    AgentLoopOutput(prompt_ids=ids, response_ids=said.token_ids, response_mask=[1] * len(said.token_ids))
                )
            return outputs

    trajectory = await run(Forgets, ["a", "b"])
    assert len(trajectory.segments) == 2
    assert all(np.array_equal(s.loss_weights > 0, s.sampled_mask) for s in trajectory.segments)


async def test_limits_are_the_episodes() -> None:
    class Endless(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
            while True:
                said = await self.server_manager.generate("r", prompt_ids=ids, sampling_params=sampling_params)
                ids = [*ids, *said.token_ids]

    trajectory = await run(Endless, lambda request: "more", limits=Limits(max_turns=3))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.MAX_TURNS, 3)
    trajectory = await run(Endless, lambda request: "more", limits=Limits(max_tokens=8))  # the first prompt is longer
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert sum(len(turn.message.text) for turn in trajectory.turns) >= len("more")


async def test_a_limit_that_a_loop_swallows_ends_the_trajectory_all_the_same() -> None:
    class Swallows(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            with contextlib.suppress(Exception):
                await self.server_manager.generate("r", prompt_ids=[1, 2, 3], sampling_params=sampling_params)
            return AgentLoopOutput(prompt_ids=[0], response_ids=[0], response_mask=[1])

    trajectory = await run(Swallows, ["x"], limits=Limits(max_context=2))
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.CONTEXT_FULL, None)


CALL = '<tool_call>\n{"name": "double", "arguments": {"x": 21}}\n</tool_call>'


class React(AgentLoopBase):
    """A graph of model and tool as the recipe langgraph_agent drives it: in tasks of its own, and swallowing errors."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        schema = {"name": "double", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
        tools = [{"type": "function", "function": schema}]
        self.mask: list[int] = []
        render = self.tokenizer.apply_chat_template
        self.ids = render(list(kwargs["raw_prompt"]), tools=tools, add_generation_prompt=True, tokenize=True)
        try:
            while call := await asyncio.create_task(self.say(sampling_params)):
                result = {"role": "tool", "content": str(json.loads(call.arguments)["x"] * 2)}
                answer = render([result], add_generation_prompt=True, tokenize=True)[len(self.system_prompt) :]
                self.ids, self.mask = [*self.ids, *answer], [*self.mask, *[0] * len(answer)]
        except Exception:
            return AgentLoopOutput(prompt_ids=[0], response_ids=[0], response_mask=[1])
        first = len(self.ids) - len(self.mask)
        return AgentLoopOutput(prompt_ids=self.ids[:first], response_ids=self.ids[first:], response_mask=self.mask)

    async def say(self, sampling_params: dict[str, Any]) -> FunctionCall | None:
        said = await self.server_manager.generate("r", prompt_ids=self.ids, sampling_params=sampling_params)
        self.ids, self.mask = [*self.ids, *said.token_ids], [*self.mask, *[1] * len(said.token_ids)]
        _, calls = await ToolParser.get_tool_parser("hermes", self.tokenizer).extract_tool_calls(said.token_ids)
        return calls[0] if calls else None


async def test_a_loop_calls_the_tool_that_the_model_asked_it_for() -> None:
    trajectory = await run(React, [CALL, "It is 42."])
    asked, answered = (turn.message for turn in trajectory.turns)
    assert [call.name for call in asked.tool_calls] == ["double"] and answered.text == "It is 42."
    (segment,) = trajectory.segments
    assert "42" in tiny_codec().decode(segment.spans[2].ids) and segment.spans[2].source is SpanSource.OBSERVATION
    assert np.array_equal(segment.loss_weights > 0, segment.sampled_mask)


async def test_a_limit_ends_a_loop_that_answers_every_error_with_what_it_sampled() -> None:
    trajectory = await run(React, [CALL], limits=Limits(max_turns=2))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.MAX_TURNS, 2)
    assert all(np.array_equal(s.loss_weights > 0, s.sampled_mask) for s in trajectory.segments)


@pytest.mark.parametrize("answer", ["raises", "none", "silent"])
async def test_a_loop_that_fails_fails_its_trajectory_alone(answer: str) -> None:
    class Bad(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            if answer == "raises":
                raise ValueError("no")
            return None if answer == "none" else AgentLoopOutput(prompt_ids=[1], response_ids=[], response_mask=[])

    trajectory = await run(Bad, ["x"])
    assert trajectory.stop_reason is StopReason.ERROR
    assert "agent loop" in str(trajectory.error)


async def test_loops_of_the_first_form_get_their_messages() -> None:
    class Old(AgentLoopBase):
        def __init__(self, config: Any, server_manager: Any, tokenizer: Any) -> None:
            super().__init__(config, server_manager, tokenizer)
            self.length = config.actor_rollout_ref.rollout.response_length

        async def run(self, messages: list[dict[str, Any]], sampling_params: dict[str, Any]) -> AgentLoopOutput:  # type: ignore[override]
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
            said = await self.server_manager.generate("r", prompt_ids=ids, sampling_params=sampling_params)
            ids_out = said.token_ids[: self.length]
            return AgentLoopOutput(prompt_ids=ids, response_ids=ids_out, response_mask=[1] * len(ids_out), reward_score=0.75)

    trajectory = await run(Old, ["four"])
    assert trajectory.turns[0].scores == {"interaction": 0.75}


async def test_a_row_chooses_its_loop_by_name() -> None:
    register("two_turns_in_test")(TwoTurns)
    assert get_agent_loop_class("two_turns_in_test") is TwoTurns
    by_row = AgentLoopScheduler()
    assert len((await run(by_row, ["a", "b"], task=a_task(agent_name="two_turns_in_test"))).turns) == 2
    assert len((await run(by_row, ["a", "b"], task=a_task(agent_name="tool_agent"))).turns) == 1
    with pytest.raises(ValueError, match="Agent loop nothing not registered"):
        await run(by_row, ["a"], task=a_task(agent_name="nothing"))
    with pytest.raises(DataError, match=r"task 't': Agent loop nothing not registered, .* agent_loop_config_path"):
        by_row.check_task(a_task(agent_name="nothing"))
    by_row.check_task(a_task(agent_name="two_turns_in_test"))
    with pytest.raises(DataError, match="agent_name 'two_turns_in_test', and this run has no agent of that name"):
        MultiTurnScheduler().check_task(a_task(agent_name="two_turns_in_test"))
    MultiTurnScheduler().check_task(a_task(agent_name="tool_agent"))


class Named(AgentLoopBase):
    """Reads an argument of its own, and a key of the run's config."""

    def __init__(self, *args: Any, suffix: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.suffix = suffix

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        said = await self.server_manager.generate("r", prompt_ids=ids, sampling_params=sampling_params)
        rollout = self.config.actor_rollout_ref.rollout
        seen = {"model": self.config.actor_rollout_ref.model.path, "format": rollout.multi_turn.format, "end": self.suffix}
        ids_out = said.token_ids
        return AgentLoopOutput(prompt_ids=ids, response_ids=ids_out, response_mask=[1] * len(ids_out), extra_fields=seen)


async def test_a_file_of_loops_names_classes_their_arguments_and_the_default() -> None:
    items = {"named": {"_target_": f"{__name__}.Named", "suffix": "!"}}
    tree = {"actor_rollout_ref": {"model": {"path": "org/tiny"}, "rollout": {"multi_turn": {"format": None}}}}
    for default, task in (("named", a_task()), ("single_turn_agent", a_task(agent_name="named"))):
        scheduler = AgentLoopScheduler(loops=items, default=default, config=tree)
        turn = (await run(scheduler, ["a", "b"], task=task)).turns[-1]
        assert {k: turn.info[k] for k in ("model", "format", "end")} == {"model": "org/tiny", "format": "hermes", "end": "!"}
    with pytest.raises(ConfigError, match=r"the agent loop 'wrong' names 'json.dumps', which is no class"):
        AgentLoopScheduler(loops={"wrong": {"_target_": "json.dumps"}})


async def test_what_stands_before_the_first_message_can_be_left_out() -> None:
    class Delta(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
            assert ids[: len(self.system_prompt)] == self.system_prompt
            rest = await self.apply_chat_template(list(kwargs["raw_prompt"]), remove_system_prompt=True)
            assert ids == [*self.system_prompt, *rest]
            said = await self.server_manager.generate("r", prompt_ids=ids, sampling_params=sampling_params)
            return AgentLoopOutput(prompt_ids=ids, response_ids=said.token_ids, response_mask=[1] * len(said.token_ids))

    assert (await run(Delta, ["x"])).stop_reason is StopReason.STOP


async def test_native_parsers_answer_under_their_names() -> None:
    tokenizer = tiny_codec().tokenizer
    text = 'Sure.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    parser = ToolParser.get_tool_parser("hermes", tokenizer)
    content, calls = await parser.extract_tool_calls(tokenizer.encode(text, add_special_tokens=False))
    assert content == "Sure."
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [("add", {"a": 1})]
    with pytest.raises(ValueError, match="Unknown tool parser: herms"):
        ToolParser.get_tool_parser("herms", tokenizer)

    @ToolParser.register("mine_in_test")
    class Mine(ToolParser):
        async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
            return "", [FunctionCall(name="x", arguments="{}")]

    assert isinstance(ToolParser.get_tool_parser("mine_in_test", tokenizer), Mine)


async def test_a_call_of_the_xml_form_is_read_alone() -> None:
    parser = Qwen3XMLToolParser(None)
    read = parser._parse_xml_function_call
    whole = read("pick><parameter=items>a</parameter>", None)
    assert whole == FunctionCall(name="pick", arguments='{"items": "a"}')
    assert read("pick><parameter=items>a</parameter><parameter=cut", None) == whole
    assert read("pick", []) is None


async def test_trajectories_are_numbered_within_equal_indices() -> None:
    found = await get_trajectory_info(step=3, index=[7, 7, 8, 7], validate=False)
    assert [f["rollout_n"] for f in found] == [0, 1, 0, 0]
    assert found[1] == {"step": 3, "sample_index": 7, "rollout_n": 1, "validate": False}


def test_a_class_that_rows_name_is_checked_where_it_is_registered():
    with pytest.raises(ConfigError, match="agent_name 'mine': Mine defines `runs`, but an agent loop needs `run`"):

        @register("mine")
        class Mine(AgentLoopBase):
            async def runs(self, sampling_params: Any, **kwargs: Any) -> None: ...
