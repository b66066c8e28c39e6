"""verl.trainer.ppo.metric_utils: the numbers of a batch and of a validation under verl's names."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from polyturn.compat.verl.metric import reduce_metrics
from polyturn.evaluation.repeated import task_metrics

__all__ = [
    "bootstrap_metric", "calc_maj_val", "compute_data_metrics", "compute_throughout_metrics", "compute_timing_metrics",
    "process_validation_metrics", "reduce_metrics",
]  # fmt: skip


def _compute_response_info(batch: Any) -> dict[str, Tensor]:
    width = batch.batch["responses"].shape[-1]
    attention = batch.batch["attention_mask"]
    mask = attention[:, -width:]
    return {
        "response_mask": mask,
        "prompt_length": attention[:, :-width].sum(-1).float(),
        "response_length": mask.sum(-1).float(),
    }


def compute_data_metrics(batch: Any, use_critic: bool = True) -> dict[str, Any]:
    """Return scores, rewards, advantages, returns, lengths and turns of a batch; values too where there is a critic.

    Scores and rewards are those of rows that have a response.

    Raises:
        ValueError: no row has one.
    """
    tensors = batch.batch
    width = tensors["responses"].shape[-1]
    info = _compute_response_info(batch)
    mask = tensors["response_mask"].bool() if "response_mask" in tensors else info["response_mask"].bool()
    prompts, responses = info["prompt_length"], info["response_length"]
    answered = responses > 0
    if not answered.any():
        raise ValueError("no row of the batch has a response")
    found = {
        **_spread("critic/score", tensors["token_level_scores"].sum(-1)[answered]),
        **_spread("critic/rewards", tensors["token_level_rewards"].sum(-1)[answered]),
        **_spread("critic/advantages", tensors["advantages"][mask]),
        **_spread("critic/returns", tensors["returns"][mask]),
    }
    if use_critic:
        values, returns = tensors["values"][mask], tensors["returns"][mask]
        found |= _spread("critic/values", values)
        found["critic/vf_explained_var"] = (1 - (returns - values).var() / (returns.var() + 1e-5)).item()
    for name, lengths, longest in (
        ("response_length", responses, width),
        ("response_length_non_aborted", responses[answered], width),
        ("prompt_length", prompts, tensors["attention_mask"].shape[-1] - width),
    ):
        found |= _spread(name, lengths)
        found[f"{name}/clip_ratio"] = (lengths == longest).float().mean().item()
    found["response/aborted_ratio"] = (~answered).float().mean().item()
    for name, column in (("num_turns", "__num_turns__"), ("tool_call_counts", "tool_call_counts")):
        if column in batch.non_tensor_batch:
            numbers = batch.non_tensor_batch[column]
            found |= {f"{name}/min": numbers.min(), f"{name}/max": numbers.max(), f"{name}/mean": numbers.mean()}
    return found


def _spread(name: str, values: Tensor) -> dict[str, float]:
    number = values.detach().float()
    return {f"{name}/mean": number.mean().item(), f"{name}/max": number.max().item(), f"{name}/min": number.min().item()}


def compute_timing_metrics(batch: Any, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each section, and milliseconds per token of those that handle tokens; of no tokens, 0."""
    info = _compute_response_info(batch)
    responses = info["response_length"].sum().item()
    every = info["prompt_length"].sum().item() + responses
    tokens = {"gen": responses, **dict.fromkeys(("ref", "values", "adv", "update_critic", "update_actor"), every)}
    per_token = {
        f"timing_per_token_ms/{name}": 1000 * timing_raw[name] / count if count else 0.0
        for name, count in tokens.items()
        if name in timing_raw
    }
    return {**{f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}, **per_token}


def compute_throughout_metrics(batch: Any, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Return the tokens of a step, its seconds, and tokens per second and device."""
    total, seconds = sum(batch.meta_info["global_token_num"]), timing_raw["step"]
    return {
        "perf/total_num_tokens": total,
        "perf/time_per_step": seconds,
        "perf/throughput": total / (seconds * n_gpus),
    }


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[Any], float]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Return mean and deviation of each function over samples of `data`, drawn with replacement.

    Raises:
        ValueError: there is nothing to draw from.
    """
    draws = np.random.RandomState(seed)
    values: list[list[float]] = [[] for _ in reduce_fns]
    for _ in range(n_bootstrap):
        sample = [data[row] for row in draws.choice(len(data), size=subset_size, replace=True)]
        for found, reduce in zip(values, reduce_fns, strict=True):
            found.append(reduce(sample))
    return [(float(np.mean(found)), float(np.std(found))) for found in values]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """Return the first value of the answer that most rows give."""
    winner, _ = Counter(row[vote_key] for row in data).most_common(1)[0]
    return next(row[val_key] for row in data if row[vote_key] == winner)  # type: ignore[no-any-return]


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = 42,
    expected_acc_counts: Mapping[tuple[str, str], int] | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Return {data source: {variable: {"mean@N": …, "best@n/mean": …}}}, averaged over the tasks of a source.

    Args:
        data_sources: Of each sample.
        sample_uids: The task of each sample: N samples share one.
        infos_dict: Variable -> the value of each sample. Texts have no metrics; `pred` votes.
        seed: Of the draws.
        expected_acc_counts: (data source, task) -> N. A sample that is missing counts as wrong in `acc`; without those, the
            same is `acc_success_only`.
    """
    tasks: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row, key in enumerate(zip(data_sources, sample_uids, strict=True)):
        tasks[key].append(row)
    with_acc = {source for (source, _), rows in tasks.items() for row in rows if _number(infos_dict.get("acc"), row)}
    for key in expected_acc_counts or {}:
        if key[0] in with_acc:
            tasks.setdefault(key, [])
    found: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for (source, task), rows in tasks.items():
        for name, column in infos_dict.items():
            given = [row for row in rows if _number(column, row)]
            values = [float(column[row]) for row in given]
            votes = [infos_dict["pred"][row] for row in given] if "pred" in infos_dict else None
            expected = None if expected_acc_counts is None or name != "acc" else expected_acc_counts.get((source, task))
            if expected is not None and source in with_acc:
                _add(found[source]["acc_success_only"], values, votes, seed)
                missing = max(expected - len(values), 0)
                values, votes = values + [0.0] * missing, None if missing else votes
            _add(found[source][name], values, votes, seed)
    return {
        source: {name: {m: float(np.mean(v)) for m, v in metrics.items()} for name, metrics in names.items() if metrics}
        for source, names in found.items()
    }


def _add(into: dict[str, list[float]], values: list[float], votes: Sequence[Any] | None, seed: int) -> None:
    if values:
        for metric, value in task_metrics(values, num=len(values), votes=votes, seed=seed).items():
            into[metric].append(value)


def _number(column: Sequence[Any] | None, row: int) -> bool:
    return column is not None and isinstance(column[row], bool | int | float | np.number)
