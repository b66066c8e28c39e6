"""The task of a dataset row, and the error about an unusable row: its file, its number and its key."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polyturn.core.errors import DataError
from polyturn.core.messages import Message
from polyturn.core.task import InteractionRef, Task, ToolKwargs
from polyturn.data.rows import task_from_row


def read(row: Any, index: int = 0, **more: Any) -> Task:
    return task_from_row(row, index=index, split="train", source="tasks.jsonl", **more)


def gsm8k(**kwargs: Any) -> InteractionRef:
    """Return the interaction of verl's column, which a run without interactions ignores."""
    return InteractionRef(name="gsm8k", kwargs=kwargs, is_optional=True)


def test_full_row_of_the_documented_shape() -> None:
    task = read(
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "system", "content": "Be right."}, {"role": "user", "content": "2+2?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {
                "split": "train",
                "index": 7,
                "need_tools_kwargs": True,
                "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "4"}}},
                "interaction_kwargs": {"name": "gsm8k", "ground_truth": "4"},
            },
        },
        index=7,
    )
    assert [m.role for m in task.prompt] == ["system", "user"]
    assert (task.data_source, task.ground_truth) == ("openai/gsm8k", "4")
    assert task.tools == ("calc",)
    assert task.tools_kwargs == {"calc": ToolKwargs(create_kwargs={"ground_truth": "4"})}
    assert task.interaction is not None
    assert task.extra == {"ability": "math", "split": "train", "index": 7}


TOOLS = {"calc": {}, "search": {}}
LEFT_TO_OTHERS = {"create_kwargs": {"ground_truth": None, "deep": {"x": None}}, "execute_kwargs": None}
"""Some writers of parquet fill the structs of other rows to the leaves."""
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "only a prompt": ({}, {"id": "train-0", "data_source": None, "tools": None, "interaction": None, "needs_tools": False}),
    "id": ({"id": 12}, {"id": "12"}),
    # interactions
    "interaction_kwargs": ({"interaction_kwargs": {"name": "gsm8k", "q": "1"}}, {"interaction": gsm8k(name="gsm8k", q="1")}),
    "inner wins": (
        {"interaction_kwargs": {"name": "top"}, "extra_info": {"interaction_kwargs": {"name": "gsm8k"}}},
        {"interaction": gsm8k(name="gsm8k")},
    ),
    "no name means gsm8k": ({"extra_info": {"interaction_kwargs": {"q": "4"}}}, {"interaction": gsm8k(q="4")}),
    "empty kwargs": ({"interaction_kwargs": {}}, {"interaction": None}),
    "kwargs of None": ({"extra_info": {"interaction_kwargs": {"name": None, "query": None}}}, {"interaction": None}),
    "native name": (
        {"ground_truth": "4", "interaction": "gsm8k"},
        {"interaction": InteractionRef(name="gsm8k", kwargs={"name": "gsm8k", "ground_truth": "4"})},
    ),
    "native mapping": (
        {"interaction": {"name": "weather", "city": "Delft"}},
        {"interaction": InteractionRef(name="weather", kwargs={"name": "weather", "city": "Delft"})},
    ),
    # tools
    "native tools": ({"tools": ["a"], "tools_kwargs": TOOLS}, {"tools": ("a",), "skips_unknown_tools": False}),
    "keys of kwargs": ({"tools_kwargs": TOOLS}, {"tools": ("calc", "search"), "skips_unknown_tools": True}),
    "selection wins": (
        {"extra_info": {"tool_kwargs": TOOLS, "tool_selection": ["search"]}},
        {"tools": ("search",), "skips_unknown_tools": True},
    ),
    "alias": ({"tool_kwargs": {"a": {}}}, {"tools": ("a",)}),
    "empty kwargs mean none": ({"tools_kwargs": {}}, {"tools": ()}),
    "missing kwargs mean all": ({"tools_kwargs": None}, {"tools": None}),
    "need": ({"need_tools_kwargs": True}, {"needs_tools": True}),
    "no need": ({"extra_info": {"need_tools_kwargs": False}}, {"tools": (), "needs_tools": False}),
    "no need, but kwargs": ({"need_tools_kwargs": False, "tools_kwargs": {"a": {}}}, {"tools": ("a",)}),
    "no need, but a selection": ({"need_tools_kwargs": False, "tool_selection": ["a"]}, {"tools": ("a",)}),
    "need in extra_info": ({"extra_info": {"need_tools_kwargs": True}}, {"needs_tools": True}),
    "kwargs of other rows": (
        {
            "extra_info": {
                "tools_kwargs": {"mine": {"create_kwargs": {"k": 0, "y": None}}, "none": None, "x": LEFT_TO_OTHERS}
            }
        },
        {"tools": ("mine",), "tools_kwargs": {"mine": ToolKwargs(create_kwargs={"k": 0})}},
    ),
    "tools without kwargs": ({"tools_kwargs": {"a": {}, "b": {"create_kwargs": None}}}, {"tools": ("a", "b")}),
    "single-turn agent": (
        {
            "agent_name": "single_turn_agent",
            "extra_info": {"need_tools_kwargs": True, "tools_kwargs": TOOLS, "interaction_kwargs": {"name": "gsm8k"}},
        },
        {"tools": (), "interaction": None, "needs_tools": False},
    ),
    "tool agent": ({"agent_name": "tool_agent"}, {"tools": None, "extra": {"agent_name": "tool_agent"}}),
    # the rest
    "numpy": ({"extra_info": {"index": np.int64(3)}}, {"extra": {"index": 3}}),
    "names of ours in extra_info": (
        {"ground_truth": "4", "extra_info": {"prompt": "as it was", "ground_truth": "5", "id": 7, "interaction": "old"}},
        {
            "ground_truth": "4",
            "interaction": None,
            "extra": {"prompt": "as it was", "ground_truth": "5", "id": 7, "interaction": "old"},
        },
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_columns_become_fields_of_the_task(name: str) -> None:
    row, fields = FIELDS[name]
    task = read({"prompt": "p", **row})
    assert {field: getattr(task, field) for field in fields} == fields
    assert task.prompt == (Message(role="user", content="p"),)


def test_earlier_turns_keep_tool_calls_and_parts() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "p", "image": None}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    for prompt in (messages, np.array(messages, dtype=object)):
        task = read({"prompt": prompt})
        assert task.prompt[0].content == ({"type": "text", "text": "p"},)
        assert task.prompt[1].tool_calls[0].arguments == {"a": 1}


P: dict[str, Any] = {"prompt": "p"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "p"}, "'prompt' ['question']"),
        ({"prompt": None}, "'prompt'"),
        ({"prompt": " "}, "'prompt' empty"),
        ({"messages": []}, "'messages'"),
        ({"query": "2+2?", "history": [["a"]]}, "'history' pairs"),
        ({"prompt": 3}, "'prompt' 3"),
        ({"prompt": []}, "message"),
        ({"prompt": ["hello"]}, "prompt[0]"),
        ({"prompt": [{"role": "usr", "content": "p"}]}, "prompt[0] 'usr' 'user'?"),
        ({"prompt": [{"content": "p"}]}, "prompt[0] role None"),
        ({"prompt": [{"role": "user"}]}, "prompt[0] content"),
        ({"prompt": [{"role": "user", "content": 4}]}, "content prompt[0]"),
        ({"prompt": [{"role": "user", "content": [{"type": "input_text", "text": "q"}]}]}, "prompt[0] part 0 'input_text'"),
        ({"prompt": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "prompt[0] name"),
        ({"prompt": [{"role": "assistant", "tool_calls": "x"}]}, "tool_calls prompt[0]"),
        ({**P, "data_source": 1}, "'data_source' 1"),
        ({**P, "id": [1]}, "'id' [1]"),
        ({**P, "reward_model": "rule"}, "'reward_model'"),
        ({**P, "extra_info": [1]}, "'extra_info'"),
        ({**P, "tools_kwargs": ["a"]}, "'tools_kwargs'"),
        ({**P, "tools_kwargs": {"a": 1}}, "tools_kwargs['a']"),
        ({**P, "tools_kwargs": {"a": {"create_kwarg": {}}}}, "'create_kwarg' 'create_kwargs'"),
        ({**P, "tools_kwargs": {"a": {"create_kwargs": 1}}}, "tools_kwargs['a']['create_kwargs']"),
        ({**P, "tools": [{"type": "function"}]}, "tools names"),
        ({**P, "tool_selection": "a"}, "tool_selection 'a'"),
        ({**P, "need_tools_kwargs": "yes"}, "'need_tools_kwargs' 'yes'"),
        ({**P, "interaction": {"city": "Delft"}}, "'interaction' 'name'"),
        ({**P, "interaction_kwargs": ["gsm8k"]}, "'interaction_kwargs'"),
        ({**P, "interaction_kwargs": {"name": 3}}, "'name' interaction_kwargs 3"),
        (["prompt"], "row object"),
        ({"messages": [{"role": "user", "content": "Hi"}], "tools": "calc"}, "'tools' JSON"),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, "ShareGPT 'messages'"),
    ],
)
def test_unusable_row_is_named_with_its_file_number_and_key(row: Any, words: str) -> None:
    with pytest.raises(DataError, match=r"^tasks.jsonl, line 41: ") as caught:
        read(row, index=1041, where="tasks.jsonl, line 41")
    assert [word for word in words.split() if word not in str(caught.value)] == [], caught.value


def test_row_of_messages_keeps_columns_and_loses_its_answer() -> None:
    row = {
        "messages": [
            {"role": "system", "content": "Solve it."},
            {"role": "user", "content": "<image>What is 2+2?"},
            {"role": "assistant", "content": "4"},
        ],
        "images": ["a.png"],
        "solution": "4",
        "env_config": {"name": "frozen_lake", "seed": 3},
        "reward_model": {"ground_truth": "four"},
        "extra_info": {"index": 7},
        "data_source": "grids",
    }
    task = read(row, index=2)
    assert [m.role for m in task.prompt] == ["system", "user"]
    assert len(task.prompt[1].media) == 1
    assert (task.id, task.data_source, task.ground_truth) == ("train-2", "grids", "4")
    assert task.extra == {k: row[k] for k in ("solution", "env_config", "reward_model", "extra_info", "data_source")}


def test_row_of_a_query_is_a_conversation() -> None:
    row = {"query": "And 2+3?", "history": [["2+2?", "4"]], "system": "Be brief.", "response": "5", "solution": "5"}
    task = read(row)
    assert [(m.role, m.text) for m in task.prompt] == [
        ("system", "Be brief."), ("user", "2+2?"), ("assistant", "4"), ("user", "And 2+3?"),
    ]  # fmt: skip
    assert task.ground_truth == "5" and "response" not in task.extra
    own = {"messages": [{"role": "system", "content": "Own."}, {"role": "user", "content": "a"}], "system": "Be brief."}
    assert [m.text for m in read(own).prompt] == ["Own.", "a"]


def test_tools_of_a_row_of_messages_are_names_or_schemas() -> None:
    schema = {"type": "function", "function": {"name": "calc", "parameters": {}}}
    for tools in ([schema], json.dumps([schema]), ["calc"]):
        assert read({"messages": [{"role": "user", "content": "Hi"}], "tools": tools}).tools == ("calc",)


@pytest.mark.parametrize("place", ["extra_info", "row"])
def test_row_of_messages_has_the_partners_of_a_row_with_a_prompt(place: str) -> None:
    given = {
        "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "4"}}},
        "interaction_kwargs": {"name": "gsm8k", "query": "2+2?"},
        "need_tools_kwargs": True,
    }
    messages = [{"role": "user", "content": "2+2?"}]
    rest = {"extra_info": given} if place == "extra_info" else given
    of_messages, of_prompt = (read({key: messages, **rest}) for key in ("messages", "prompt"))
    assert of_messages.interaction is not None and set(of_messages.tools_kwargs) == {"calc"} and of_messages.needs_tools
    assert replace(of_messages, extra={}) == replace(of_prompt, extra={})
