"""The names at the top: each once, by what somebody wants to do, in the page that `help(polyturn)` begins with."""

from __future__ import annotations

import inspect

import polyturn
from polyturn.rollout.scheduler import MultiTurnScheduler


def test_the_page_of_the_package_names_everything_and_each_name_once() -> None:
    names = [name for group in polyturn.BY_TASK.values() for name in group]
    assert len(names) == len(set(names))
    assert ["__version__", *names] == polyturn.__all__
    page = inspect.getdoc(polyturn) or ""
    assert page.startswith("polyturn: multi-turn reinforcement learning")
    for task, group in polyturn.BY_TASK.items():
        assert f"{task}:\n    {', '.join(group)}" in page


def test_rollout_is_the_package_and_the_function() -> None:
    import polyturn.rollout.limits

    assert callable(polyturn.rollout)
    assert polyturn.rollout.limits.Limits is polyturn.Limits


def test_the_help_of_step_lists_what_may_be_returned_in_exported_types() -> None:
    page = inspect.getdoc(MultiTurnScheduler.step) or ""
    for said in ("None", "text", "polyturn.Message", "polyturn.Reply", "episode.rewrite", "episode.go_on"):
        assert said in page
    for name in ("Message", "Reply"):
        assert name in polyturn.__all__
