"""`polyturn rescore`: score recorded trajectories with another reward function."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer
from rich.table import Table

from polyturn.cli.arguments import RunFolder, declare
from polyturn.cli.console import Output
from polyturn.core.errors import ConfigError, DataError, RolloutError
from polyturn.evaluation.rescore import rescore
from polyturn.infra.loop import run_loop
from polyturn.infra.writable import check_file_writable
from polyturn.rewards.router import EPISODE_ROUTES, RewardRouter, Weighing
from polyturn.store.stored_run import StoredRun, open_store


@declare("rescore")
def main(
    run: RunFolder,
    reward: Annotated[str, typer.Option(help="The reward function: file.py:function, module:function or a known name.")],
    where: Annotated[
        str | None, typer.Option(help="Only trajectories that match an SQL condition: split = 'train' and step > 10.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The Parquet file; rescored/NAME.parquet of the run by default.")] = None,
) -> None:
    """Score a run's trajectories again, with another reward. Writes a row per trajectory, and prints means by split."""
    folder = Path(os.path.realpath(run))  # resolved, because the function may change the working directory
    rescored = folder / "rescored"
    file = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', Path(reward).name)}.parquet"
    out = Path(os.path.realpath(out or rescored / file))
    if out.is_relative_to(folder) and not out.is_relative_to(rescored):
        raise ConfigError(f"{str(out)!r} is one of the run's files; choose another --out, such as one in {rescored}")
    store = open_store(folder)
    check_file_writable(out, instead="name another --out")
    if where is not None:
        store = store.filter(where)
    if not len(store):
        raise DataError(f"{folder} has no trajectories{f' where {where}' if where else ''}")
    if reward in EPISODE_ROUTES:
        _check_recorded(store, reward)
    router = RewardRouter({"*": reward}, function=reward, weighing=Weighing(weights={"outcome": 1.0}), base=Path())
    scores = run_loop(rescore(store, router))
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(scores, out)
    table = Table("split", "trajectories", "reward", "new reward", "changed", "not scored", box=None, pad_edge=False)
    for split in sorted(set(scores["split"].to_pylist())):
        rows = scores.filter(pc.equal(scores["split"], split))
        scored = rows.filter(pc.is_valid(rows["new_reward"]))
        changed = sum(a != b for a, b in zip(scored["reward"].to_pylist(), scored["new_reward"].to_pylist(), strict=True))
        means = [_mean(pc.mean(scored[name]).as_py()) for name in ("reward", "new_reward")]
        table.add_row(split, str(rows.num_rows), *means, str(changed), str(rows.num_rows - scored.num_rows))
    console = Output()
    console.table(table)
    reasons = [e for e in scores["error"].to_pylist() if e is not None]
    if reasons:
        console.text(f"the first that could not be scored: {reasons[0]}")
    console.fact("written", out)
    if len(reasons) == scores.num_rows:
        raise RolloutError(f"none of the {scores.num_rows} trajectories could be scored")


def _check_recorded(store: StoredRun, route: str) -> None:
    components = sorted({name for row in store.table(["components"])["components"].to_pylist() for name, _ in row or ()})
    if not any(name == route or (route == "tools" and name.startswith("tool/")) for name in components):
        raise DataError(
            f"--reward {route}: none of the {len(store)} trajectories has such a score, so each would get 0 (there are "
            f"{', '.join(components) or 'no rewards'}); give a reward function, or another run"
        )


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
