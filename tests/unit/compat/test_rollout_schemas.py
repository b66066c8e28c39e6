"""verl's request object and trace decorators, which verl's own code builds and reads: smoke tests."""

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
    TokenizationSanityCheckModeEnum,
)
from polyturn.compat.verl.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op
from polyturn.core.errors import ConfigError
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tools.schema import ToolResponse

TOKENIZER = tiny_tokenizer()


def request(**fields: Any) -> AsyncRolloutRequest:
    defaults: dict[str, Any] = {
        "request_id": "r",
        "state": "pending",
        "messages": [{"role": "user", "content": "2+2?"}],
        "max_prompt_len": 512,
        "processing_class": TOKENIZER,
    }
    return AsyncRolloutRequest(**{**defaults, **fields})


def test_conversation_grows_and_trains_the_models_part() -> None:
    r = request(tokenization_sanity_check_mode="disable")
    start = r.prompt_ids.shape[-1]
    assert r.get_generation_prompt_ids(TOKENIZER) == r.prompt_ids[0].tolist()
    r.add_assistant_message(TOKENIZER, "five", content_ids=torch.tensor(TOKENIZER.encode("five", add_special_tokens=False)))
    r.add_user_message(TOKENIZER, "Sure?")
    r.get_generation_prompt_ids(TOKENIZER)
    r.add_assistant_message(TOKENIZER, "four")
    r.add_tool_response_messages(TOKENIZER, [ToolResponse(text="42"), ToolResponse(text="43")])
    r.update_metrics({"n": 1}, "search")
    r.finalize(TOKENIZER, {"search": 1.0})
    assert [m.role for m in r.messages] == ["user", "assistant", "user", "assistant", "tool", "tool"]
    assert torch.equal(torch.cat([r.prompt_ids, r.response_ids], -1), r.input_ids)
    assert r.position_ids[0].tolist() == list(range(r.input_ids.shape[-1]))
    assert r.loss_mask[0, :start].sum() == 0
    trained = TOKENIZER.decode(r.response_ids[0][r.response_loss_mask[0].bool()], skip_special_tokens=True)
    assert "four" in trained.replace("five", "")
    assert all(text not in trained for text in ("Sure", "42"))
    assert (r.state, r.metrics) == (AsyncRolloutRequestStateEnum.COMPLETED, {"search": [{"n": 1}]})


def test_request_keeps_its_limits_and_reports_differences(caplog: pytest.LogCaptureFixture) -> None:
    r = request(max_prompt_len=1, max_response_len=1)
    assert "greater than max_prompt_len 1" in caplog.text
    r.add_assistant_message(TOKENIZER, "four", content_ids=torch.tensor(TOKENIZER.encode("for", add_special_tokens=False)))
    with caplog.at_level(logging.WARNING):
        r.finalize(TOKENIZER, {}, FinishReasonTypeEnum.from_str("length"))
    assert r.response_ids.shape[-1] == r.response_loss_mask.shape[-1] == 1
    assert "Inconsistent training and inference tokenization" in caplog.text


def test_wrong_fields_and_reasons_are_named() -> None:
    for missing in ("messages", "processing_class", "max_prompt_len"):
        with pytest.raises(ValueError, match=missing):
            request(**{missing: None})
    assert FinishReasonTypeEnum.from_str("tool_calls") is FinishReasonTypeEnum.TOOL_CALL
    with pytest.raises(ValueError, match="abort"):
        FinishReasonTypeEnum.from_str("abort")
    with pytest.raises(ValueError, match="finish reason"):
        request().finalize(TOKENIZER, {}, FinishReasonTypeEnum.TOOL_CALL)
    assert [m["role"] for m in BASE_CHAT_HISTORY] == ["system", "user"]
    assert TokenizationSanityCheckModeEnum("ignore_strippable") is TokenizationSanityCheckModeEnum.IGNORE_STRIPPABLE


async def test_trace_decorators_change_nothing() -> None:
    class Worker:
        @rollout_trace_op
        async def add(self, a: int, b: int = 1) -> int:
            return a + b

        @rollout_trace_op
        def fail(self) -> None:
            raise ValueError("no")

    with rollout_trace_attr(step=3, sample_index=0, rollout_n=1, name="agent_loop", validate=False, trace=True):
        assert await Worker().add(1, b=2) == 3
        with pytest.raises(ValueError, match="no"):
            Worker().fail()
    RolloutTraceConfig.init("project", "experiment", None, token2text=True, max_samples_per_step_per_worker=3)
    assert RolloutTraceConfig.get_instance().get_backend() is None
    assert not RolloutTraceConfig.enable_token2text()
    with pytest.raises(ConfigError, match="'weave'"):
        RolloutTraceConfig.init("project", "experiment", "weave")
