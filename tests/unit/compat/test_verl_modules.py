"""Modules of verl that users' files import beside the classes that they inherit: batches, files, managers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import polyturn.compat.verl
from polyturn import compat
from polyturn.compat.verl import chat_template, reward_loop, reward_manager, torch_functional
from polyturn.compat.verl.agent_loop_utils import (
    add_generation_prompt_for_gpt_oss,
    build_gpt_oss_tool_response_text,
    format_gpt_oss_tool_response_manually,
)
from polyturn.compat.verl.dataproto import DataProto
from polyturn.compat.verl.tokenizer import normalize_token_ids
from polyturn.core.errors import RewardError, UnknownNameError
from polyturn.testing.tiny_models import tiny_tokenizer
from support.refusals import refuses, refuses_later

pytestmark = pytest.mark.timeout(300)  # the first test imports torch's compiler


def test_users_files_find_their_names() -> None:
    compat.install("verl")
    names: dict[str, object] = {}
    exec(
        "from verl import DataProto\n"
        "from verl.protocol import DataProtoItem\n"
        "from verl.utils import hf_tokenizer, hf_processor\n"
        "from verl.utils.hdfs_io import copy, makedirs\n"
        "from verl.workers.reward_manager import NaiveRewardManager, register\n"
        "from verl.workers.reward_manager.dapo import DAPORewardManager\n"
        "from verl.workers.reward_manager.abstract import AbstractRewardManager\n"
        "from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY\n"
        "from verl.tools.utils.tool_registry import OpenAIFunctionToolSchema\n"
        "from verl.experimental.agent_loop.tool_agent_loop import AgentState\n"
        "from verl.experimental.agent_loop.utils import resolve_config_path\n"
        "from verl.experimental.agent_loop.tool_parser import HermesToolParser, Qwen3XMLToolParser\n",
        names,
    )
    assert names["DataProto"] is DataProto


def test_process_run_as_verl_finds_the_batch() -> None:
    shims = Path(polyturn.compat.__file__).parent / "shims"
    code = "from verl import DataProto; import verl.protocol; assert DataProto is verl.protocol.DataProto"
    path = os.pathsep.join([str(shims), *sys.path[1:]])
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True)


def test_tool_result_has_the_gpt_oss_format() -> None:
    """The shape that the model was trained on."""
    said = add_generation_prompt_for_gpt_oss(format_gpt_oss_tool_response_manually("4", "add"))
    assert said == "<|start|>functions.add to=assistant<|channel|>commentary<|message|>4<|end|><|start|>assistant"
    assert build_gpt_oss_tool_response_text([{"role": "tool", "content": "4"}], ["add"]) == said


@pytest.mark.parametrize("above", [(), ("reward",)])
def test_reward_function_of_a_tree_is_read_from_its_file(above: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "grade.py").write_text("def grade(text, bonus=0.0):\n    return len(text) + bonus\n")
    tree: dict[str, Any] = {"path": str(tmp_path / "grade.py"), "name": "grade", "reward_kwargs": {"bonus": 2}}
    for name in ("custom_reward_function", *above):
        tree = {name: tree}
    function = reward_manager.get_custom_reward_fn(OmegaConf.create(tree))
    assert function is not None and function("abc") == 5
    assert reward_manager.get_custom_reward_fn({"custom_reward_function": {"path": None}}) is None


def test_ids_are_read_from_any_form_of_a_tokenizer() -> None:
    for given in ([1, 2], (1, 2), [[1, 2]], {"input_ids": [1, 2]}, torch.tensor([[1, 2]])):
        assert normalize_token_ids(given) == [1, 2]
    refuses(lambda: normalize_token_ids("ab"), TypeError, "list-like")


def test_parts_of_a_template_are_found() -> None:
    tokenizer = tiny_tokenizer()
    user = [{"role": "user", "content": "a"}]
    system, opening = chat_template.extract_system_prompt_and_generation(tokenizer)
    whole = chat_template.apply_chat_template(tokenizer, user, tokenize=False)
    assert system == chat_template.initialize_system_prompt(tokenizer)
    assert whole.endswith(tokenizer.decode(opening)) and whole.startswith(tokenizer.decode(system))
    separator = tokenizer.decode(chat_template.initialize_turn_separator(tokenizer))
    end = tokenizer.eos_token
    assert chat_template.apply_chat_template(tokenizer, user, tokenize=False, add_generation_prompt=False).endswith(
        f"a{end}{separator}"
    )


def test_conversation_without_user_is_rendered_behind_one() -> None:
    class Strict:
        def apply_chat_template(self, messages: list[dict[str, Any]], *, tokenize: bool, **options: Any) -> Any:
            if messages[0]["role"] != "user":
                raise ValueError("no user query")
            text = "".join(m["role"][0] for m in messages)
            return [ord(c) for c in text] if tokenize else text

    said = [{"role": "assistant", "content": "x"}]
    assert chat_template.apply_chat_template(Strict(), said) == [ord("a")]
    assert chat_template.apply_chat_template(Strict(), said, tokenize=False) == "a"
    refuses(
        lambda: chat_template.apply_chat_template(Strict(), [*said, {"role": "user", "content": "y"}]),
        ValueError,
        "no user query",
    )


def test_text_is_tokenized_to_a_length() -> None:
    ids, mask = torch_functional.tokenize_and_postprocess_data("a b", tiny_tokenizer(), 16, 0)
    assert ids.shape == mask.shape == (1, 16) and mask[0, 0] == 0 and mask[0, -1] == 1


def scored_batch(**columns: object) -> DataProto:
    """Two rows of three prompt and four response tokens; the second response has two."""
    tensors = {
        "prompts": torch.full((2, 3), 9),
        "responses": torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]]),
    }
    truth = [{"ground_truth": "1 2 3 4"}, {"ground_truth": "other"}]
    known = {"data_source": ["s", "s"], "reward_model": truth, "extra_info": [{"level": 1}, {"level": 2}]}
    return DataProto.from_dict(tensors, {**known, "__num_turns__": np.array([2, 4]), **columns})


class Words:
    """A tokenizer whose tokens are numbers."""

    eos_token = "."

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids.tolist()))


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, object]) -> dict[str, object]:
    return {"score": float(solution_str == ground_truth), "turns": extra_info["num_turns"], "level": extra_info["level"]}


@pytest.mark.parametrize("name", ["naive", "prime", "dapo"])
def test_manager_puts_rewards_on_the_last_token(name: str) -> None:
    data = scored_batch()
    manager = reward_manager.get_reward_manager_cls(name)(tokenizer=Words(), num_examine=1, compute_score=exact)
    found = manager(data, return_dict=True)
    assert found["reward_tensor"].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert {k: list(v) for k, v in found["reward_extra_info"].items()} == {"score": [1, 0], "turns": [2, 4], "level": [1, 2]}
    assert "num_turns" not in data.non_tensor_batch["extra_info"][0]
    assert ("acc" in data.batch) == (name == "prime")
    given = scored_batch()
    given.batch["rm_scores"] = torch.ones(2, 4)
    assert manager(given) is not None and manager(given).sum() == 8


@pytest.mark.parametrize("name", ["naive", "prime", "dapo"])
def test_value_that_a_row_lacks_is_none(name: str) -> None:
    def some(extra_info: dict[str, Any], **columns: object) -> dict[str, Any]:
        return {"score": 1.0, **({"late": True} if extra_info["level"] == 2 else {"early": 5})}

    found = reward_manager.get_reward_manager_cls(name)(Words(), 0, some)(scored_batch(), return_dict=True)
    expected = {"score": [1.0, 1.0], "early": [5, None], "late": [None, True]}
    assert dict(found["reward_extra_info"]) == expected and found["reward_extra_info"]["none"] == []


def test_late_function_scores_zero_on_request() -> None:
    def late(extra_info: dict[str, Any], **columns: object) -> float:
        if extra_info["level"] == 2:
            signal.raise_signal(signal.SIGALRM)  # as the timer does, but on a machine of any speed
        return 1.0

    manager = reward_manager.NaiveRewardManager(Words(), 0, late, compute_score_timeout=60)
    assert manager(scored_batch()).tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize("is_late", [False, True])
async def test_time_limit_of_a_function_holds_in_any_thread(is_late: bool) -> None:
    is_over = threading.Event()

    def score(**columns: object) -> float:
        if is_late:
            is_over.wait()
        return 1.0

    manager = reward_manager.NaiveRewardManager(Words(), 0, score, compute_score_timeout=0.01 if is_late else 60.0)
    try:
        rewards = await asyncio.to_thread(manager, scored_batch())
    finally:
        is_over.set()
    assert rewards.sum() == (0.0 if is_late else 2.0)


async def test_error_of_a_function_passes_through_its_time_limit() -> None:
    def fails(**columns: object) -> float:
        raise ValueError("no such column")

    manager = reward_manager.NaiveRewardManager(Words(), 0, fails, compute_score_timeout=60.0)
    await refuses_later(lambda: asyncio.to_thread(manager, scored_batch()), ValueError, "no such column")


def test_row_manager_puts_scores_on_the_last_token() -> None:
    rewards = reward_loop.RewardManagerBase.assemble_rm_scores(scored_batch(), [0.5, 2.0])
    assert rewards.tolist() == [[0, 0, 0, 0.5], [0, 2, 0, 0]]


def test_batch_manager_calls_its_function_once() -> None:
    calls: list[list[str]] = []

    def many(data_sources, solution_strs, ground_truths, extra_infos, scale):  # type: ignore[no-untyped-def]
        calls.append(solution_strs)
        return [scale * info["level"] for info in extra_infos]

    manager = reward_manager.BatchRewardManager(Words(), 0, many, scale=3)
    data = scored_batch()
    assert manager(data).tolist() == [[0, 0, 0, 3], [0, 6, 0, 0]] and calls == [["1 2 3 4", "5 6"]]
    assert data.batch["acc"].tolist() == [3, 6]
    manager = reward_manager.BatchRewardManager(Words(), 0, lambda **columns: torch.tensor([3.0, 6.0]))
    assert manager(scored_batch()).sum() == 9
    with pytest.raises(RewardError, match="for 2 answers; return one for each"):
        reward_manager.BatchRewardManager(Words(), 0, lambda **columns: [1.0])(scored_batch())


def test_dapo_manager_penalises_long_responses() -> None:
    buffer = SimpleNamespace(enable=True, len=2, penalty_factor=1.0, log=True)
    manager = reward_manager.DAPORewardManager(Words(), 0, lambda **columns: 1.0, max_resp_len=4, overlong_buffer_cfg=buffer)
    found = manager(scored_batch(), return_dict=True)
    assert found["reward_tensor"].tolist() == [[0, 0, 0, 0], [0, 1, 0, 0]]
    assert found["reward_extra_info"]["overlong_reward"] == [-1, 0] and found["reward_extra_info"]["acc"] == [1, 1]
    with pytest.raises(AssertionError, match="max_resp_len must be larger"):
        reward_manager.DAPORewardManager(Words(), 0, max_resp_len=1, overlong_buffer_cfg=buffer)


def test_managers_are_registered_once_and_pass_errors_on() -> None:
    class One: ...

    assert reward_manager.register("in_test")(One) is One is reward_manager.get_reward_manager_cls("in_test")
    refuses(lambda: reward_manager.register("in_test")(int), ValueError, "registered")
    refuses(lambda: reward_manager.get_reward_manager_cls("in_tst"), UnknownNameError, "in_tst")

    def broken(**columns: object) -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        reward_manager.PrimeRewardManager(Words(), 0, broken)(scored_batch())


def test_first_releases_load_tools_beside_their_base_class():
    from polyturn.compat.verl.base_tool import initialize_tools_from_config
    from polyturn.tools.base import BaseTool

    item = {"class_name": "polyturn.tools.gsm8k.Gsm8kTool", "config": {}}
    assert [isinstance(tool, BaseTool) for tool in initialize_tools_from_config({"tools": [item]})] == [True]
