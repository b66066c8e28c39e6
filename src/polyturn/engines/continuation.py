"""A completion in parts: what an engine is asked after one was cut, and how the parts become one again.

[ 1 2 3 ] -> ( 4 5 cut )      then  [ 1 2 3 4 5 ] -> ( 6 7 )      =      [ 1 2 3 ] -> ( 4 5 6 7 ), versions 0 and 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from polyturn.core.generation import Completion, GenerateRequest

_STRIDE = 0x9E3779B97F4A7C15


def continued(request: GenerateRequest, parts: Sequence[Completion]) -> GenerateRequest:
    """Return the request for the rest of a completion of which `parts` are there; a seed gives the rest its own."""
    if not parts:
        return request
    ids = [part.token_ids for part in parts]
    sampling = request.sampling
    seed = None if sampling.seed is None else (sampling.seed + len(parts) * _STRIDE) % (1 << 63)
    return dataclasses.replace(
        request,
        prompt_ids=np.concatenate([request.prompt_ids, *ids]),
        sampling=dataclasses.replace(sampling, max_tokens=sampling.max_tokens - sum(map(len, ids)), seed=seed),
    )


def joined(parts: Sequence[Completion]) -> Completion:
    """Return the parts of one completion as one, with the versions of each."""
    if len(parts) == 1:
        return parts[0]
    runs: list[tuple[int, int]] = []
    start = 0
    for part in parts:
        for first, version in part.policy_versions if len(part.token_ids) else ():
            if not runs or runs[-1][1] != version:
                runs.append((start + first, version))
        start += len(part.token_ids)
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return Completion(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate(logprobs) if len(logprobs) == len(parts) else None,
        finish_reason=parts[-1].finish_reason,
        policy_versions=tuple(runs) or parts[-1].policy_versions,
        info={"prefilled_tokens": sum(part.info.get("prefilled_tokens", 0) for part in parts), "parts": len(parts)},
    )
