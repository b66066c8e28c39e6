"""A completion in parts: what a weight update or an abort cut in two is asked for again, and put together as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from polyturn.core.generation import Completion, FinishReason, GenerateRequest


def version_runs(runs: Sequence[tuple[int, int]], *, current: int) -> tuple[tuple[int, int], ...]:
    """Return (first token, version) runs from token 0 that change at each entry; `current` where there are none."""
    out: list[tuple[int, int]] = []
    for start, version in runs or [(0, current)]:
        if not out or out[-1][1] != version:
            out.append((start if out else 0, version))
    return tuple(out)


def continued(request: GenerateRequest, parts: Sequence[Completion]) -> GenerateRequest:
    """Return the request for the rest of a completion of which `parts` are there."""
    ids = [part.token_ids for part in parts]
    done = sum(map(len, ids))
    return dataclasses.replace(
        request,
        prompt_ids=np.concatenate([request.prompt_ids, *ids]),
        sampling=dataclasses.replace(request.sampling, max_tokens=request.sampling.max_tokens - done),
    )


def joined(parts: Sequence[Completion]) -> Completion:
    """Return the parts of one completion as one."""
    if len(parts) == 1:
        return parts[0]
    versions: list[tuple[int, int]] = []
    start = 0
    for part in parts:
        versions += [(start + first, version) for first, version in part.policy_versions if len(part.token_ids)]
        start += len(part.token_ids)
    return Completion(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts if part.logprobs is not None]),
        finish_reason=parts[-1].finish_reason,
        policy_versions=version_runs(versions, current=parts[-1].policy_versions[-1][1]),
        info={"prefilled_tokens": sum(part.info["prefilled_tokens"] for part in parts), "parts": len(parts)},
    )


def nothing(version: int) -> Completion:
    """Return what a request has that was ended before it was sent."""
    return Completion(
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        finish_reason=FinishReason.ABORT,
        policy_versions=((0, version),),
        info={"prefilled_tokens": 0},
    )
