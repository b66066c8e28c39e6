"""Checks that episodes of unmodified environments of other packages have the packages' own rewards.

Each environment runs twice with the same seed and actions: through the package's API, and in polyturn's episode loop with a
scripted engine that writes the actions. All episodes of the second kind run concurrently in threads, which also shows that
environments with a shared random generator do not affect each other.

    python benchmarks/environments.py              all: those that share this interpreter, and verifiers and OpenEnv
    python benchmarks/environments.py --short      one of each package that shares this interpreter

verifiers and OpenEnv run in another interpreter: python scripts/environments/build.py. Environments that need downloads are
left out: GEM's Wordle, Hangman and WordSearch (word lists), and its math, code and qa data sets; skyrl-gym's search and
searchcode (a search service); verifiers' TextArenaEnv (word lists).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import json
import logging
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyturn.core.errors import EngineError, one_line
from polyturn.core.generation import GenerateRequest
from polyturn.environments import Adapter, find_adapter
from polyturn.environments.base import at_stage
from polyturn.environments.scheduler import EnvScheduler, Stage
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Compare the rewards, print one JSON line, and return 1 if a reward differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="one environment of each package that is here")
    is_short = parser.parse_args().short
    logging.basicConfig(level=logging.ERROR)
    seeded, rows = load("_environment_cases"), load("_environment_rows")
    others, left_out = (rows.GEM[:1] + rows.skyrl_cases()[1:2], []) if is_short else rows.cases()
    chosen = one_of_each(seeded.CASES) if is_short else list(seeded.CASES)
    start = time.perf_counter()
    compared = asyncio.run(compare_all([*chosen, *others]))
    print(json.dumps({**report(compared), "left_out": left_out, "seconds": round(time.perf_counter() - start, 1)}))
    return 1 if any(one["problem"] for one in compared) else 0


def load(name: str) -> Any:
    """Load a file of this folder."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def one_of_each(cases: Any) -> list[Any]:
    """Return the first case of each package."""
    return [next(group) for _, group in itertools.groupby(cases, key=lambda case: case.name.partition(":")[0])]


async def compare_all(cases: list[Any]) -> list[dict[str, Any]]:
    """Run the packages one by one, then all episodes at once."""
    adapters: dict[str, Adapter] = {}
    prepared = [prepare(case, adapters) for case in cases]
    try:
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(compare(case, number, adapters, own)) for number, (case, own) in enumerate(prepared)
            ]
        return [task.result() for task in running]
    finally:
        for adapter in adapters.values():
            adapter.close()


def prepare(case: Any, adapters: dict[str, Adapter]) -> tuple[Any, Any]:
    """Run a case with the package itself, and create its adapter; return the result or the error."""
    try:
        if is_seeded(case):
            return case, case.recorded()
        own = case.own()
        if key_of(case) not in adapters:
            adapters[key_of(case)] = find_adapter(case.name, case.kwargs, base=case.base)
        return case, own
    except Exception as problem:  # any package may raise anything
        return case, problem


def is_seeded(case: Any) -> bool:
    """Return whether a case is determined by its seed."""
    return type(case).__module__ == "_environment_cases"


def key_of(case: Any) -> str:
    """Return the key of a case's adapter; cases with the same key share it."""
    return f"{case.name} {json.dumps(dict(case.kwargs), sort_keys=True, default=str)}"


async def compare(case: Any, number: int, adapters: dict[str, Adapter], own: Any) -> dict[str, Any]:
    """Run a case in polyturn's episode loop and compare the rewards."""
    theirs = {"name": case.name, "counts": is_seeded(case) or case.is_theirs, "problem": None}
    if isinstance(own, Exception):
        return {**theirs, "problem": one_line(own)}
    try:
        if is_seeded(case):
            ours: Any = dict((await case.played(own.actions)).earned)
        else:
            ours = await play_case(case, number, adapters[key_of(case)], own)
    except Exception as problem:
        return {**theirs, "problem": one_line(problem)}
    return {**theirs, "own": own[1], "problem": None if same(ours, own[1]) else f"{ours} here, {own[1]} by the package"}


async def play_case(case: Any, number: int, adapter: Adapter, own: Any) -> float:
    """Return the reward of an episode in which the model writes the package's actions."""
    texts: Iterator[str] = iter(own.actions)

    def says(request: GenerateRequest) -> str | Exception:
        return next(texts, None) or EngineError(f"the script has no action for turn {request.request_id}")

    context = scripted_context(
        says,
        tools=adapter.tools(),
        scheduler=adapter.scheduler() or EnvScheduler({adapter.name: Stage(adapter=adapter)}),
        limits=Limits(max_turns=len(own.actions), max_context=1 << 20),
    )
    task = at_stage(split="train", score=adapter.score)(case.task(adapter))
    trajectory = await run_episode(context, task, id=f"case-{number}")
    if trajectory.reward is None:
        raise RuntimeError(trajectory.error)
    if len(trajectory.turns) != len(own.actions):
        raise RuntimeError(f"{len(trajectory.turns)} turns here, {len(own.actions)} by the package")
    return trajectory.reward.total


def same(ours: Any, own: Any) -> bool:
    """Return whether two rewards, or two mappings of them, are equal up to rounding of a sum."""
    if isinstance(own, dict):
        if len(own) == len(ours) == 1:  # a single-player game: the player's name does not matter
            return same(*ours.values(), *own.values())
        return ours.keys() == own.keys() and all(same(ours[key], own[key]) for key in own)
    return math.isclose(ours, own, rel_tol=1e-9, abs_tol=1e-12)


def report(compared: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of distinct environments of the packages, and the differences."""
    theirs = [one for one in compared if one["counts"]]
    return {
        "environments": len({one["name"] for one in theirs}),
        "packages": len({one["name"].partition(":")[0] for one in theirs}),
        "episodes": len(theirs),
        "equal": sum(one["problem"] is None for one in theirs),
        "written_here_and_not_counted": sum(not one["counts"] for one in compared),
        "rewarded": sum(any(values(one["own"])) for one in theirs if "own" in one),
        "failures": [f"{one['name']}: {one['problem']}" for one in compared if one["problem"]],
    }


def values(reward: Any) -> list[float]:
    """Return all numbers in a reward."""
    return list(reward.values()) if isinstance(reward, dict) else [reward]


if __name__ == "__main__":
    sys.exit(main())
