"""A user's own agent loop as the scheduler of an episode: exact ids, masks as weights, the episode's limits and errors."""

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
from polyturn.compat.verl.single_turn_agent_loop import SingleTurnAgentLoop
from polyturn.compat.verl.tool_parser import FunctionCall, Qwen3XMLToolParser, ToolParser
from polyturn.core.errors import ConfigError, DataError
from polyturn.core.lifecycle import StopReason
from polyturn.core.reward import Reward
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.rollout.limits import Limits
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import task, tiny_codec
from support.compat_parts import looping, output, play_loop, prompt_of, say
from support.refusals import refuses, refuses_later

SEARCH = "<search>a</search> and more words"


def trains_what_was_sampled(trajectory: Trajectory) -> bool:
    return all(np.array_equal(s.loss_weights > 0, s.sampled_mask) for s in trajectory.segments)


async def two_turns(loop: AgentLoopBase, params: Any, **kwargs: Any) -> AgentLoopOutput:
    """Ask, add feedback of its own, ask again."""
    metrics: dict[str, float] = {}
    prompt = await prompt_of(loop, kwargs)
    with simple_timer("generate_sequences", metrics):
        one = await say(loop, prompt, params)
    assert one.log_probs is not None
    assert len(one.log_probs) == len(one.token_ids)
    feedback = loop.tokenizer.encode(f" really, {kwargs['reward_model']['ground_truth']}?", add_special_tokens=False)
    two = await say(loop, [*prompt, *one.token_ids, *feedback], params)
    tail = loop.tokenizer.encode(" thanks", add_special_tokens=False)
    parts = ((one.token_ids, 1), (feedback, 0), (two.token_ids, 1), (tail, 0))
    fields = {"turn_scores": [0.25, 0.5], "note": "kept"}
    return output(prompt, *parts, num_turns=4, metrics=metrics, extra_fields=fields)


async def test_loop_output_becomes_the_trajectory() -> None:
    trajectory = await play_loop(looping(two_turns), ["five", "four"])
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.STOP, None)
    (segment,) = trajectory.segments
    assert [s.source.value for s in segment.spans] == ["prompt", "sampled", "observation", "sampled"]
    assert tiny_codec().decode(segment.spans[2].ids) == " really, 4?"
    assert trains_what_was_sampled(trajectory)
    assert (segment.logprobs[segment.sampled_mask] != 0).all()
    assert trajectory.turn_scores == (0.25, 0.5)
    assert trajectory.turns[-1].info["note"] == "kept"
    assert [t.message.text for t in trajectory.turns] == ["five", "four"]


async def test_turn_scores_without_a_turn_are_named(caplog: pytest.LogCaptureFixture) -> None:
    async def scored(loop: AgentLoopBase, params: Any, **kwargs: Any) -> AgentLoopOutput:
        prompt = await prompt_of(loop, kwargs)
        one = await say(loop, prompt, params)
        return output(prompt, (one.token_ids, 1), extra_fields={"turn_scores": [0.25, 0.5]})

    trajectory = await play_loop(looping(scored), ["five"])
    assert trajectory.turn_scores == (0.25,)
    assert "returned 2 turn_scores for 1 turns; the last 1 are dropped" in caplog.text


@pytest.mark.parametrize("changes", ["masked", "cut"])
async def test_mask_and_length_of_the_output_decide_what_is_trained(changes: str) -> None:
    async def run(loop: AgentLoopBase, params: Any, **kwargs: Any) -> AgentLoopOutput:
        o = await two_turns(loop, params, **kwargs)
        if changes == "cut":
            return o.model_copy(update={"response_ids": o.response_ids[:2], "response_mask": o.response_mask[:2]})
        first = o.response_mask.index(0)
        return o.model_copy(update={"response_mask": [1] * first + [0] * (len(o.response_mask) - first)})

    trajectory = await play_loop(looping(run), ["five and more", "four"])
    weights = [trajectory.span(t.spans[0]).loss_weights for t in trajectory.turns]
    assert sum(w.sum() for w in weights) == (2.0 if changes == "cut" else len(weights[0]))
    assert not weights[1].any()


async def test_ids_that_were_not_sampled_are_never_trained(caplog: pytest.LogCaptureFixture) -> None:
    async def retokenise(loop: AgentLoopBase, params: Any, **kwargs: Any) -> AgentLoopOutput:
        prompt = await prompt_of(loop, kwargs)
        ids = (await say(loop, prompt, params)).token_ids
        return output(prompt, ([ids[0] + 1, *ids[1:]], 1))

    trajectory = await play_loop(looping(retokenise), ["four"])
    assert not trajectory.segments[0].loss_weights.any()
    assert trajectory.turns[0].info["unsampled_masked_tokens"] == trajectory.num_sampled_tokens
    assert "did not sample there" in caplog.text


async def test_single_turn_loop_can_be_inherited() -> None:
    class Short(SingleTurnAgentLoop):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            out = await super().run(sampling_params, **kwargs)
            assert len(out.response_ids) == len(out.response_mask) == len(out.response_logprobs or [])
            assert out.extra_fields["turn_scores"] == out.extra_fields["tool_rewards"] == []
            return out.model_copy(update={"extra_fields": {**out.extra_fields, "mine": 1}})

    trajectory = await play_loop(Short, ["four"])
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.STOP, None)
    assert trains_what_was_sampled(trajectory)
    assert [turn.message.text for turn in trajectory.turns] == ["four"] and trajectory.turns[0].info["mine"] == 1


async def test_rewritten_history_opens_a_segment_for_each_output() -> None:
    async def forget(loop: AgentLoopBase, params: Any, **kwargs: Any) -> list[AgentLoopOutput]:
        prompts = [await loop.apply_chat_template([{"role": "user", "content": text}]) for text in ("one?", "two?")]
        return [output(prompt, ((await say(loop, prompt, params)).token_ids, 1)) for prompt in prompts]

    trajectory = await play_loop(looping(forget), ["a", "b"])
    assert len(trajectory.segments) == 2
    assert trains_what_was_sampled(trajectory)


# Limits and failures


async def test_limits_are_the_episodes() -> None:
    async def endless(loop: AgentLoopBase, params: Any, **kwargs: Any) -> AgentLoopOutput:
        ids = await prompt_of(loop, kwargs)
        while True:
            ids = [*ids, *(await say(loop, ids, params)).token_ids]

    trajectory = await play_loop(looping(endless), ["more"], limits=Limits(max_turns=3))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.MAX_TURNS, 3)
    trajectory = await play_loop(looping(endless), ["more"], limits=Limits(max_tokens=8))  # the first prompt is longer
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.turns


async def test_swallowed_limit_ends_the_trajectory() -> None:
    async def swallow(loop: AgentLoopBase, params: Any, **kwargs: Any) -> AgentLoopOutput:
        with contextlib.suppress(Exception):
            await say(loop, [1, 2, 3], params)
        return output([0], ([0], 1))

    trajectory = await play_loop(looping(swallow), ["x"], limits=Limits(max_context=2))
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.CONTEXT_FULL, None)


async def fails(loop: AgentLoopBase, params: Any, **kwargs: Any) -> Any:
    raise ValueError("no")


async def returns_none(loop: AgentLoopBase, params: Any, **kwargs: Any) -> Any:
    return None


async def returns_no_output(loop: AgentLoopBase, params: Any, **kwargs: Any) -> Any:
    await say(loop, await prompt_of(loop, kwargs), params)
    return []


async def asks_nothing(loop: AgentLoopBase, params: Any, **kwargs: Any) -> Any:
    return output([1])


@pytest.mark.parametrize("run", [fails, returns_none, returns_no_output, asks_nothing])
async def test_failing_loop_fails_its_trajectory(run: Any) -> None:
    trajectory = await play_loop(looping(run), ["x"])
    assert trajectory.stop_reason is StopReason.ERROR
    assert "agent loop" in str(trajectory.error)


CALL = '<tool_call>\n{"name": "double", "arguments": {"x": 21}}\n</tool_call>'


class React(AgentLoopBase):
    """A graph of model and tool that runs, as in the recipe langgraph_agent, in its own tasks, and swallows errors."""

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
            return output([0], ([0], 1))
        first = len(self.ids) - len(self.mask)
        return AgentLoopOutput(prompt_ids=self.ids[:first], response_ids=self.ids[first:], response_mask=self.mask)

    async def say(self, sampling_params: dict[str, Any]) -> FunctionCall | None:
        ids = (await say(self, self.ids, sampling_params)).token_ids
        self.ids, self.mask = [*self.ids, *ids], [*self.mask, *[1] * len(ids)]
        _, calls = await ToolParser.get_tool_parser("hermes", self.tokenizer).extract_tool_calls(ids)
        return calls[0] if calls else None


async def test_loop_calls_the_tool_that_the_model_asks_for() -> None:
    trajectory = await play_loop(React, [CALL, "It is 42."])
    call, answer = (turn.message for turn in trajectory.turns)
    assert [c.name for c in call.tool_calls] == ["double"]
    assert answer.text == "It is 42."
    (segment,) = trajectory.segments
    assert segment.spans[2].source is SpanSource.OBSERVATION
    assert "42" in tiny_codec().decode(segment.spans[2].ids)
    assert trains_what_was_sampled(trajectory)
    endless = await play_loop(React, [CALL], limits=Limits(max_turns=2))
    assert (endless.stop_reason, len(endless.turns)) == (StopReason.MAX_TURNS, 2)
    assert trains_what_was_sampled(endless)


# How loops are made and named


async def test_first_form_of_a_loop_gets_messages() -> None:
    class First(AgentLoopBase):
        def __init__(self, config: Any, server_manager: Any, tokenizer: Any) -> None:
            super().__init__(config, server_manager, tokenizer)
            self.length = config.actor_rollout_ref.rollout.response_length

        async def run(self, messages: list[dict[str, Any]], sampling_params: dict[str, Any]) -> AgentLoopOutput:  # type: ignore[override]
            ids = await self.apply_chat_template(messages)
            answer: Any = await say(self, ids, sampling_params)
            assert isinstance(answer, list)
            assert len(answer) == len(answer.log_probs)  # type: ignore[attr-defined]
            return output(ids, (answer[: self.length], 1), reward_score=0.75)

    trajectory = await play_loop(First, ["four"])
    assert trajectory.reward is not None and trajectory.reward.total == 0.75
    assert trains_what_was_sampled(trajectory)


@pytest.mark.parametrize("score", [0.75, None, float("nan")])
async def test_reward_score_of_a_loop_replaces_the_reward_function(score: float | None) -> None:
    async def run(loop: AgentLoopBase, params: Any, **kwargs: Any) -> AgentLoopOutput:
        prompt = await prompt_of(loop, kwargs)
        fields = {"reward_extra_info": {"acc": True}}
        sampled = ((await say(loop, prompt, params)).token_ids, 1)
        return output(prompt, sampled, reward_score=score, extra_fields=fields)

    trajectory = await play_loop(looping(run), ["four"])
    if score == 0.75:
        assert trajectory.reward == Reward(total=0.75, components={"outcome": 0.75, "tool_step": 0.0}, info={"acc": True})
        assert not trajectory.turns[0].scores
    elif score is None:
        assert trajectory.reward is not None and trajectory.reward.total == 1.0  # the row's own function
    else:
        assert trajectory.stop_reason is StopReason.ERROR and "agent loop" in str(trajectory.error)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"stop": ["</search>"]}, "<search>a</search>"),
        ({"stop": "</search>"}, "<search>a</search>"),
        ({"max_tokens": 2}, None),
        ({}, SEARCH),
    ],
    ids=["stops", "stop", "max_tokens", "none"],
)
async def test_loop_limits_a_turn(changes: dict[str, Any], text: str | None) -> None:
    async def run(loop: AgentLoopBase, params: Any, **kwargs: Any) -> AgentLoopOutput:
        prompt = await prompt_of(loop, kwargs)
        one = (await say(loop, prompt, {**params, **changes})).token_ids
        two = (await say(loop, [*prompt, *one], params)).token_ids
        return output(prompt, ([*one, *two], 1))

    trajectory = await play_loop(looping(run), [SEARCH])
    first, second = (turn.message.written or turn.message.text for turn in trajectory.turns)
    assert first == text or (text is None and 0 < len(tiny_codec().encode(first)) <= 2)
    assert second == SEARCH  # the limits are those of one turn
    assert trains_what_was_sampled(trajectory)


async def test_sampling_that_is_not_applied_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run(loop: AgentLoopBase, params: Any, **kwargs: Any) -> AgentLoopOutput:
        prompt = await prompt_of(loop, kwargs)
        for _ in range(2):
            ids = (await say(loop, prompt, {**params, "temperature": 0.1, "top_p": None, "logprobs": 1})).token_ids
        return output(prompt, (ids, 1))

    await play_loop(looping(run), ["four"])
    (record,) = [r for r in caplog.records if r.levelname == "WARNING" and "not applied" in r.getMessage()]
    assert "temperature=0.1" in record.getMessage()


async def test_row_chooses_its_loop_by_name() -> None:
    cls = register("two_turns_in_test")(looping(two_turns))
    assert get_agent_loop_class("two_turns_in_test") is cls
    by_row = AgentLoopScheduler()
    own, native, unknown = (task(extra={"agent_name": n}) for n in ("two_turns_in_test", "tool_agent", "nothing"))
    assert len((await play_loop(by_row, ["a", "b"], row=own)).turns) == 2
    assert len((await play_loop(by_row, ["a", "b"], row=native)).turns) == 1
    await refuses_later(lambda: play_loop(by_row, ["a"], row=unknown), ValueError, "nothing")
    refuses(lambda: by_row.check_task(unknown), DataError, "'t0'", "nothing", "agent_loop_config_path")
    by_row.check_task(own)
    refuses(lambda: MultiTurnScheduler().check_task(own), DataError, "'two_turns_in_test'")
    MultiTurnScheduler().check_task(native)


class Named(AgentLoopBase):
    """Reads an argument of its own, and a key of the run's config."""

    def __init__(self, *args: Any, suffix: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.suffix = suffix

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        ids = await prompt_of(self, kwargs)
        section = self.config.actor_rollout_ref
        seen = {"model": section.model.path, "format": section.rollout.multi_turn.format, "end": self.suffix}
        return output(ids, ((await say(self, ids, sampling_params)).token_ids, 1), extra_fields=seen)


async def test_file_of_loops_names_classes_arguments_and_the_default() -> None:
    items = {"named": {"_target_": f"{__name__}.Named", "suffix": "!"}}
    tree = {"actor_rollout_ref": {"model": {"path": "org/tiny"}, "rollout": {"multi_turn": {"format": None}}}}
    for default, row in (("named", task()), ("single_turn_agent", task(extra={"agent_name": "named"}))):
        scheduler = AgentLoopScheduler(loops=items, default=default, config=tree)
        info = (await play_loop(scheduler, ["a", "b"], row=row)).turns[-1].info
        assert {k: info[k] for k in ("model", "format", "end")} == {"model": "org/tiny", "format": "hermes", "end": "!"}
    own = AgentLoopScheduler(loops={"tool_agent": items["named"]}, default="tool_agent", config=tree)
    assert (await play_loop(own, ["a", "b"])).turns[-1].info["end"] == "!"
    native = AgentLoopScheduler(loops={"tool_agent": {"_target_": "polyturn.compat.verl.tool_agent_loop.ToolAgentLoop"}})
    assert native._loop_of(task(extra={"agent_name": "tool_agent"})) is None
    refuses(lambda: AgentLoopScheduler(loops={"wrong": {"_target_": "json.dumps"}}), ConfigError, "'wrong'", "'json.dumps'")
    with pytest.raises(ConfigError, match=r"'mine'.*`runs`.*`run`"):

        @register("mine")
        class Mine(AgentLoopBase):
            async def runs(self, sampling_params: Any, **kwargs: Any) -> None: ...


async def test_text_before_the_first_message_can_be_left_out() -> None:
    async def run(loop: AgentLoopBase, params: Any, **kwargs: Any) -> AgentLoopOutput:
        ids = await prompt_of(loop, kwargs)
        rest = await loop.apply_chat_template(list(kwargs["raw_prompt"]), remove_system_prompt=True)
        assert ids == [*loop.system_prompt, *rest]
        return output(ids, ((await say(loop, ids, params)).token_ids, 1))

    assert (await play_loop(looping(run), ["x"])).stop_reason is StopReason.STOP


async def test_parsers_answer_under_their_names() -> None:
    tokenizer = tiny_codec().tokenizer
    text = 'Sure.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    parser = ToolParser.get_tool_parser("hermes", tokenizer)
    content, calls = await parser.extract_tool_calls(tokenizer.encode(text, add_special_tokens=False))
    assert (content, [(c.name, json.loads(c.arguments)) for c in calls]) == ("Sure.", [("add", {"a": 1})])
    refuses(lambda: ToolParser.get_tool_parser("herms", tokenizer), ValueError, "herms")

    @ToolParser.register("mine_in_test")
    class Mine(ToolParser):
        async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
            return "", [FunctionCall(name="x", arguments="{}")]

    assert isinstance(ToolParser.get_tool_parser("mine_in_test", tokenizer), Mine)
    read = Qwen3XMLToolParser(None)._parse_xml_function_call  # verl's own tests call it
    whole = FunctionCall(name="pick", arguments='{"items": "a"}')
    assert read("pick><parameter=items>a</parameter><parameter=cut", None) == whole
    assert read("pick", []) is None


async def test_trajectories_are_numbered_within_equal_indices() -> None:
    found = await get_trajectory_info(step=3, index=[7, 7, 8, 7], validate=False)
    assert [f["rollout_n"] for f in found] == [0, 1, 0, 0]
    assert found[1] == {"step": 3, "sample_index": 7, "rollout_n": 1, "validate": False}
