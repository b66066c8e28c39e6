"""What a dataset row may look like, and what is said about one that cannot be used."""

from __future__ import annotations

import json
import re
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


def test_a_string_prompt_is_one_user_message_and_no_data_source_is_needed() -> None:
    task = read(
        {"prompt": "What is 15% of 200?", "interaction_kwargs": {"name": "gsm8k", "query": "q", "ground_truth": "30"}}
    )
    assert task.prompt == (Message(role="user", content="What is 15% of 200?"),)
    assert task.data_source is None
    said = {"name": "gsm8k", "query": "q", "ground_truth": "30"}
    assert task.interaction == InteractionRef(name="gsm8k", kwargs=said, is_optional=True)
    assert task.tools is None
    assert task.id == "train-0"


def test_a_full_row_of_the_documented_shape() -> None:
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


def test_interaction_kwargs_in_extra_info_win_over_those_at_the_top_level() -> None:
    task = read(
        {
            "prompt": "p",
            "interaction_kwargs": {"name": "top"},
            "extra_info": {"interaction_kwargs": {"name": "inner"}},
        }
    )
    assert task.interaction is not None
    assert task.interaction.name == "inner"


@pytest.mark.parametrize("empty", [None, {}, {"name": None, "query": None}])
def test_empty_interaction_kwargs_mean_no_interaction(empty: Any) -> None:
    assert read({"prompt": "p", "interaction_kwargs": empty}).interaction is None
    assert read({"prompt": "p", "extra_info": {"interaction_kwargs": empty}}).interaction is None


def test_interaction_kwargs_without_a_name_mean_gsm8k_and_stay_without_a_name() -> None:
    """Users rely on this default."""
    task = read({"prompt": "p", "extra_info": {"interaction_kwargs": {"ground_truth": "4"}}})
    assert task.interaction == InteractionRef(name="gsm8k", kwargs={"ground_truth": "4"}, is_optional=True)


def test_a_native_interaction_is_a_name_or_a_mapping_and_hears_the_ground_truth() -> None:
    by_name = read({"prompt": "p", "ground_truth": "4", "interaction": "gsm8k"})
    assert by_name.interaction == InteractionRef(name="gsm8k", kwargs={"name": "gsm8k", "ground_truth": "4"})
    by_mapping = read({"prompt": "p", "interaction": {"name": "weather", "city": "Delft"}})
    assert by_mapping.interaction == InteractionRef(name="weather", kwargs={"name": "weather", "city": "Delft"})


def test_native_tools_and_id() -> None:
    task = read({"id": 12, "prompt": "p", "tools": ["a", "b"], "tools_kwargs": {"a": {"execute_kwargs": {"k": 1}}}})
    assert task.id == "12"
    assert task.tools == ("a", "b")
    assert task.tools_kwargs["a"].execute_kwargs == {"k": 1}


def test_tool_selection_wins_over_the_keys_of_tools_kwargs_and_tool_kwargs_is_an_alias() -> None:
    info = {"tool_kwargs": {"a": {}, "b": {}}, "tool_selection": ["b"]}
    task = read({"prompt": "p", "extra_info": info})
    assert task.tools == ("b",)
    assert set(task.tools_kwargs) == {"a", "b"}
    assert read({"prompt": "p", "tool_kwargs": {"a": {}}}).tools == ("a",)


def test_an_empty_tools_kwargs_means_no_tool_and_a_missing_one_means_all() -> None:
    assert read({"prompt": "p", "tools_kwargs": {}}).tools == ()
    assert read({"prompt": "p", "tools_kwargs": None}).tools is None


def test_the_none_that_parquet_fills_in_is_cleaned_away() -> None:
    task = read(
        {
            "prompt": [{"role": "user", "content": "p", "tool_calls": None, "name": None}],
            "data_source": None,
            "extra_info": {
                "tools_kwargs": {
                    "mine": {"create_kwargs": {"x": 1, "y": None}, "release_kwargs": None},
                    "of_other_rows": None,
                },
                "tool_selection": None,
            },
        }
    )
    assert task.tools == ("mine",)
    assert task.tools_kwargs == {"mine": ToolKwargs(create_kwargs={"x": 1})}
    assert task.prompt == (Message(role="user", content="p"),)


def test_a_tool_whose_kwargs_are_all_there_and_all_none_belongs_to_other_rows() -> None:
    """Some writers of parquet fill the structs of other rows to the leaves."""
    filled = {"create_kwargs": {"ground_truth": None, "deep": {"x": None}}, "execute_kwargs": None}
    row = {"prompt": "p", "extra_info": {"tools_kwargs": {"mine": {"create_kwargs": {"k": 0}}, "other": filled}}}
    assert read(row).tools == ("mine",)
    without_kwargs = {"prompt": "p", "tools_kwargs": {"mine": {}, "also_mine": {"create_kwargs": None}}}
    assert read(without_kwargs).tools == ("mine", "also_mine")


def test_only_a_name_in_the_native_column_must_be_configured() -> None:
    assert not read({"prompt": "p", "tools": ["a"]}).skips_unknown_tools
    assert not read({"prompt": "p", "tools": ["a"], "tools_kwargs": {"a": {}, "b": {}}}).skips_unknown_tools
    assert read({"prompt": "p", "tools_kwargs": {"a": {}}}).skips_unknown_tools
    assert read({"prompt": "p", "extra_info": {"tool_selection": ["a"]}}).skips_unknown_tools


@pytest.mark.parametrize("place", ["top", "extra_info"])
def test_a_row_may_say_that_it_needs_tools(place: str) -> None:
    keys = {"need_tools_kwargs": True}
    assert read({"prompt": "p", **keys} if place == "top" else {"prompt": "p", "extra_info": keys}).needs_tools
    assert not read({"prompt": "p"}).needs_tools


def test_a_row_for_the_single_turn_agent_has_neither_tools_nor_an_interaction() -> None:
    info = {"need_tools_kwargs": True, "tools_kwargs": {"a": {}}, "interaction_kwargs": {"name": "gsm8k"}}
    task = read({"prompt": "p", "agent_name": "single_turn_agent", "extra_info": info})
    assert (task.tools, task.interaction, task.needs_tools) == ((), None, False)
    other = read({"prompt": "p", "agent_name": "tool_agent", "extra_info": info})
    assert other.tools == ("a",)
    assert other.extra["agent_name"] == "tool_agent"


def test_numpy_values_are_taken_as_plain_ones() -> None:
    row = {"prompt": np.array([{"role": "user", "content": "p"}], dtype=object), "extra_info": {"index": np.int64(3)}}
    task = read(row)
    assert task.prompt[0].content == "p"
    assert task.extra["index"] == 3
    assert type(task.extra["index"]) is int


def test_earlier_turns_of_a_prompt_keep_their_tool_calls_and_parts() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    task = read(
        {
            "prompt": [
                {"role": "user", "content": [{"type": "text", "text": "p", "image": None}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "1", "tool_call_id": "c"},
            ]
        }
    )
    assert task.prompt[0].content == ({"type": "text", "text": "p"},)
    assert task.prompt[1].tool_calls[0].arguments == {"a": 1}


P: dict[str, Any] = {"prompt": "p"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "p"}, "there is no 'prompt'.*The row has ['question']"),
        ({"prompt": None}, "there is no 'prompt', or it is null; give a string or a list of messages."),
        ({"prompt": " "}, "'prompt' is an empty text; write what the model is asked"),
        ({"messages": []}, "'messages' holds no message that the model could answer"),
        ({"prompt": 3}, "'prompt' must be a string or a list.*not 3 (int)"),
        ({"prompt": []}, "at least one message"),
        ({"prompt": ["hello"]}, "prompt[0] must be a message"),
        ({"prompt": [{"role": "usr", "content": "p"}]}, "prompt[0] has the role 'usr' (str). Did you mean 'user'?"),
        ({"prompt": [{"content": "p"}]}, "prompt[0] has the role None"),
        ({"prompt": [{"role": "user"}]}, "prompt[0] has no content"),
        ({"prompt": [{"role": "user", "content": 4}]}, "the content of prompt[0] must be a string"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "p"}, {"type": "input_text", "text": "q"}]}]},
            "prompt[0], part 1, has the type 'input_text' (str); use text, image",
        ),
        ({"prompt": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "prompt[0]: a tool call needs a name"),
        ({"prompt": [{"role": "assistant", "tool_calls": "x"}]}, "the tool_calls of prompt[0] must be a list"),
        ({**P, "data_source": 1}, "'data_source' must be a string, not 1 (int)"),
        ({**P, "id": [1]}, "'id' must be a string or an integer, not [1]"),
        ({**P, "reward_model": "rule"}, "'reward_model' must be an object"),
        ({**P, "extra_info": [1]}, "'extra_info' must be an object"),
        ({**P, "tools_kwargs": ["a"]}, "'tools_kwargs' must map tool names"),
        ({**P, "tools_kwargs": {"a": 1}}, "tools_kwargs['a'] must be an object"),
        ({**P, "tools_kwargs": {"a": {"create_kwarg": {}}}}, "'create_kwarg'. Did you mean 'create_kwargs'"),
        ({**P, "tools_kwargs": {"a": {"create_kwargs": 1}}}, "tools_kwargs['a']['create_kwargs'] must be"),
        ({**P, "tools": [{"type": "function"}]}, "must be a list of names"),
        ({**P, "tool_selection": "a"}, "tool_selection must be a list of names of configured tools, not 'a'"),
        ({**P, "need_tools_kwargs": "yes"}, "'need_tools_kwargs' must be true or false, not 'yes'"),
        ({**P, "interaction": {"city": "Delft"}}, "'interaction' must be a name or an object with a 'name'"),
        ({**P, "interaction_kwargs": ["gsm8k"]}, "'interaction_kwargs' must be an object"),
        ({**P, "interaction_kwargs": {"name": 3}}, "the 'name' in interaction_kwargs must be a string, not 3"),
        (["prompt"], "a row must be an object with keys"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_its_file_number_and_value(row: Any, says: str) -> None:
    pattern = ".*".join(re.escape(part) for part in says.split(".*"))
    with pytest.raises(DataError, match=f"^tasks.jsonl, row 41: .*{pattern}"):
        read(row, index=1041, row_number=41)


def test_a_row_of_messages_keeps_its_columns_and_loses_the_answer_at_its_end() -> None:
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
    task = task_from_row(row, index=2, split="train", source="rows.jsonl")
    assert [m.role for m in task.prompt] == ["system", "user"]
    assert len(task.prompt[1].media) == 1
    assert (task.id, task.data_source, task.ground_truth) == ("train-2", "grids", "4")
    assert task.extra == {k: row[k] for k in ("solution", "env_config", "reward_model", "extra_info", "data_source")}


def test_tools_of_a_row_of_messages_are_configured_ones_by_name() -> None:
    schema = {"type": "function", "function": {"name": "calc", "parameters": {}}}
    for tools in ([schema], json.dumps([schema]), ["calc"]):
        row = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}
        assert task_from_row(row, index=0, split="train", source="f").tools == ("calc",)
    with pytest.raises(DataError, match="'tools' must be a list of tools, or that as JSON"):
        task_from_row({"messages": [{"role": "user", "content": "Hi"}], "tools": "calc"}, index=0, split="train", source="f")


@pytest.mark.parametrize("place", ["extra_info", "row"])
def test_a_row_of_messages_meets_the_partners_that_a_row_with_a_prompt_meets(place: str) -> None:
    given = {
        "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "4"}}},
        "interaction_kwargs": {"name": "gsm8k", "query": "2+2?"},
        "need_tools_kwargs": True,
    }
    said = [{"role": "user", "content": "2+2?"}]
    rest = {"extra_info": given} if place == "extra_info" else given
    of_messages, of_prompt = (
        task_from_row({key: said, **rest}, index=0, split="train", source="f") for key in ("messages", "prompt")
    )
    assert of_messages.interaction is not None and set(of_messages.tools_kwargs) == {"calc"} and of_messages.needs_tools
    assert replace(of_messages, extra={}) == replace(of_prompt, extra={})


def test_all_else_in_extra_info_is_kept_whatever_its_name() -> None:
    """Reward functions read `extra_info["ground_truth"]` and `extra_info["prompt"]`; the task itself has the row's."""
    extra = {"prompt": "as it was", "ground_truth": "5", "id": 7, "data_source": "x", "interaction": "old", "index": 0}
    task = task_from_row({"prompt": "q", "ground_truth": "4", "extra_info": extra}, index=0, split="train", source="f")
    assert task.extra == extra and task.ground_truth == "4" and task.interaction is None
