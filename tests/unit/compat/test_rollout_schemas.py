"""verl's request schemas, and its trace decorators, which change nothing."""

from __future__ import annotations

from polyturn.compat.verl.rollout_schemas import (
    BASE_CHAT_HISTORY,
    FinishReasonTypeEnum,
    TokenizationSanityCheckModeEnum,
)
from polyturn.compat.verl.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op
from polyturn.core.errors import ConfigError
from support.refusals import refuses


def test_wrong_reasons_are_named() -> None:
    assert FinishReasonTypeEnum.from_str("tool_calls") is FinishReasonTypeEnum.TOOL_CALL
    refuses(lambda: FinishReasonTypeEnum.from_str("abort"), ValueError, "abort")
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
        refuses(lambda: Worker().fail(), ValueError, "no")
    RolloutTraceConfig.init("project", "experiment", None, token2text=True, max_samples_per_step_per_worker=3)
    assert RolloutTraceConfig.get_instance().get_backend() is None
    assert not RolloutTraceConfig.enable_token2text()
    refuses(lambda: RolloutTraceConfig.init("project", "experiment", "weave"), ConfigError, "'weave'")
