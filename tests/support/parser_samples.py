"""One turn as each model family writes it, and damaged copies of it: what parsers are tested and fuzzed with.

    WRITINGS["hermes"]  ->  "<think>\\nI think.\\n</think>\\n\\nLet me see.\\n<tool_call>\\n{…}\\n</tool_call>\\n…"

Every writing says the same: the reasoning `REASONING`, the content `CONTENT` and the calls `CALLS` of the tools `TOOLS`.
"""

from __future__ import annotations

import random
from typing import Any

REASONING = "I think."
CONTENT = "Let me see."
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("find", {"query": 'Köln "am" Rhein\nnow', "limit": 3, "code": "07", "exact": True, "tags": ["a", {"b": 1}]}),
    ("now", {}),
)
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find a place.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer"},
                    "code": {"type": "string"},
                    "exact": {"type": "boolean"},
                    "tags": {"type": "array"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "Say the time.", "parameters": {"type": "object"}}},
)

_JSON = r'{"query": "Köln \"am\" Rhein\nnow", "limit": 3, "code": "07", "exact": true, "tags": ["a", {"b": 1}]}'
_THINK = f"<think>\n{REASONING}\n</think>\n\n{CONTENT}\n"
_VALUES = (
    ("query", 'Köln "am" Rhein\nnow'),
    ("limit", "3"),
    ("code", "07"),
    ("exact", "true"),
    ("tags", '["a", {"b": 1}]'),
)
_CODER = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in _VALUES)
_GLM = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in _VALUES)
_TIGHT_GLM = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in _VALUES)
_MINIMAX = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in _VALUES)
_PYTHON = r"""find(query='Köln "am" Rhein\nnow', limit=3, code="07", exact=True, tags=["a", {"b": 1}])"""
_SECTION, _CALL, _SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_END_CALL, _END_SECTION = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_ARGUMENT = "<|tool_call_argument_begin|>"

WRITINGS: dict[str, str] = {
    "hermes": _THINK
    + f'<tool_call>\n{{"name": "find", "arguments": {_JSON}}}\n</tool_call>\n'
    + '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": _THINK
    + f"<tool_call>\n<function=find>\n{_CODER}</function>\n</tool_call>\n"
    + "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "llama3": f"{_THINK}<|python_tag|>"
    + f'{{"name": "find", "parameters": {_JSON}}}; {{"name": "now", "parameters": {{}}}}',
    "pythonic": f"{_THINK}<|python_start|>[{_PYTHON}, now()]<|python_end|>",
    "mistral": f"[THINK]{REASONING}[/THINK]{CONTENT}[TOOL_CALLS]"
    + f'[{{"name": "find", "arguments": {_JSON}}}, {{"name": "now", "arguments": {{}}}}]',
    "deepseekv3": _THINK
    + f"{_SECTION}{_CALL}function{_SEP}find\n```json\n{_JSON}\n```{_END_CALL}\n"
    + f"{_CALL}function{_SEP}now\n```json\n{{}}\n```{_END_CALL}{_END_SECTION}",
    "deepseekv31": f"{_THINK}{_SECTION}{_CALL}find{_SEP}{_JSON}{_END_CALL}{_CALL}now{_SEP}{{}}{_END_CALL}{_END_SECTION}",
    "glm45": f"\n{_THINK}<tool_call>find\n{_GLM}</tool_call>\n<tool_call>now\n</tool_call>",
    "kimi_k2": f"{_THINK}<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0{_ARGUMENT}{_JSON}<|tool_call_end|>"
    + f"<|tool_call_begin|>functions.now:1{_ARGUMENT}{{}}<|tool_call_end|><|tool_calls_section_end|>",
    "gpt-oss": f"<|channel|>analysis<|message|>{REASONING}<|end|>"
    + f"<|start|>assistant<|channel|>commentary<|message|>{CONTENT}<|end|>"
    + f"<|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>{_JSON}<|call|>"
    + "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
    "minimax-m2": _THINK
    + f'<minimax:tool_call>\n<invoke name="find">\n{_MINIMAX}</invoke>\n'
    + '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "none": CONTENT,
}
VARIANTS: tuple[tuple[str, str], ...] = (
    ("llama3", f'{{"name": "find", "parameters": {_JSON}}};\n{{"name": "now", "parameters": {{}}}}'),
    ("pythonic", f"[{_PYTHON}, now()]"),
    ("lfm2", f"<|tool_call_start|>[{_PYTHON}, now()]<|tool_call_end|>"),
    ("mistral", f"[TOOL_CALLS]find[ARGS]{_JSON}[TOOL_CALLS]now[CALL_ID]abcDEF123[ARGS]{{}}"),
    ("mistral", f"[TOOL_CALLS]find{_JSON}[TOOL_CALLS]now{{}}"),
    (
        "glm47",
        f"<tool_call>find{_TIGHT_GLM}</tool_call><tool_call>now</tool_call>",
    ),
    ("qwen3_coder", f"<function=find>\n{_CODER}</function>\n</tool_call>\n<function=now>\n</function>\n</tool_call>"),
    (
        "gpt-oss",
        f" to=functions.find<|channel|>commentary json<|message|>{_JSON}<|call|>"
        "<|start|>assistant to=functions.now<|message|>{}",
    ),
)
"""(parser, text): other ways to write the two calls, without reasoning and content."""

PIECES: tuple[str, ...] = (
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<function=f>", "</function>"),
    *("<parameter=a>", "</parameter>", '<parameter name="a">', "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        '<invoke name="f">',
        "</invoke>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
    ),
    *(
        "<|python_tag|>",
        "<|python_start|>",
        "<|python_end|>",
        "[f(",
        "[f(a=",
        _SECTION,
        _CALL,
        _SEP,
        _END_CALL,
        _END_SECTION,
    ),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", _ARGUMENT, "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    *(
        "<|start|>",
        "<|channel|>",
        "analysis",
        "final",
        "<|message|>",
        "<|constrain|>",
        "<|end|>",
        "<|call|>",
        " to=functions.f",
    ),
    *(
        "<|im_end|>",
        "<|eot_id|>",
        "</s>",
        '{"name": 7, "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        "```json",
        "```",
    ),
    *(
        '"',
        "'",
        "\\",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        "<",
        ">",
        ",",
        ":",
        "=",
        "\n",
        " ",
        "\x00",
        "\ud800",
        "\u2028",
        "é",
        "日",
        "🙂",
    ),
    *("NaN", "1e999", "9" * 30, "-", "null", "None", "true", "\\u12", "[" * 70, "{" * 3, "functions.", "name", "json"),
)
"""What is put into writings to damage them: every family's tags, JSON in pieces, hard characters."""


def mutate(text: str, rng: random.Random) -> str:
    """Return a damaged copy of `text`: pieces cut out, put in, doubled, moved, cut off, or all of it drawn by chance."""
    if rng.random() < 0.05:
        return "".join(rng.choice(PIECES) for _ in range(rng.randrange(40)))
    for _ in range(rng.randrange(1, 6)):
        a, b = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        b = min(b, a + rng.choice((1, 3, 10, 40)))
        kind = rng.randrange(6)
        if kind == 0:
            text = text[:a] + text[b:]
        elif kind == 1:
            text = text[:a] + rng.choice(PIECES) + text[a:]
        elif kind == 2:
            text = text[:b] + text[a:]
        elif kind == 3:
            text = (
                text[: max(a, 1)]
                if rng.random() < 0.3
                else text[:a] + chr(rng.choice((32, 60, 34, 0x1F600, 0xD800))) + text[b:]
            )
        elif kind == 4:
            c = rng.randrange(len(text) + 1)
            text = text[:c] + text[a:b] + text[c:]
        else:
            text = text[:a] + rng.choice(PIECES) + text[b:]
    return text
