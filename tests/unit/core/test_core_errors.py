"""The error tree: one root, each class refines a standard type, and hints lead to the nearest name."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from polyturn.core import errors
from polyturn.core.errors import MAX_LINE, PolyturnError, ToolError, did_you_mean, one_line
from polyturn.infra.aio import first_error

TREE = [e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, PolyturnError) and e is not PolyturnError]


def test_every_error_is_also_a_standard_error() -> None:
    for error in TREE:
        standard = [c for c in error.__mro__ if c.__module__ == "builtins" and c not in (Exception, BaseException, object)]
        with pytest.raises(standard[0], match=r"^the sentence$"):
            raise error("the sentence")
    assert not issubclass(ToolError, PolyturnError)


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("max_turn", ["max_turns", "seed"], "'max_turns'?"),
        ("zzz", ["seed", "max_turns"], "'max_turns', 'seed'."),
        ("zzz", [f"name_{i:02}" for i in range(40)], "'name_11', …."),
        ("ppoo", [*(f"name_{i:02}" for i in range(40)), "ppo_clip"], "'name_10', …."),
        ("ppoo", ["cispo", "ppo_clip"], "Known: 'ppo_clip', 'cispo'."),
        ("x", [], "Nothing is registered."),
    ],
)
def test_hint_names_the_nearest_or_the_known(name: str, known: list[str], hint: str) -> None:
    assert did_you_mean(name, known).endswith(hint)
    assert did_you_mean("turns", ["max_turns", "num_turns"]).count("'") == 4


class Unreadable(Exception):
    def __str__(self) -> str:
        raise SystemExit(9)


def test_exception_becomes_one_line() -> None:
    assert one_line(Unreadable()) == "Unreadable: (its message cannot be read: SystemExit)"
    assert one_line(ValueError("a\n  b")) == "ValueError: a b"
    at_the_cut = "x" + " " * (2 * MAX_LINE - 11) + "sk-abcdefghijklmnopqrstuvwxyz0123456789"
    assert "sk-" not in one_line(ValueError(at_the_cut))
    assert one_line(TimeoutError()) == "TimeoutError"


async def fail_beside_a_sleeper() -> None:
    async def fail() -> None:
        raise ValueError("mine")

    with first_error():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(60))
            tasks.create_task(fail())


async def test_first_error_of_a_task_group_is_raised_alone() -> None:
    with pytest.raises(ValueError, match=r"^mine$") as caught:
        await fail_beside_a_sleeper()
    assert isinstance(caught.value.__cause__, ExceptionGroup)


def test_error_outside_a_group_passes_unchanged() -> None:
    with pytest.raises(KeyError), first_error():
        raise KeyError("k")


def test_cancellation_in_a_group_does_not_hide_the_error() -> None:
    nested = BaseExceptionGroup("outer", [asyncio.CancelledError(), BaseExceptionGroup("inner", [OSError("disk")])])
    with pytest.raises(OSError, match="disk"), first_error():
        raise nested
