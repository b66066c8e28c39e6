"""The classes of examples/schedulers, loaded as a configuration loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyturn.infra.plugins import import_attr

FOLDER = Path(__file__).parents[2] / "examples" / "schedulers"


def of_example(name: str) -> Any:
    """Return the attribute that `file.py:name` names in the folder."""
    return import_attr(name, base=FOLDER)


ImageTools = of_example("image_tools.py:ImageTools")
Lookahead = of_example("lookahead.py:Lookahead")
MathTips = of_example("math_tips.py:MathTips")
React = of_example("react.py:React")
ThinkingTips = of_example("thinking_tips.py:ThinkingTips")
Tree = of_example("tree.py:Tree")
