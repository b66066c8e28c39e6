"""verl's request object, for code that builds or reads one: the masks, the limits, the messages it warns with."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from polyturn.compat.verl.rollout_schemas import (
    BASE_CHAT_HISTORY,
    AsyncRolloutRequest,
    AsyncRolloutRequestStateEnum,
    FinishReasonTypeEnum,
    Message,
    TokenizationSanityCheckModeEnum,
)
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tools.schema import ToolResponse

TOKENIZER = tiny_tokenizer()


def request(**fields: Any) -> AsyncRolloutRequest:
    given: dict[str, Any] = {
        "request_id": "r",
        "state": "pending",
        "messages": [{"role": "user", "content": "2+2?"}],
        "max_prompt_len": 512,
        "processing_class": TOKENIZER,
    }
    return AsyncRolloutRequest(**{**given, **fields})


def test_a_conversation_grows_and_only_the_models_part_is_trained() -> None:
    r = request(tokenization_sanity_check_mode="disable")
    assert r.state is AsyncRolloutRequestStateEnum.PENDING and isinstance(r.messages[0], Message)
    start = r.prompt_ids.shape[-1]
    assert r.get_generation_prompt_ids(TOKENIZER) == r.prompt_ids[0].tolist(), "it is there already"
    r.add_assistant_message(TOKENIZER, "five")
    r.add_user_message(TOKENIZER, "Sure?")
    r.get_generation_prompt_ids(TOKENIZER)
    r.add_assistant_message(TOKENIZER, "four")
    r.add_tool_response_messages(TOKENIZER, [])
    r.update_metrics({"n": 1}, "search")
    r.finalize(TOKENIZER, {"search": 1.0})
    assert torch.equal(torch.cat([r.prompt_ids, r.response_ids], -1), r.input_ids)
    assert r.position_ids[0].tolist() == list(range(r.input_ids.shape[-1]))
    assert r.loss_mask[0, :start].sum() == 0
    trained = TOKENIZER.decode(r.response_ids[0][r.response_loss_mask[0].bool()], skip_special_tokens=True)
    assert "five" in trained and "four" in trained and "Sure" not in trained
    assert (r.state, r.metrics) == (AsyncRolloutRequestStateEnum.COMPLETED, {"search": [{"n": 1}]})


def test_given_ids_stay_as_they_were_sampled() -> None:
    r = request(tokenization_sanity_check_mode="disable")
    ids = torch.tensor(TOKENIZER.encode("f", add_special_tokens=False))
    r.add_assistant_message(TOKENIZER, "f", content_ids=ids)
    r.finalize(TOKENIZER, {}, FinishReasonTypeEnum.LENGTH)
    assert r.response_ids[0].tolist() == ids.tolist()


def test_a_response_is_cut_to_its_limit() -> None:
    r = request(max_response_len=3, tokenization_sanity_check_mode="disable")
    r.add_assistant_message(TOKENIZER, "a long answer indeed")
    r.finalize(TOKENIZER, {})
    assert r.response_ids.shape[-1] == r.response_loss_mask.shape[-1] == 3


def test_tools_are_answered_behind_the_call() -> None:
    r = request(tokenization_sanity_check_mode="disable")
    r.add_assistant_message(TOKENIZER, "calling")
    before = r.input_ids.shape[-1]
    r.add_tool_response_messages(TOKENIZER, [ToolResponse(text="42"), ToolResponse(text="43")])
    assert r.loss_mask[0, before:].sum() == 0
    assert "42" in TOKENIZER.decode(r.input_ids[0, before:])
    assert [m.role for m in r.messages] == ["user", "assistant", "tool", "tool"]


def test_differences_from_a_full_render_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    r = request()
    r.add_assistant_message(TOKENIZER, "four", content_ids=torch.tensor(TOKENIZER.encode("for", add_special_tokens=False)))
    with caplog.at_level(logging.WARNING):
        r.finalize(TOKENIZER, {})
    assert "Inconsistent training and inference tokenization detected (strict)" in caplog.text
    assert "full_prompt_chunk: " in caplog.text


@pytest.mark.parametrize("missing", ["messages", "processing_class", "max_prompt_len"])
def test_what_is_missing_is_named(missing: str) -> None:
    with pytest.raises(ValueError, match=f"{missing} is required for AsyncRolloutRequest initialization"):
        request(**{missing: None})


def test_the_prompts_length_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    request(max_prompt_len=1)
    assert "greater than max_prompt_len 1" in caplog.text


def test_enums_and_constants_are_those_that_users_compare_with() -> None:
    assert FinishReasonTypeEnum.from_str("tool_calls") is FinishReasonTypeEnum.TOOL_CALL
    with pytest.raises(ValueError, match="Unsupported finish reason type: abort"):
        FinishReasonTypeEnum.from_str("abort")
    with pytest.raises(ValueError, match="Unsupported finalize finish reason type"):
        request().finalize(TOKENIZER, {}, FinishReasonTypeEnum.TOOL_CALL)
    assert [m["role"] for m in BASE_CHAT_HISTORY] == ["system", "user"]
    assert TokenizationSanityCheckModeEnum("ignore_strippable") is TokenizationSanityCheckModeEnum.IGNORE_STRIPPABLE
