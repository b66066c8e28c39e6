"""The names at the top: importing polyturn is cheap, each name loads, and `help(polyturn)` begins with all of them."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from typing import Any

import pytest

import polyturn
from polyturn.infra.plugins import Registry
from polyturn.rollout.scheduler import MultiTurnScheduler


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys{code}; print(*sys.modules)"], stdout=subprocess.PIPE, text=True, check=True
    )
    return set(done.stdout.split())


def test_import_brings_in_the_standard_library_only() -> None:
    brought = {module.partition(".")[0] for module in modules_after(", polyturn") - modules_after("")}
    assert brought <= {*sys.stdlib_module_names, "polyturn"}


def test_core_works_without_torch() -> None:
    loaded = modules_after(", polyturn.core.protocols, polyturn.core.builder, polyturn.core.serde")
    assert "torch" not in loaded


def test_every_public_name_loads_and_knows_its_own_name() -> None:
    loaded = {name: getattr(polyturn, name) for name in dir(polyturn) if name != "__version__"}
    own = {name: one.__name__ for name, one in loaded.items() if not isinstance(one, Registry)}
    # A decorator is a verb, and `rollout` a package that can be called.
    assert own == {name: {"declare": "Traits", "rollout": "polyturn.rollout"}.get(name, name) for name in own}


def test_unknown_name_is_an_attribute_error_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"'Mesage'.*'Message'"):
        _ = polyturn.Mesage  # type: ignore[attr-defined]


def test_page_of_the_package_lists_every_name() -> None:
    names = [name for group in polyturn.BY_TASK.values() for name in group]
    assert sorted(["__version__", *names]) == dir(polyturn)
    page = inspect.getdoc(polyturn) or ""
    for task, group in polyturn.BY_TASK.items():
        assert f"{task}:\n    {', '.join(group)}" in page


def test_help_shows_functions_and_no_classes() -> None:
    """The help of every class is a hundred screens, in which `train` is lost."""
    page = pydoc.plain(pydoc.render_doc(polyturn))
    functions = "\n" + page.partition("FUNCTIONS\n")[2]
    assert [name for name in ("evaluate", "steps", "tiny", "tool", "train") if f"\n    {name}(" not in functions] == []
    assert "CLASSES\n" not in page


def test_star_import_brings_the_functions() -> None:
    brought: dict[str, Any] = {}
    exec("from polyturn import *", brought)
    assert brought.keys() - {"__builtins__"} == {*polyturn.__all__}


def test_rollout_is_the_package_and_the_function() -> None:
    import polyturn.rollout.limits

    assert callable(polyturn.rollout)
    assert polyturn.rollout.limits.Limits is polyturn.Limits


def test_help_of_step_names_what_may_be_returned() -> None:
    page = inspect.getdoc(MultiTurnScheduler.step) or ""
    for name in ("None", "text", "polyturn.Message", "polyturn.Reply", "episode.rewrite", "episode.go_on"):
        assert name in page
