"""Support for tests of polyturn and of plug-ins: tiny models, scripted episodes, and contract checks.

from polyturn.testing import check_interaction

async def test_my_interaction():
    await check_interaction(MyInteraction({}), says=["#### 5", "#### 4"], ground_truth="4")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import did_you_mean

if TYPE_CHECKING:
    from polyturn.testing.published import published_config as published_config
    from polyturn.testing.published import tiny as tiny
    from polyturn.testing.suites.common import ContractError as ContractError
    from polyturn.testing.suites.interaction import check_interaction as check_interaction
    from polyturn.testing.suites.reward import check_reward as check_reward
    from polyturn.testing.suites.scheduler import check_scheduler as check_scheduler
    from polyturn.testing.suites.tool import check_tool as check_tool

_FROM = {
    "ContractError": "suites.common",
    "check_interaction": "suites.interaction",
    "check_reward": "suites.reward",
    "check_scheduler": "suites.scheduler",
    "check_tool": "suites.tool",
    "published_config": "published",
    "tiny": "published",
}
"""Public name -> its module, imported on access."""

__all__ = [
    "ContractError", "check_interaction", "check_reward", "check_scheduler", "check_tool", "published_config", "tiny",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"polyturn.testing has no {name!r}.{did_you_mean(name, __all__)}")
    return importlib.import_module(f"polyturn.testing.{_FROM[name]}").__dict__[name]
