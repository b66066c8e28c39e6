"""Converts dataset rows to tasks.

    {"prompt": "What is 2+2?", "ground_truth": "4", "interaction": "gsm8k"}                            a native row
    {"prompt": [{"role": "user", ...}], "data_source": "openai/gsm8k",
     "reward_model": {"style": "rule", "ground_truth": "4"},
     "extra_info": {"index": 0, "tools_kwargs": {"calc": {"create_kwargs": {...}}},
                    "interaction_kwargs": {"name": "gsm8k", "ground_truth": "4"}}}                     nested columns
      ->  Task(id="train-0", prompt=(Message(...),), ground_truth="4", tools=("calc",), interaction=InteractionRef("gsm8k"))
    {"messages": [{"role": "user", ...}, {"role": "assistant", ...}], "solution": "4", ...}               a conversation
      ->  Task(prompt=(the user's message,), ground_truth="4", extra={"solution": "4", ...})
    {"query": "And 2+3?", "history": [["2+2?", "4"]], "system": "Be brief.", "response": "5", ...}     the same, in parts

All later code reads typed values. An invalid row raises a `DataError` with the file, the row, the key and the value.
Parquet fills missing keys with None, so keys with None count as absent. In `tools_kwargs`, a tool that is None, or whose
kwargs are all None, belongs to other rows and is left out; a tool with empty kwargs belongs to this row.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from polyturn.core.errors import DataError, did_you_mean
from polyturn.core.media import KINDS, as_samples, kind_of
from polyturn.core.messages import Message
from polyturn.core.task import NATIVE_AGENTS, InteractionRef, Task, ToolKwargs
from polyturn.data.media import COLUMNS, with_media
from polyturn.infra.nesting import MAX_DEPTH, is_deep

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles that a message of a prompt may have."""

CONVERSATION_ROLES: Mapping[Any, str] = {"tool_response": "tool", "observation": "tool"}
"""Role in a row's `messages` -> its name in a prompt, if different."""

DEFAULT_INTERACTION = "gsm8k"
"""The interaction of a row whose `interaction_kwargs` have no name."""

_TOOL_KWARGS = tuple(f.name for f in fields(ToolKwargs))
_PARTNERS = frozenset({"interaction_kwargs", "tools", "tools_kwargs", "tool_kwargs", "tool_selection", "need_tools_kwargs"})
"""Keys of a row and of its `extra_info` that become fields of the task."""
_TYPED = _PARTNERS | {"id", "prompt", "data_source", "ground_truth", "reward_model", "extra_info", "interaction"}
"""Keys of a row that become fields of the task. All other keys, and the rest of `extra_info`, go to `Task.extra`."""


@functools.cache
def near_column(name: str) -> tuple[str, str] | None:
    """Return a column that polyturn does not read and the one of its own columns that it nearly spells; None otherwise."""
    near = difflib.get_close_matches(name, (*_TYPED, *COLUMNS, "messages"), n=1, cutoff=0.88)
    return (name, near[0]) if near else None


def task_from_row(row: Mapping[str, Any], *, index: int, split: str, source: str, where: str | None = None) -> Task:
    """Return the task of a row.

    A row's `extra_info` may have `interaction_kwargs`, `tools_kwargs` (or `tool_kwargs`) and `tool_selection`, which
    override keys of the same name in the row. The tools of a task are `tool_selection` or `tools` if the row has one of
    them, else the keys of `tools_kwargs`, else None: all tools. A name in `tools` must be configured. A name in the other
    columns, which may serve other runs, is left out if it is not configured. `interaction_kwargs` without a name mean the
    interaction "gsm8k"; its kwargs then have no "name", which distinguishes a default name from a written one.

    Args:
        row: The row; None counts as absent, and NumPy values are converted to Python values.
        index: The position in the dataset; the task's id is "<split>-<index>" unless the row has an `id`.
        split: "train", "eval" or "serve".
        source: The file, for error messages.
        where: The file and the row's line or number, for error messages; None uses `source` and `index`.

    Raises:
        DataError: the row has no prompt, an unknown role, or a value of the wrong type.
    """
    reader = _RowReader(source, f"{source}, row {index}" if where is None else where)
    if is_deep(row):
        reader.fail(f"the row is nested deeper than {MAX_DEPTH} lists and objects; flatten it")
    columns: Any = _plain(row)
    if not isinstance(columns, Mapping):
        reader.fail(f"a row must be an object with keys, not {_show(columns)}")
    identity = columns.get("id", f"{split}-{index}")
    if not isinstance(identity, str | int):
        reader.fail(f"'id' must be a string or an integer, not {_show(identity)}")
    if isinstance(columns.get("query"), str) and not {"prompt", "messages"} & columns.keys():
        columns = reader.in_messages(columns)
    is_conversation = "messages" in columns and "prompt" not in columns
    return Task(
        id=str(identity),
        data_source=reader.text(columns, "data_source"),
        **(reader.conversation(columns) if is_conversation else reader.native(columns)),
    )


class _RowReader:
    """Reads one row; its position is part of every error message."""

    def __init__(self, source: str, where: str) -> None:
        self.source = source
        self.where = where

    def fail(self, what: str) -> NoReturn:
        raise DataError(f"{self.where}: {what}")

    def native(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the task's fields for a row with a prompt."""
        extra = self.mapping(row, "extra_info") or {}
        truth = (self.mapping(row, "reward_model") or {}).get("ground_truth", row.get("ground_truth"))
        of_row = {k: v for k, v in row.items() if k not in _TYPED and k not in COLUMNS}
        return {
            "prompt": self.prompt(row),
            "ground_truth": truth,
            "extra": of_row | {k: v for k, v in extra.items() if k not in _PARTNERS and k not in COLUMNS},
            **self.partners(row, extra, truth, self.names(_first(extra, row, "tools"), "tools")),
        }

    def in_messages(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a row with `query` and `history` as a row with `messages`; the `response`, its answer, is left out."""
        history = row.get("history") or []
        if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
            self.fail(f"'history' must be a list of pairs [query, response], not {_show(history)}")
        texts = [text for pair in history for text in pair] + [row["query"]]
        roles = ("user", "assistant")
        messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
        return {**{k: v for k, v in row.items() if k not in ("query", "history", "response")}, "messages": messages}

    def conversation(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the task's fields for a row with a conversation in `messages`; the last answer is left out, all other
        columns are kept. The column `system` is the system message of a conversation without one."""
        messages = row["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
            self.fail(f"'messages' must be a list of messages, not {_show(messages)}")
        roles = [{**m, "role": _named(m.get("role"))} for m in messages]
        while roles and roles[-1]["role"] == "assistant":
            roles.pop()
        if not roles:
            self.fail("'messages' has no message for the model to answer")
        if isinstance(system := row.get("system"), str) and system and roles[0]["role"] != "system":
            roles.insert(0, {"role": "system", "content": system})
        rest = {k: v for k, v in row.items() if k not in ("messages", "tools", *COLUMNS)}
        extra = row.get("extra_info")
        truth = rest.get("solution", rest.get("ground_truth"))
        if truth is None and isinstance(rest.get("reward_model"), Mapping):
            truth = rest["reward_model"].get("ground_truth")
        return {
            "prompt": self.prompt({**{k: row[k] for k in COLUMNS if k in row}, "prompt": roles}),
            "ground_truth": truth,
            "extra": rest,
            **self.partners(row, extra if isinstance(extra, Mapping) else {}, truth, self.schema_names(row.get("tools"))),
        }

    def partners(
        self, row: Mapping[str, Any], extra: Mapping[str, Any], truth: Any, native: tuple[str, ...] | None
    ) -> dict[str, Any]:
        """Return the task's fields for tools and interaction; `native` are the names in the column `tools`."""
        is_single = _first(extra, row, "agent_name") == NATIVE_AGENTS[0]
        kwargs = self.tools_kwargs(_first(extra, row, "tools_kwargs", "tool_kwargs"))
        chosen = self.names(_first(extra, row, "tool_selection"), "tool_selection")
        chosen = native if chosen is None else chosen
        needs = _first(extra, row, "need_tools_kwargs")
        if not isinstance(needs, bool | None):
            self.fail(f"'need_tools_kwargs' must be true or false, not {_show(needs)}")
        if chosen is None and (kwargs is not None or needs is False):
            chosen = tuple(kwargs or ())
        return {
            "tools": () if is_single else chosen,
            "skips_unknown_tools": chosen is not native,
            "needs_tools": needs is True and not is_single,
            "tools_kwargs": kwargs or {},
            "interaction": None if is_single else self.interaction(row, extra, truth),
        }

    def schema_names(self, value: Any) -> tuple[str, ...] | None:
        """Return the names in the column `tools`, a list of names or schemas, or that as JSON; they must be configured."""
        try:
            names = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            self.fail(f"'tools' must be a list of tools, or such a list as JSON, not {_show(value)}")
        if isinstance(names, list) and all(isinstance(t, Mapping) for t in names):
            functions = [t.get("function", t) for t in names]
            names = [f.get("name") if isinstance(f, Mapping) else f for f in functions]
        return self.names(names, "tools")

    def mapping(self, row: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
        value = row.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.fail(f"{key!r} must be an object with keys, not {_show(value)}")
        return value

    def text(self, row: Mapping[str, Any], key: str) -> str | None:
        value = row.get(key)
        if value is not None and not isinstance(value, str):
            self.fail(f"{key!r} must be a string, not {_show(value)}")
        return value

    def prompt(self, row: Mapping[str, Any]) -> tuple[Message, ...]:
        value = row.get("prompt")
        if value is None:
            others = f" The row has {sorted(row)}." if row else ""
            self.fail(f"'prompt' is missing or null; use a string or a list of messages.{others}{advice_for(row)}")
        if isinstance(value, str) and not value.strip() and not COLUMNS.keys() & row.keys():
            self.fail("'prompt' is an empty text; write a prompt, or leave the row out")
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        if not isinstance(value, list) or not value:
            self.fail(f"'prompt' must be a string or a list of at least one message, not {_show(value)}{_as_list(value)}")
        try:
            value = with_media(value, row, base=Path(self.source).parent)
        except DataError as problem:
            self.fail(str(problem))
        return tuple(self.message(m, i) for i, m in enumerate(value))

    def message(self, data: Any, position: int) -> Message:
        at = f"prompt[{position}]"
        if not isinstance(data, Mapping):
            self.fail(f"{at} must be a message such as {{'role': 'user', 'content': '…'}}, not {_show(data)}")
        role, content = data.get("role"), data.get("content")
        if role not in ROLES:
            self.fail(f"{at} has the role {_show(role)}.{did_you_mean(str(role), ROLES)}")
        if content is not None and not isinstance(content, str | list):
            self.fail(f"the content of {at} must be a string or a list of parts, not {_show(content)}")
        if content is None and role != "assistant":
            self.fail(f"{at} has no content; only an assistant message may lack it")
        for key in ("name", "tool_call_id", "reasoning_content", "reasoning"):
            if not isinstance(data.get(key, ""), str):
                self.fail(f"the {key} of {at} must be a string, not {_show(data[key])}")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, Mapping):
                continue
            if not isinstance(part.get("text", ""), str):
                self.fail(f"the text of {at}, part {number}, must be a string, not {_show(part['text'])}")
            if part.get("type") not in (None, "text") and kind_of(part) is None:
                self.fail(f"{at}, part {number}, has the type {_show(part['type'])}; use text, {', '.join(KINDS)}")
        calls = data.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(c, Mapping) for c in calls):
            self.fail(f"the tool_calls of {at} must be a list of calls, not {_show(calls)}")
        try:
            return Message.from_openai(data)
        except DataError as problem:
            self.fail(f"{at}: {problem}")

    def tools_kwargs(self, value: Any) -> dict[str, ToolKwargs] | None:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.fail(f"'tools_kwargs' must map tool names to their kwargs, not {_show(value)}")
        return {name: self.tool(name, of) for name, of in value.items()}

    def tool(self, name: str, of: Any) -> ToolKwargs:
        if not isinstance(of, Mapping):
            self.fail(f"tools_kwargs[{name!r}] must be an object with keys such as 'create_kwargs', not {_show(of)}")
        for key, value in of.items():
            if key not in _TOOL_KWARGS:
                self.fail(f"tools_kwargs[{name!r}] has the unknown key {key!r}.{did_you_mean(key, _TOOL_KWARGS)}")
            if not isinstance(value, Mapping):
                self.fail(f"tools_kwargs[{name!r}][{key!r}] must be an object with keys, not {_show(value)}")
        return ToolKwargs(**of)

    def names(self, value: Any, key: str) -> tuple[str, ...] | None:
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(n, str) for n in value):
            self.fail(f"{key} must be a list of names of configured tools, not {_show(value)}")
        return tuple(value)

    def interaction(self, row: Mapping[str, Any], extra: Mapping[str, Any], truth: Any) -> InteractionRef | None:
        native = row.get("interaction")
        if native is not None:
            return self.native_interaction(native, truth)
        kwargs = extra.get("interaction_kwargs") or row.get("interaction_kwargs")
        if not kwargs:
            return None
        if not isinstance(kwargs, Mapping):
            self.fail(f"'interaction_kwargs' must be an object with keys, not {_show(kwargs)}")
        name = kwargs.get("name", DEFAULT_INTERACTION)
        if not isinstance(name, str):
            self.fail(f"the 'name' in interaction_kwargs must be a string, not {_show(name)}")
        return InteractionRef(name=name, kwargs=kwargs, is_optional=True)

    def native_interaction(self, value: Any, truth: Any) -> InteractionRef:
        """Read `interaction`: a name, or a mapping with a name. A mapping without a ground truth gets the row's."""
        kwargs = {"name": value} if isinstance(value, str) else value
        if not isinstance(kwargs, Mapping) or not isinstance(kwargs.get("name"), str):
            self.fail(f"'interaction' must be a name or an object with a 'name', not {_show(value)}")
        own = {} if truth is None else {"ground_truth": truth}
        return InteractionRef(name=kwargs["name"], kwargs={**own, **kwargs})


QUESTIONS = ("question", "problem", "instruction", "query", "input", "task", "text", "user")
"""Columns that published data sets use instead of `prompt`."""


def _as_list(prompt: Any) -> str:
    """Return a hint on turning a single message into a prompt, or an empty string."""
    return "; write [message] around it" if isinstance(prompt, Mapping) and "content" in prompt else ""


def advice_for(row: Mapping[str, Any]) -> str:
    """Return a hint on converting a row of a common format into one with a prompt, or an empty string."""
    if (
        isinstance(turns := row.get("conversations"), list)
        and turns
        and isinstance(turns[0], Mapping)
        and "from" in turns[0]
    ):
        return (
            " This is ShareGPT's form: rename 'conversations' to 'messages', 'from' to 'role' (human to user, gpt to "
            "assistant), and 'value' to 'content'."
        )
    for name in QUESTIONS:
        if isinstance(row.get(name), str):
            return f" If {name!r} is the prompt, rename it, or set columns: {{prompt: {name}}}."
    return ""


def _named(role: Any) -> Any:
    """Return a role's name in prompts; other values are returned unchanged."""
    return CONVERSATION_ROLES.get(role, role) if isinstance(role, str) else role


def _first(extra: Mapping[str, Any], row: Mapping[str, Any], *keys: str) -> Any:
    """Look up `keys`, in order, in `extra_info` and then in the row, and return the first value; None if there is none."""
    return next((part[key] for part in (extra, row) for key in keys if key in part), None)


def _plain(value: Any, *, is_sound: bool = False) -> Any:
    """Return `value` with NumPy values as Python values, sequences as lists, and without keys whose value is None.

    The integer arrays of a sound are scaled to floats, because a list does not keep their type.
    """
    if isinstance(value, np.ndarray | np.generic):
        is_scaled = is_sound and value.dtype.kind in "iu" and value.dtype.itemsize < 8
        return _plain((as_samples(np.asarray(value)) if is_scaled else value).tolist(), is_sound=is_sound)
    if isinstance(value, Mapping):
        sounds = {"audios", *(("audio", "audio_url") if kind_of(value) == "audio" and "type" in value else ())}
        return {str(k): _plain(own, is_sound=k in sounds) for k, v in value.items() if (own := _own_tools(k, v)) is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [_plain(v, is_sound=is_sound) for v in value]
    return value


def _own_tools(key: Any, value: Any) -> Any:
    """Return tools_kwargs without other rows' tools, like {"calc": {"create_kwargs": {"x": None}}}; None if none is left."""
    if key not in ("tools_kwargs", "tool_kwargs") or not isinstance(value, Mapping):
        return value
    own = {name: of for name, of in value.items() if _has_value(of) or not _has_keys(of)}
    return own if own or not value else None


def _has_keys(kwargs: Any) -> bool:
    return isinstance(kwargs, Mapping) and any(isinstance(v, Mapping) and v for v in kwargs.values())


def _has_value(value: Any) -> bool:
    return any(map(_has_value, value.values())) if isinstance(value, Mapping) else value is not None


def _show(value: Any) -> str:
    text = repr(value)
    return f"{text[:77]}… ({type(value).__name__})" if len(text) > 80 else f"{text} ({type(value).__name__})"
