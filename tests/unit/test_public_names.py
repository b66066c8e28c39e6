"""The names at the top: each once, by what somebody wants to do, in the page that `help(polyturn)` begins with."""

from __future__ import annotations

import ast
import inspect
import pydoc
from pathlib import Path
from typing import Any

import polyturn
from polyturn.rollout.scheduler import MultiTurnScheduler


def test_the_page_of_the_package_names_everything_and_each_name_once() -> None:
    names = [name for group in polyturn.BY_TASK.values() for name in group]
    assert len(names) == len(set(names))
    assert sorted(["__version__", *names]) == dir(polyturn)
    page = inspect.getdoc(polyturn) or ""
    assert page.startswith("polyturn: multi-turn reinforcement learning")
    for task, group in polyturn.BY_TASK.items():
        assert f"{task}:\n    {', '.join(group)}" in page


def test_help_of_the_package_is_its_page_and_its_functions() -> None:
    """Not the help of every class: that is a hundred screens, in which nobody finds `train`."""
    page = pydoc.plain(pydoc.render_doc(polyturn))
    functions = "\n" + page.partition("FUNCTIONS\n")[2]
    assert [name for name in ("evaluate", "steps", "tiny", "tool", "train") if f"\n    {name}(" not in functions] == []
    assert "CLASSES\n" not in page
    assert page.count("\n") < 300


def test_a_star_brings_the_functions() -> None:
    brought: dict[str, Any] = {}
    exec("from polyturn import *", brought)
    assert brought.keys() - {"__builtins__"} == {*polyturn.__all__}


def test_every_public_name_is_public_for_type_checkers() -> None:
    """They take a name to be public where it is imported under an alias of its own name."""
    source = ast.parse(Path(polyturn.__file__).read_text(encoding="utf-8"))
    names = [alias for node in ast.walk(source) if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert {a.name for a in names if a.asname == a.name} == {*dir(polyturn)} - {"__version__", "rollout"}


def test_rollout_is_the_package_and_the_function() -> None:
    import polyturn.rollout.limits

    assert callable(polyturn.rollout)
    assert polyturn.rollout.limits.Limits is polyturn.Limits


def test_the_help_of_step_lists_what_may_be_returned_in_exported_types() -> None:
    page = inspect.getdoc(MultiTurnScheduler.step) or ""
    for said in ("None", "text", "polyturn.Message", "polyturn.Reply", "episode.rewrite", "episode.go_on"):
        assert said in page
    for name in ("Message", "Reply"):
        assert name in dir(polyturn)
