"""verl.utils.py_functional: time limits, environment variables for a while, and dictionaries of lists."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that ends a call after so many seconds, in a process of its own or, by a signal, in this one.

    Raises (when called):
        TimeoutError: the call took longer.
        NotImplementedError: signals are asked for where there are none.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        run = _by_signal if use_signals else _in_process
        if use_signals and not hasattr(signal, "SIGALRM"):
            raise NotImplementedError("this system has no signal for a time limit; leave use_signals out")

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            return run(functools.partial(function, *args, **kwargs), seconds, function.__name__)

        return limited

    return decorate


def _by_signal(call: Callable[[], Any], seconds: float, name: str) -> Any:
    def late(*_: Any) -> None:
        raise _late(name, seconds)

    former = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def _in_process(call: Callable[[], Any], seconds: float, name: str) -> Any:
    # the call may be of a function that no other process could import
    context = multiprocessing.get_context("fork") if hasattr(os, "fork") else multiprocessing.get_context()
    answers = context.Queue(1)
    process = context.Process(target=_answer, args=(call, answers))
    process.start()
    try:
        is_right, value = answers.get(timeout=seconds)
    except queue.Empty:
        raise _late(name, seconds) from None
    finally:
        process.kill()
        process.join()
        answers.close()
    if is_right:
        return value
    raise value


def _answer(call: Callable[[], Any], answers: Any) -> None:
    try:
        answers.put((True, call()))
    except Exception as problem:
        answers.put((False, problem))


def _late(name: str, seconds: float) -> TimeoutError:
    return TimeoutError(f"Function {name} timed out after {seconds} seconds")


@contextlib.contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """Set an environment variable for a while."""
    former = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if former is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = former


def append_to_dict(data: dict[str, Any], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Add each value to the list, or the metric, of its name."""
    for name, value in new_data.items():
        key = prefix + name
        if key not in data:
            data[key] = value.init_list() if hasattr(value, "init_list") else []
        data[key].extend(value) if isinstance(value, list) else data[key].append(value)


def union_two_dict(dict1: dict[str, Any], dict2: Mapping[str, Any]) -> dict[str, Any]:
    """Take the values of the second into the first, and return it.

    Raises:
        AssertionError: a key is in both and its values differ.
    """
    for key, value in dict2.items():
        if key in dict1 and dict1[key] != value:
            raise AssertionError(f"{key} in meta_dict1 and meta_dict2 are not the same object")
        dict1[key] = value
    return dict1


def rename_dict(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a dictionary with `prefix` before each key."""
    return {f"{prefix}{key}": value for key, value in data.items()}


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the lists of the values of dictionaries with the same keys."""
    return {key: [one[key] for one in list_of_dict] for key in list_of_dict[0]} if list_of_dict else {}


def convert_to_regular_types(obj: Any) -> Any:
    """Return plain lists and dictionaries of a config of OmegaConf and of what holds one."""
    if hasattr(obj, "_metadata"):
        from omegaconf import OmegaConf

        return OmegaConf.to_container(obj, resolve=True)
    if isinstance(obj, Mapping):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    return [convert_to_regular_types(value) for value in obj] if isinstance(obj, list | tuple) else obj


class NestedNamespace(SimpleNamespace):
    """A dictionary whose keys, also in its inner dictionaries, are attributes."""

    def __init__(self, dictionary: Mapping[str, Any], **kwargs: Any) -> None:
        inner = {key: NestedNamespace(value) if isinstance(value, dict) else value for key, value in dictionary.items()}
        super().__init__(**inner, **kwargs)


def get_event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that runs, or that of this thread, made where there is none (`verl.utils.ray_utils`)."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        loop = asyncio.get_event_loop_policy().new_event_loop()
        asyncio.set_event_loop(loop)
        return loop
