"""`use_inference_chat_template`: each turn is sampled from what the template renders, in as many segments as it edits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyturn
from polyturn.core.generation import GenerateRequest
from polyturn.core.messages import Message
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context, task, tiny_codec, turn_ids
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec

WRITES = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' -}}
{%- if m.role == 'assistant' and m.reasoning_content and CONDITION -%}
{{- '<think>\\n' + m.reasoning_content.strip() + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m.content -}}
{%- for c in m.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", ' -}}
{{- '"arguments": ' + (c.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
STRIPS_BEFORE_A_USER = WRITES.replace("CONDITION", "loop.index0 > ns.last")
"""As Qwen3: reasoning is kept until the user speaks again."""
STRIPS_ALL_BUT_THE_LAST = WRITES.replace("CONDITION", "loop.last")
"""As QwQ: only the last message keeps its reasoning, also between a call and its result."""
KEEPS = WRITES.replace("CONDITION", "true")
"""The repaired form."""

THINKS = "<think>\n2 and 2\n</think>\n\n2 + 2 = 4."
CALLS = '<think>\nlook it up\n</think>\n\n<tool_call>\n{"name": "find", "arguments": {"key": "why"}}\n</tool_call>'
CONCLUDES = "<think>\nclear\n</think>\n\nIt is arithmetic.\n#### 4"


@polyturn.tool
def find(key: str) -> str:
    """Find it.

    Args:
        key: What.
    """
    return "A basic operation."


class Why(MultiTurnScheduler):
    """Tools first; the first answer without a call draws a question."""

    async def step(self, episode: Any, turn: Any) -> Any:
        if turn.message.tool_calls:
            return await episode.call_tools(turn)
        return "Explain why." if turn.index == 0 else None


def context_of(says: Any, template: str, *, on: bool = True, **options: Any) -> tuple[RolloutContext, list[str]]:
    """A context with that template, and the prompts that its engine is going to see."""
    prompts: list[str] = []
    context = scripted_context([], scheduler=options.pop("scheduler", Why()), renders_history=on, **options)
    context.codec = Codec(tiny_tokenizer(), chat_template=template)
    spoken = iter(says)

    def answer(request: GenerateRequest) -> Any:
        prompts.append(tiny_codec().decode(request.prompt_ids))
        said = next(spoken)
        return turn_ids(said) if isinstance(said, str) else said

    context.engine._function = answer  # type: ignore[attr-defined]
    return context, prompts


def check_segments(t: Trajectory) -> None:
    """Each sampled token is owned by one segment, has its weight there, and none anywhere else."""
    weighted = sum(int((s.loss_weights > 0).sum()) for s in t.segments)
    assert weighted == t.num_sampled_tokens == int(t.metrics["sampled_tokens"])
    for segment in t.segments:
        assert np.array_equal(segment.loss_weights > 0, segment.sampled_mask)
        if segment.parent is not None:
            parent = t.segments[segment.parent.segment]
            length = segment.parent.length
            assert np.array_equal(parent.token_ids[:length], segment.token_ids[:length])


@pytest.mark.parametrize(
    ("template", "owners"),
    [(STRIPS_BEFORE_A_USER, [[0], [1, 2]]), (STRIPS_ALL_BUT_THE_LAST, [[0], [1], [2]]), (KEEPS, [[0, 1, 2]])],
)
async def test_a_dialogue_with_reasoning_and_a_call_has_one_segment_for_every_edit_of_its_history(template, owners):
    context, prompts = context_of([THINKS, CALLS, CONCLUDES], template, tools=[find])
    t = await run_episode(context, task(), id="e")
    assert not t.is_failed and len(t.turns) == 3
    found = [sorted({s.turn for s in seg.spans if s.source is SpanSource.SAMPLED}) for seg in t.segments]
    assert found == owners
    check_segments(t)
    for turn, prompt in zip(t.turns, prompts, strict=True):
        history = [*t.task.prompt]
        for earlier in t.turns[: turn.index]:
            history += [earlier.message, *earlier.observation]
        assert prompt == context.codec.template.render(
            history, tools=context.encoder_for(t.task).tools, add_generation_prompt=True
        )


@pytest.mark.parametrize("template", [STRIPS_BEFORE_A_USER, STRIPS_ALL_BUT_THE_LAST, KEEPS])
async def test_off_the_model_keeps_all_that_it_wrote_in_one_segment(template):
    context, prompts = context_of([THINKS, CALLS, CONCLUDES], template, on=False, tools=[find])
    t = await run_episode(context, task(), id="e")
    assert len(t.segments) == 1 and len(t.turns) == 3
    assert THINKS in prompts[1] and THINKS in prompts[2] and CALLS in prompts[2]
    check_segments(t)


async def test_the_limits_count_what_was_said_once_however_often_it_is_rendered():
    results = {}
    for on in (True, False):
        context, _ = context_of([THINKS] * 9, KEEPS, on=on, scheduler=Nags(), limits=Limits(max_tokens=150, max_turns=None))
        results[on] = await run_episode(context, task(), id="e")
    assert len(results[True].turns) == len(results[False].turns) > 2
    assert results[True].stop_reason is results[False].stop_reason
    stripping, _ = context_of(
        [THINKS] * 9, STRIPS_ALL_BUT_THE_LAST, scheduler=Nags(), limits=Limits(max_tokens=150, max_turns=None)
    )
    t = await run_episode(stripping, task(), id="e")
    assert len(t.turns) == len(results[True].turns) and len(t.segments) == len(t.turns)


class Nags(MultiTurnScheduler):
    def step(self, episode: Any, turn: Any) -> str:
        return "And?"


async def test_ids_that_no_tokenizer_would_choose_are_kept_where_they_spell_what_the_template_writes():
    codec = tiny_codec()
    odd = [int(codec.encode(c)[0]) for c in "four"]  # one token a letter, where the tokenizer merges
    assert codec.decode(odd) == "four" and len(codec.encode("four")) < 4
    ids = np.array([*odd, codec.stop_token_ids[0]], np.int32)
    context, prompts = context_of([ids, CONCLUDES], KEEPS)
    t = await run_episode(context, task(), id="e")
    assert len(t.segments) == 1 and t.span(t.turns[0].spans[0]).ids.tolist() == ids.tolist()
    assert "four<|im_end|>\n<|im_start|>user\nExplain why." in prompts[1]
    check_segments(t)


async def test_a_template_that_cannot_be_appended_to_is_rendered_whole(monkeypatch):
    from polyturn.core.errors import TemplateError
    from polyturn.tokens.delta import DeltaEncoder

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise TemplateError("this template cannot be appended to")

    monkeypatch.setattr(DeltaEncoder, "extend", refuse)
    context, _ = context_of([THINKS, CALLS, CONCLUDES], STRIPS_BEFORE_A_USER, tools=[find])
    t = await run_episode(context, task(), id="e")
    assert not t.is_failed and len(t.segments) == 2
    check_segments(t)


async def test_an_edit_of_a_step_and_its_answer_make_one_well_formed_prompt():
    class Forgets(MultiTurnScheduler):
        def step(self, episode: Any, turn: Any) -> Any:
            if turn.index:
                return None
            episode.rewrite([*episode.task.prompt, {"role": "assistant", "content": "I tried."}])
            return "Go on."

    context, prompts = context_of([THINKS, CONCLUDES], KEEPS, on=False, scheduler=Forgets())
    t = await run_episode(context, task(), id="e")
    history = [*t.task.prompt, Message(role="assistant", content="I tried."), Message(role="user", content="Go on.")]
    assert prompts[1] == context.codec.template.render(history, add_generation_prompt=True)
    assert len(t.segments) == 2 and t.segments[1].parent is not None
    check_segments(t)


async def test_an_edit_alone_lets_the_model_speak_again_and_before_the_first_turn_it_is_the_prompt():
    class Resets(MultiTurnScheduler):
        def on_trajectory_start(self, episode: Any) -> None:
            episode.rewrite([{"role": "user", "content": "You are in a maze."}])

        def step(self, episode: Any, turn: Any) -> Any:
            return (
                episode.rewrite([*episode.messages[:1], {"role": "user", "content": "A wall."}]) if turn.index < 2 else None
            )

    context, prompts = context_of([THINKS, THINKS, CONCLUDES], KEEPS, on=False, scheduler=Resets())
    t = await run_episode(context, task(), id="e")
    assert len(t.turns) == 3 and len(t.segments) == 3
    assert prompts[0].count("<|im_start|>") == 2 and "maze" in prompts[0]
    assert prompts[1] == prompts[2] and "A wall." in prompts[1] and "2 and 2" not in prompts[1]
    check_segments(t)


NO_FIELD = "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + SHOWN + '<|im_end|>\\n' -}}{%- endfor -%}" + (
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
WRITES_CONTENT = NO_FIELD.replace("SHOWN", "m.content")
"""As Qwen2.5 and Phi: reasoning is nothing but text."""
CUTS_CONTENT = NO_FIELD.replace("SHOWN", "(m.content if loop.last else m.content.split('</think>')[-1].lstrip('\\n'))")
"""As DeepSeek-R1 and QwQ: the template itself cuts the tags out of the contents of past turns."""


async def test_a_template_without_a_field_for_reasoning_keeps_it_as_the_model_wrote_it() -> None:
    context, prompts = context_of([THINKS, "<think>\nhm</think> Four."], WRITES_CONTENT)
    t = await run_episode(context, task(), id="e")
    assert t.turns[0].message.reasoning == "2 and 2"
    assert THINKS in prompts[1]
    assert len(t.segments) == 1


async def test_a_template_that_cuts_reasoning_out_of_contents_does_so() -> None:
    context, prompts = context_of([THINKS, "<think>\nhm</think> Four."], CUTS_CONTENT)
    t = await run_episode(context, task(), id="e")
    assert "<think>" not in prompts[1] and "2 + 2 = 4." in prompts[1]
    assert len(t.segments) == 2


async def test_by_default_reasoning_in_plain_text_is_no_difference() -> None:
    context, _ = context_of([THINKS, "<think>\nhm</think> Four."], WRITES_CONTENT, on=False)
    t = await run_episode(context, task(), id="e")
    assert t.metrics["sanity_checked"] == 1.0
    assert not [name for name in t.metrics if name.startswith("sanity_") and name != "sanity_checked"]
