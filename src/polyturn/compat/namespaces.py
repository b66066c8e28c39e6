"""Which modules of other libraries are here, and where. A further library is one more `Namespace` in `NAMESPACES`.

Importing this imports none of them; that happens when user code imports their aliases.
"""

from __future__ import annotations

from polyturn.compat.finder import Namespace

_NATIVE = {
    "verl.interactions.base": "polyturn.interactions.base",
    "verl.interactions.gsm8k_interaction": "polyturn.interactions.gsm8k",
    "verl.interactions.weather_interaction": "polyturn.interactions.weather",
    "verl.interactions.utils.interaction_registry": "polyturn.interactions.registry",
    "verl.tools.base_tool": "polyturn.tools.base",
    "verl.tools.schemas": "polyturn.tools.schema",
    "verl.tools.tool_registry": "polyturn.tools.registry",
    "verl.tools.utils.tool_registry": "polyturn.tools.registry",
    "verl.tools.gsm8k_tool": "polyturn.tools.gsm8k",
    "verl.utils.reward_score.gsm8k": "polyturn.rewards.gsm8k",
}
"""Modules of verl that are modules of polyturn under another name."""

_HERE = {}
"""Modules that only code written for verl needs."""

VERL = Namespace(
    root="verl",
    modules={**_NATIVE, **_HERE},
    packages={
        "verl.utils.reward_score": "polyturn.compat.verl.reward_score",
    },
)

NAMESPACES = {VERL.root: VERL}
"""Root name -> its namespace."""
