"""Completions sampled in parts: builds the request for the rest of an interrupted completion, and joins the parts.

[ 1 2 3 ] -> ( 4 5 cut )      then  [ 1 2 3 4 5 ] -> ( 6 7 )      =      [ 1 2 3 ] -> ( 4 5 6 7 ), versions 0 and 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from polyturn.core.errors import EngineError
from polyturn.core.generation import Completion, FinishReason, GenerateRequest, joined_routes, support_of

_STRIDE = 0x9E3779B97F4A7C15
_MAX_VAIN = 16


def continued(request: GenerateRequest, parts: Sequence[Completion]) -> GenerateRequest:
    """Return the request for the tokens that follow `parts`; if the request has a seed, each part gets another one."""
    if not parts:
        return request
    ids = [part.token_ids for part in parts]
    sampling = request.sampling
    seed = None if sampling.seed is None else (sampling.seed + len(parts) * _STRIDE) % (1 << 63)
    return dataclasses.replace(
        request,
        prompt_ids=np.concatenate([request.prompt_ids, *ids]),
        sampling=dataclasses.replace(sampling, max_tokens=sampling.max_tokens - sum(map(len, ids)), seed=seed),
        routed_from=request.routed_from + sum(len(p.routed_experts) for p in parts if p.routed_experts is not None),
    )


def before_banned(request: GenerateRequest, parts: Sequence[Completion]) -> Completion | None:
    """Return the newest part, cut before its first banned id; None if it has no banned id.

    The caller samples again from there, which gives the same distribution as sampling from all ids but the banned ones.

    Raises:
        EngineError: the last `_MAX_VAIN` parts all began with a banned id, so the request makes no progress.
    """
    part, banned = parts[-1], request.sampling.banned_token_ids
    at = np.flatnonzero(np.isin(part.token_ids, banned)).tolist() if banned else []
    if not at:
        return None
    count = at[0]
    if not count and len(parts) >= _MAX_VAIN and not any(len(p.token_ids) for p in parts[-_MAX_VAIN:-1]):
        raise EngineError(
            f"request {request.request_id!r} sampled the banned id {int(part.token_ids[0])} {_MAX_VAIN} times in a row; "
            "only images and the template may write it (with temperature 0, every retry samples it again)"
        )
    return part.head(count, part.finish_reason)


def joined(parts: Sequence[Completion]) -> Completion:
    """Join the parts of a completion, with the policy versions of each part."""
    if len(parts) == 1:
        return parts[0]
    runs: list[tuple[int, int]] = []
    start = 0
    for part in parts:
        runs += [(start + first, version) for first, version in part.policy_versions if len(part.token_ids)]
        start += len(part.token_ids)
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return Completion(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate(logprobs) if len(logprobs) == len(parts) else None,
        support=support_of(parts),
        finish_reason=parts[-1].finish_reason,
        policy_versions=version_runs(runs, current=0) if runs else parts[-1].policy_versions,
        routed_experts=joined_routes(parts),
        info={name: sum(part.info.get(name, 0) for part in parts) for part in parts for name in part.info},
    )


def version_runs(runs: Sequence[tuple[int, int]], *, current: int) -> tuple[tuple[int, int], ...]:
    """Merge neighbouring (first token, version) runs of the same version; no runs give ((0, current),)."""
    out: list[tuple[int, int]] = []
    for start, version in runs or [(0, current)]:
        if not out or out[-1][1] != version:
            out.append((start if out else 0, version))
    return tuple(out)


def nothing(version: int) -> Completion:
    """Return the empty completion of a request that was aborted before it was sent."""
    return Completion(
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        finish_reason=FinishReason.ABORT,
        policy_versions=((0, version),),
        info={"prefilled_tokens": 0},
    )
