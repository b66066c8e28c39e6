"""`use_inference_chat_template`: each turn is sampled behind a full render; each edit of the history opens a segment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyturn
from polyturn.core.generation import GenerateRequest
from polyturn.core.messages import Message
from polyturn.core.trajectory import SpanSource
from polyturn.engines.scripted import ScriptedEngine
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task, tiny_codec, turn_ids
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from support.parts import Steps, check_tokens

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


async def why(episode: Any, turn: Any) -> Any:
    """Run tools first; answer the first turn without a call with a question."""
    if turn.message.tool_calls:
        return await episode.call_tools(turn)
    return "Explain why." if turn.index == 0 else None


def context_of(
    says: Any, template: str, *, on: bool = True, step: Any = why, **options: Any
) -> tuple[RolloutContext, list[str]]:
    """Return a context with that template, and the list that collects the prompts of its engine."""
    prompts: list[str] = []
    spoken = iter(says)

    def answer(request: GenerateRequest) -> Any:
        prompts.append(tiny_codec().decode(request.prompt_ids))
        said = next(spoken)
        return turn_ids(said) if isinstance(said, str) else said

    context = scripted_context([], scheduler=Steps(step), renders_history=on, **options)
    context.codec = Codec(tiny_tokenizer(), chat_template=template)
    context.engine = ScriptedEngine(answer)
    return context, prompts


@pytest.mark.parametrize(
    ("template", "owners"),
    [(STRIPS_BEFORE_A_USER, [[0], [1, 2]]), (STRIPS_ALL_BUT_THE_LAST, [[0], [1], [2]]), (KEEPS, [[0, 1, 2]])],
)
async def test_every_edit_of_a_history_opens_a_segment(template: str, owners: list[list[int]]) -> None:
    context, prompts = context_of([THINKS, CALLS, CONCLUDES], template, tools=[find])
    t = await run_episode(context, task(), id="e")
    assert len(t.turns) == 3
    found = [sorted({s.turn for s in seg.spans if s.source is SpanSource.SAMPLED}) for seg in t.segments]
    assert found == owners
    check_tokens(t)
    for turn, prompt in zip(t.turns, prompts, strict=True):
        history = [*t.task.prompt]
        for earlier in t.turns[: turn.index]:
            history += [earlier.message, *earlier.observation]
        assert prompt == context.codec.template.render(
            history, tools=context.encoder_for(t.task).tools, add_generation_prompt=True
        )


async def test_limits_count_rendered_tokens_once() -> None:
    limits = Limits(max_tokens=150, max_turns=None)
    found = []
    for template, on in ((KEEPS, True), (KEEPS, False), (STRIPS_ALL_BUT_THE_LAST, True)):
        context, _ = context_of([THINKS] * 9, template, on=on, step=lambda episode, turn: "And?", limits=limits)
        found.append(await run_episode(context, task(), id="e"))
    assert len({len(t.turns) for t in found}) == len({t.stop_reason for t in found}) == 1
    assert len(found[2].segments) == len(found[2].turns) > 2


async def test_unusual_ids_are_kept_where_they_spell_the_render() -> None:
    codec = tiny_codec()
    odd = [int(codec.encode(c)[0]) for c in "four"]  # one token a letter, where the tokenizer merges
    assert len(codec.encode("four")) < 4
    ids = np.array([*odd, codec.stop_token_ids[0]], np.int32)
    context, prompts = context_of([ids, CONCLUDES], KEEPS)
    t = await run_episode(context, task(), id="e")
    assert len(t.segments) == 1
    assert t.span(t.turns[0].spans[0]).ids.tolist() == ids.tolist()
    assert "four<|im_end|>\n<|im_start|>user\nExplain why." in prompts[1]
    check_tokens(t)


async def test_template_that_cannot_be_appended_to_is_rendered_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyturn.core.errors import TemplateError
    from polyturn.tokens.delta import DeltaEncoder

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise TemplateError("this template cannot be appended to")

    monkeypatch.setattr(DeltaEncoder, "extend", refuse)
    context, _ = context_of([THINKS, CALLS, CONCLUDES], STRIPS_BEFORE_A_USER, tools=[find])
    t = await run_episode(context, task(), id="e")
    assert len(t.segments) == 2
    check_tokens(t)


async def test_edit_and_answer_make_one_prompt() -> None:
    def forget(episode: Any, turn: Any) -> Any:
        if turn.index:
            return None
        episode.rewrite([*episode.task.prompt, {"role": "assistant", "content": "I tried."}])
        return "Go on."

    context, prompts = context_of([THINKS, CONCLUDES], KEEPS, on=False, step=forget)
    t = await run_episode(context, task(), id="e")
    history = [*t.task.prompt, Message(role="assistant", content="I tried."), Message(role="user", content="Go on.")]
    assert prompts[1] == context.codec.template.render(history, add_generation_prompt=True)
    assert len(t.segments) == 2
    check_tokens(t)


async def test_edit_alone_lets_the_model_speak_again() -> None:
    def reset(episode: Any, turn: Any) -> Any:
        if turn.index == 2:
            return None
        return episode.rewrite([*episode.messages[:1], {"role": "user", "content": "A wall."}])

    class Resets(Steps):
        def on_trajectory_start(self, episode: Any) -> None:
            episode.rewrite([{"role": "user", "content": "You are in a maze."}])

    context, prompts = context_of([THINKS, THINKS, CONCLUDES], KEEPS, on=False)
    context.scheduler = Resets(reset)
    t = await run_episode(context, task(), id="e")
    assert (len(t.turns), len(t.segments)) == (3, 3)
    assert "maze" in prompts[0]
    assert prompts[1] == prompts[2]
    assert "A wall." in prompts[1]
    assert "2 and 2" not in prompts[1]
    check_tokens(t)


NO_FIELD = "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + SHOWN + '<|im_end|>\\n' -}}{%- endfor -%}" + (
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
WRITES_CONTENT = NO_FIELD.replace("SHOWN", "m.content")
"""As Qwen2.5 and Phi: reasoning is nothing but text."""
CUTS_CONTENT = NO_FIELD.replace("SHOWN", "(m.content if loop.last else m.content.split('</think>')[-1].lstrip('\\n'))")
"""As DeepSeek-R1 and QwQ: the template itself cuts the tags out of the contents of past turns."""


@pytest.mark.parametrize(("template", "num_segments"), [(WRITES_CONTENT, 1), (CUTS_CONTENT, 2)])
async def test_reasoning_without_a_field_follows_the_template(template: str, num_segments: int) -> None:
    context, prompts = context_of([THINKS, "<think>\nhm</think> Four."], template)
    t = await run_episode(context, task(), id="e")
    assert t.turns[0].message.reasoning == "2 and 2"
    assert (THINKS in prompts[1]) == (num_segments == 1)
    assert "2 + 2 = 4." in prompts[1]
    assert len(t.segments) == num_segments


async def test_reasoning_in_plain_text_is_not_a_difference() -> None:
    context, _ = context_of([THINKS, "<think>\nhm</think> Four."], WRITES_CONTENT, on=False)
    t = await run_episode(context, task(), id="e")
    assert [name for name in t.metrics if name.startswith("sanity_")] == ["sanity_checked"]
