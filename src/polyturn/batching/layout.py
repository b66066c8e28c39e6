"""From samples to micro-batches and back: the ONE place where targets are shifted.

index t describes token t; the shift to targets happens once, here.

    sample      ids      [ p0 p1 a2 a3 o4 a5 o6 ]      weights [ 0 0 1 1 0 1 0 ]
    row         input    [ p0 p1 a2 a3 o4 ]            cut before the last weighted token: what follows changes nothing
                targets        a2 a3    a5             read off at columns 1, 2 and 4

Rows are sorted by length and padded on the right, so a batch needs no mask at all: attention is causal, padding stands
after every real token, and no target is read off at a padded position. Only positions with a weight become targets
(axis S), so the vocabulary projection and everything after it costs nothing for prompts and observations.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from polyturn.core.arrays import Floats
from polyturn.core.errors import AlignmentError, ConfigError
from polyturn.core.sample import TrainSample
from polyturn.tokens.positions import MediaRows


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSettings:
    """How large a micro-batch may be."""

    max_tokens_per_batch: int = 4096
    """Rows times the longest row, padding included. A single longer row makes a micro-batch of its own."""
    max_targets_per_batch: int | None = None
    """Bounds the memory of the logits, [targets, vocabulary]; None means no bound."""
    max_padding_per_batch: int | None = None
    """A micro-batch ends before its padding would pass so many tokens; None takes a sixteenth of `max_tokens_per_batch`.
    One forward pass more costs about as much as this, computing padding costs more."""

    def __post_init__(self) -> None:
        if self.max_tokens_per_batch < 1:
            raise ConfigError(f"max_tokens_per_batch is {self.max_tokens_per_batch}; it must be at least 1")
        if self.max_targets_per_batch is not None and self.max_targets_per_batch < 1:
            raise ConfigError(f"max_targets_per_batch is {self.max_targets_per_batch}; it must be at least 1, or None")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows for one forward pass, and the targets that are read off them."""

    input_ids_BT: Tensor
    """[B, T] int64, padded on the right with 0."""
    position_ids: Tensor
    """[1, T] int64, the same for every row; [3, B, T] where a row shows media to a model with three positions a token."""
    num_tokens: int
    """How many entries of `input_ids_BT` are real."""
    flat_S: Tensor
    """[S] int64: b * T + t of the position whose next token is the target."""
    targets_S: Tensor
    """[S] int64 the tokens to predict."""
    loss_coef_S: Tensor
    """[S] what each target's loss is multiplied by (`algorithms/aggregate.py`)."""
    temperature_S: Tensor | None
    """[S] or None where every temperature is 1."""
    advantages_S: Tensor | None
    old_logprobs_S: Tensor | None
    ref_logprobs_S: Tensor | None
    rollout_logprobs_S: Tensor | None
    correction_S: Tensor | None
    marks_S: Tensor | None
    sample_S: NDArray[np.int64]
    """[S] the sample that each target belongs to, an index into the list that was laid out."""
    token_S: NDArray[np.int64]
    """[S] the target's index t within its sample."""
    media_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """What the model reads beside ids and positions: the rows' images, videos and sounds, in the order of the rows."""

    @property
    def num_targets(self) -> int:
        """S."""
        return len(self.sample_S)


def layout(
    samples: Sequence[TrainSample],
    *,
    coefs: Sequence[ArrayLike],
    settings: LayoutSettings,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    media: MediaRows | None = None,
) -> list[MicroBatch]:
    """Cut `samples` into micro-batches of rows of like length, shortest first.

    Args:
        samples: Everything that one optimizer step trains on. Samples without a weighted token take no row.
        coefs: For each sample [T] the coefficient of each token's loss, from `loss_coefs`.
        settings: The size of a micro-batch.
        dtype: Of the per-target numbers.
        device: Where the tensors go.
        media: Makes what a model reads of images, videos and sounds; None for text.

    Raises:
        AlignmentError: a sample weighs its first token, which nothing precedes; `coefs` have another length; some samples
            carry an array (such as advantages) that others lack; samples show media and `media` is None.
    """
    weighted = [np.flatnonzero(s.loss_weights) for s in samples]
    for sample, tokens, coef in zip(samples, weighted, coefs, strict=True):
        if len(tokens) and tokens[0] == 0:
            raise AlignmentError(f"sample {sample.id} weighs its first token; no token precedes it, so its weight must be 0")
        if np.shape(coef) != (len(sample),):
            raise AlignmentError(f"sample {sample.id} has {np.shape(coef)} coefficients for {len(sample)} tokens")
        if sample.media and media is None:
            raise AlignmentError(f"sample {sample.id} shows {len(sample.media)} media and the policy was given no processor")
    lengths = [int(tokens[-1]) if len(tokens) else 0 for tokens in weighted]
    optional = {name: _all_or_none(samples, name) for name in _OPTIONAL}
    batches = []
    for rows in _cut(lengths, [len(tokens) for tokens in weighted], settings):
        input_ids = np.zeros((len(rows), lengths[rows[-1]]), dtype=np.int64)
        for b, i in enumerate(rows):
            input_ids[b, : lengths[i]] = samples[i].token_ids[: lengths[i]]
        counts = [len(weighted[i]) for i in rows]
        token_S = np.concatenate([weighted[i] for i in rows])
        row_S = np.repeat(np.arange(len(rows)), counts)
        temperature_S = np.repeat([samples[i].temperature for i in rows], counts)

        def take(arrays: Sequence[ArrayLike], rows: list[int] = rows) -> Tensor:
            picked = np.concatenate([np.asarray(arrays[i])[weighted[i]] for i in rows])
            return torch.from_numpy(picked).to(device=device, dtype=dtype)

        row_inputs = {"position_ids": torch.arange(input_ids.shape[1], device=device)[None]}
        if media is not None:
            shown = [(samples[i].token_ids[: lengths[i]], samples[i].media) for i in rows]
            row_inputs = media.stack(shown, width=input_ids.shape[1], device=device)
        targets_S = np.concatenate([samples[i].token_ids[weighted[i]] for i in rows])
        batches.append(
            MicroBatch(
                input_ids_BT=torch.from_numpy(input_ids).to(device),
                position_ids=row_inputs.pop("position_ids"),
                num_tokens=sum(lengths[i] for i in rows),
                # Token t is predicted at position t - 1: this subtraction is the shift.
                flat_S=torch.from_numpy(row_S * input_ids.shape[1] + token_S - 1).to(device),
                targets_S=torch.from_numpy(targets_S.astype(np.int64)).to(device),
                loss_coef_S=take(coefs),
                temperature_S=None
                if (temperature_S == 1.0).all()
                else torch.from_numpy(temperature_S).to(device=device, dtype=dtype),
                advantages_S=take(optional["advantages"]) if optional["advantages"] else None,
                old_logprobs_S=take(optional["old_logprobs"]) if optional["old_logprobs"] else None,
                ref_logprobs_S=take(optional["ref_logprobs"]) if optional["ref_logprobs"] else None,
                rollout_logprobs_S=take(optional["rollout_logprobs"]) if optional["rollout_logprobs"] else None,
                correction_S=take(optional["correction"]) if optional["correction"] else None,
                marks_S=take(optional["marks"]) if optional["marks"] else None,
                sample_S=np.repeat(np.asarray(rows, dtype=np.int64), counts),
                token_S=token_S,
                media_inputs=row_inputs,
            )
        )
    return batches


def scatter_back(batches: Sequence[MicroBatch], values: Sequence[Tensor], *, lengths: Sequence[int]) -> list[Floats]:
    """Put numbers per target back onto the samples: for each sample [T], 0 where nothing is weighted.

    Args:
        batches: What `layout` returned.
        values: For each batch [S].
        lengths: The length of each sample that was laid out.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    flat = np.zeros(starts[-1], dtype=np.float32)
    for batch, value_S in zip(batches, values, strict=True):
        flat[starts[batch.sample_S] + batch.token_S] = value_S.detach().to("cpu", torch.float32).numpy()
    return [flat[a:b] for a, b in itertools.pairwise(starts)]


_OPTIONAL = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "correction", "marks")


def _all_or_none(samples: Sequence[TrainSample], name: str) -> list[Floats] | None:
    """Return one array per sample, or None when no sample has it; half of them is a mistake upstream."""
    arrays: list[Floats | None] = [getattr(s, name) for s in samples]
    present = [a for a in arrays if a is not None]
    if present and len(present) < len(arrays):
        lacking = samples[arrays.index(None)].id
        raise AlignmentError(
            f"sample {lacking} has no {name}, and others have: set them on all samples of a batch or on none"
        )
    return present or None


def _cut(lengths: Sequence[int], num_targets: Sequence[int], settings: LayoutSettings) -> list[list[int]]:
    """Return the sample indices of each micro-batch, by rising length, equal lengths in their order."""
    max_targets = settings.max_targets_per_batch or sum(num_targets)
    max_padding = settings.max_padding_per_batch
    if max_padding is None:
        max_padding = settings.max_tokens_per_batch // 16
    batches: list[list[int]] = []
    targets = tokens = 0
    for i in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: lengths[i]):
        padded = (len(batches[-1]) + 1) * lengths[i] if batches else 0
        is_full = (
            padded > settings.max_tokens_per_batch
            or padded - tokens - lengths[i] > max_padding
            or targets + num_targets[i] > max_targets
        )
        if not batches or is_full:
            batches.append([])
            targets = tokens = 0
        batches[-1].append(i)
        targets += num_targets[i]
        tokens += lengths[i]
    return batches
