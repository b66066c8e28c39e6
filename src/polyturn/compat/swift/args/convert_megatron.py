"""Converters for arguments in which `megatron rlhf` differs from `swift rlhf`: parallel sizes and the length of a run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyturn.config.translate.source import Source


def updates_per_rollout(s: Source) -> int:
    """Return the number of optimizer updates per rollout. ms-swift counts updates as steps, polyturn rollouts."""
    return int(s.native.get("train", {}).get("minibatches", 1)) * s.whole("num_iterations", 1, least=1)


def put_epochs(s: Source, epochs: int) -> None:
    """Set the number of passes, or the number of steps if the data set is `file#N` and the file has fewer than N rows.

    ms-swift repeats the rows of such a file until there are N.
    """
    path, _, number = str(s.get("dataset", "")).partition("#")
    if number.isdigit() and os.path.isfile(path) and (rows := _num_rows(path)) < int(number):
        steps = max(1, epochs * int(number) // int(s.native.get("train", {}).get("groups_per_step", 1)))
        s.put("train.steps", steps, by="num_train_epochs")
        s.notes["dataset"] = f"the file has {rows} rows, which are repeated; {epochs} x {number} tasks are {steps} steps"
    else:
        s.put("train.epochs", epochs, by="num_train_epochs")


def _num_rows(path: str) -> int:
    if path.endswith(".parquet"):
        from pyarrow import parquet

        return int(parquet.read_metadata(path).num_rows)
    with open(path, "rb") as file:
        return sum(1 for line in file if line.strip())


def megatron(s: Source) -> None:
    """Set the backend, its parallel sizes, and the smallest number of ranks for tensor, pipeline and context sizes."""
    s.put("train.backend", "megatron", by="tensor_model_parallel_size")
    ranks = 1
    for kind in ("tensor", "pipeline", "expert", "context"):
        key = f"{kind}{'' if kind == 'context' else '_model'}_parallel_size"
        size = s.whole(key, 1, least=1)
        if size != 1:
            s.put(f"train.distributed.{kind}_parallel", size, by=key)
            ranks *= 1 if kind == "expert" else size
    s.put("train.distributed.ranks", ranks, by="tensor_model_parallel_size")
    for key in (key for key in ("tuner_type", "train_type", "sft_type") if s.get(key) == "lora"):
        s.notes[key] = "query, key, value, gate and up have a pair of matrices each; Megatron has one pair for a fused layer"


def iterations(s: Source) -> None:
    """Set the length of the run; a number of passes over the tasks overrides a number of updates."""
    per_rollout = updates_per_rollout(s)
    epochs, updates = s.get("num_train_epochs"), s.get("train_iters")
    if epochs is not None:
        put_epochs(s, s.whole("num_train_epochs", 1, least=1))
        if updates is not None:
            s.notes["train_iters"] = "num_train_epochs sets the length of the run, as in ms-swift if both are set"
    elif updates is not None:
        s.put("train.steps", max(1, s.whole("train_iters", 1, least=1) // per_rollout), by="train_iters")
    else:
        s.refuse("train_iters", "the length of the run is missing; set train_iters or num_train_epochs")


def decay(s: Source) -> None:
    """Set the decay of the learning rate: its final value and the update at which it is reached."""
    name = s.text("lr_decay_style", "cosine")
    s.put("train.optim.schedule.name", name, by="lr_decay_style")
    if name == "constant":
        return
    if least := s.number("min_lr", 0.0):
        s.put("train.optim.schedule.min_lr_ratio", least / s.number("learning_rate", 1e-5), by="min_lr")
    if s.get("lr_decay_iters") is not None:
        iterations = s.whole("lr_decay_iters", 1, least=1)
        s.put("train.optim.schedule.total_steps", max(1, iterations // updates_per_rollout(s)), by="lr_decay_iters")
