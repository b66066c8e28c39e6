"""verl's trace decorators change nothing, and no backend is taken without a word."""

from __future__ import annotations

import pytest

from polyturn.compat.verl.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op
from polyturn.core.errors import ConfigError


class Worker:
    @rollout_trace_op
    async def add(self, a: int, b: int = 1) -> int:
        return a + b

    @rollout_trace_op
    def fail(self) -> None:
        raise ValueError("no")


async def test_what_is_decorated_stays_as_it_was() -> None:
    with rollout_trace_attr(step=3, sample_index=0, rollout_n=1, name="agent_loop", validate=False, trace=True):
        assert await Worker().add(1, b=2) == 3
        with pytest.raises(ValueError, match="no"):
            Worker().fail()


def test_a_backend_is_refused() -> None:
    RolloutTraceConfig.init("project", "experiment", None, token2text=True, max_samples_per_step_per_worker=3)
    assert RolloutTraceConfig.get_instance().get_backend() is None and not RolloutTraceConfig.enable_token2text()
    with pytest.raises(ConfigError, match="'weave' is not here"):
        RolloutTraceConfig.init("project", "experiment", "weave")
