"""Lay samples out as micro-batches, and convert per-target numbers back to arrays per sample.

In every array of a sample, index t describes token t. Only this module shifts, because position t - 1 predicts token t.

    sample      ids      [ p0 p1 a2 a3 o4 a5 o6 ]      weights [ 0 0 1 1 0 1 0 ]
    row         input    [ p0 p1 a2 a3 o4 ]            without the last weighted token and all after it: nothing reads them
                targets        a2 a3    a5             predicted at columns 1, 2 and 4

Rows are sorted by length and padded on the right, so a batch needs no mask: attention is causal, padding follows every real
token, and no target is predicted at a padded position. Packed samples form one row end to end; `packing.py` describes which
tokens attend to which. Only tokens with a weight become targets (axis S), so the vocabulary projection and the loss are not
computed for prompts and observations. In a run with an observation loss, the same forward pass also predicts the tokens of
observations (axis R, `ReadTargets`); they are not targets of the policy's loss.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from polyturn.batching.microbatch import LayoutSettings as LayoutSettings
from polyturn.batching.microbatch import PlannedBatch, input_lengths, plan, predicted
from polyturn.batching.packing import Packing, pack
from polyturn.core.arrays import Floats, Ids, joined_support
from polyturn.core.errors import AlignmentError
from polyturn.core.routing import has_route
from polyturn.core.sample import TrainSample
from polyturn.tokens.positions import MediaRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadTargets:
    """The tokens that a forward pass predicts in a run with an observation loss (axis R, in the order of the rows).

    They are the targets of the policy's loss (axis S) and the tokens of observations (axis O). A field `x_R` has the meaning
    of `MicroBatch.x_S`, for these tokens.
    """

    flat_R: Tensor
    host_flat_R: NDArray[np.int64]
    targets_R: Tensor
    temperature_R: Tensor
    """[R] the sampling temperature; 1 at observations, because no policy sampled them."""
    support_RK: Tensor | None
    """[R, K] like `MicroBatch.support_SK`; -1 at observations."""
    sample_R: NDArray[np.int64]
    token_R: NDArray[np.int64]
    at_S: Tensor
    """[S] int64: index on axis R of each target of the policy's loss."""
    at_O: Tensor
    """[O] int64: index on axis R of each token of an observation."""
    coef_O: Tensor
    """[O] coefficient of the cross-entropy of each token of an observation."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """The rows of one forward pass, and the targets that they predict."""

    input_ids_BT: Tensor
    """[B, T] int64, padded on the right with 0."""
    position_ids: Tensor
    """[1, T] int64, the same for every row; [3, B, T] if a row has media and the model has three positions per token."""
    num_tokens: int
    """Number of entries of `input_ids_BT` that are not padding."""
    flat_S: Tensor
    """[S] int64: b * T + t of the position before the target, which predicts it."""
    host_flat_S: NDArray[np.int64]
    """`flat_S` in the machine's memory, to look something up by it without waiting for the device."""
    targets_S: Tensor
    """[S] int64 the tokens to predict."""
    loss_coef_S: Tensor
    """[S] coefficient of each target's loss (`algorithms/aggregate.py`)."""
    temperature_S: Tensor | None
    """[S] sampling temperature; None if all are 1."""
    support_SK: Tensor | None
    """[S, K] int64 the tokens from which each target was sampled, padded with -1. A row of only -1 means the whole
    vocabulary; None means the whole vocabulary for every target."""
    advantages_S: Tensor | None
    old_logprobs_S: Tensor | None
    ref_logprobs_S: Tensor | None
    rollout_logprobs_S: Tensor | None
    correction_S: Tensor | None
    marks_S: Tensor | None
    sample_S: NDArray[np.int64]
    """[S] index of each target's sample in the list passed to `layout`."""
    token_S: NDArray[np.int64]
    """[S] index t of each target within its sample."""
    media_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Further inputs of the model: images, videos and sounds, in the order of the rows."""
    routes_NLK: Tensor | None = None
    """[N, L, K] int32 over the flat axis of all rows: the experts that processed each token, -1 if unknown. None if unknown
    for every token."""
    num_experts: int = 0
    """One more than the largest expert in `routes_NLK`."""
    row_indices: tuple[NDArray[np.int64], ...] = ()
    """For each row [T] the indices of its tokens on the flat axis."""
    packing: Packing | None = None
    """The attention mask of rows that lie end to end (`input_ids_BT` is [1, N]); None for padded rows."""
    is_padding: bool = False
    """True if it only evens out the ranks' numbers of forward passes: all coefficients are 0, and metrics skip it."""
    read: ReadTargets | None = None
    """Targets and tokens of observations; None without an observation loss."""

    @property
    def num_targets(self) -> int:
        """The number of targets, S."""
        return len(self.sample_S)

    @property
    def with_observations(self) -> MicroBatch:
        """This micro-batch with the tokens of `read` (axis R) as targets; a forward pass then also predicts observations."""
        read = self.read
        if read is None:
            return self
        return dataclasses.replace(
            self,
            flat_S=read.flat_R,
            host_flat_S=read.host_flat_R,
            targets_S=read.targets_R,
            temperature_S=read.temperature_R,
            support_SK=read.support_RK,
            sample_S=read.sample_R,
            token_S=read.token_R,
        )

    @property
    def num_shared(self) -> int:
        """Number of tokens that are not computed because another row of the micro-batch contains them."""
        return 0 if self.packing is None else sum(map(len, self.packing.row_indices)) - self.num_tokens


def layout(
    samples: Sequence[TrainSample],
    coefs: Sequence[ArrayLike],
    *,
    settings: LayoutSettings,
    batches: Sequence[PlannedBatch] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    media: MediaRows | None = None,
) -> list[MicroBatch]:
    """Lay `samples` out as micro-batches.

    Args:
        samples: The samples of one optimizer step. A sample gets no row if none of its tokens enters a loss.
        coefs: For each sample [T] the coefficient of each token's loss, from `loss_coefs`.
        settings: The size of a micro-batch and how samples lie in it.
        batches: One rank's share of a `MicroBatchPlan`; None plans for a single rank.
        dtype: Type of the per-target numbers.
        device: Device of the tensors.
        media: Makes the model's inputs from images, videos and sounds; None for a text model.

    Raises:
        AlignmentError: the first token of a sample has a weight, although no token precedes it; an entry of `coefs` has
            another length than its sample; only some samples have an array such as advantages; samples have media and
            `media` is None.
    """
    weighted = [np.flatnonzero(s.loss_weights) for s in samples]
    for sample, tokens, coef in zip(samples, weighted, coefs, strict=True):
        if len(tokens) and tokens[0] == 0:
            raise AlignmentError(f"sample {sample.id} weighs its first token; no token precedes it, so its weight must be 0")
        if np.shape(coef) != (len(sample),):
            raise AlignmentError(f"sample {sample.id} has {np.shape(coef)} coefficients for {len(sample)} tokens")
        if sample.media and media is None:
            raise AlignmentError(f"sample {sample.id} has {len(sample.media)} media, but the policy has no processor")
    lengths = input_lengths(samples)
    step = _Step(
        samples=samples,
        inputs=[s.token_ids[:length] for s, length in zip(samples, lengths, strict=True)],
        weighted=weighted,
        arrays={"loss_coef": coefs} | {name: _all_or_none(samples, name) for name in _OPTIONAL},
        dtype=dtype,
        device=device,
        media=media,
        has_observed=_all_or_none(samples, "observed") is not None,
    )
    return [step.lay_out(planned) for planned in (plan(samples, settings=settings).ranks[0] if batches is None else batches)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The inputs of one step's micro-batches; each list has an entry per sample."""

    samples: Sequence[TrainSample]
    inputs: Sequence[Ids]
    weighted: Sequence[NDArray[np.int64]]
    """For each sample the indices of its weighted tokens."""
    arrays: Mapping[str, Sequence[ArrayLike] | None]
    dtype: torch.dtype
    device: torch.device | str
    media: MediaRows | None
    has_observed: bool
    """Whether a loss reads observations."""

    def lay_out(self, planned: PlannedBatch) -> MicroBatch:
        rows, weighted = planned.samples, self.weighted
        counts = [len(weighted[i]) for i in rows]
        input_ids, flat_S, read = self._rows(planned)
        taken = {f"{name}_S": self._take(name, rows) for name in self.arrays}
        if planned.is_padding:  # its sample is also in another micro-batch, so its gradient must be 0
            taken["loss_coef_S"] = torch.zeros_like(taken["loss_coef_S"])
        routes_NLK = self._routes(rows, read["row_indices"], input_ids.size)
        temperature_S = np.repeat([self.samples[i].temperature for i in rows], counts)
        targets_S = np.concatenate([self.samples[i].token_ids[weighted[i]] for i in rows])
        return MicroBatch(
            input_ids_BT=self._to_device(input_ids),
            num_tokens=sum(len(self.inputs[i]) for i in rows) - sum(planned.shared),
            flat_S=self._to_device(flat_S),
            host_flat_S=flat_S,
            targets_S=self._to_device(targets_S.astype(np.int64)),
            temperature_S=None if (temperature_S == 1.0).all() else self._to_device(temperature_S, self.dtype),
            support_SK=self._support(rows, [self.weighted[i] for i in rows]),
            **taken,
            routes_NLK=None if routes_NLK is None else self._to_device(routes_NLK),
            num_experts=0 if routes_NLK is None else int(routes_NLK.max()) + 1,
            sample_S=np.repeat(np.asarray(rows, dtype=np.int64), counts),
            token_S=np.concatenate([weighted[i] for i in rows]),
            is_padding=planned.is_padding,
            read=self._read(planned, read["row_indices"]),
            **read,
        )

    def _read(self, planned: PlannedBatch, row_indices: Sequence[NDArray[np.int64]]) -> ReadTargets | None:
        """Return the targets and observations that a micro-batch predicts; None without an observation loss."""
        if not self.has_observed:
            return None
        rows = [self.samples[i] for i in planned.samples]
        tokens = [predicted(s) for s in rows]
        every, counts = list(zip(rows, tokens, strict=True)), [len(t) for t in tokens]
        is_own_R = np.concatenate([s.loss_weights[t] != 0 for s, t in every])
        coef_R = np.concatenate([np.zeros(len(t)) if s.observed is None else s.observed[t] for s, t in every])
        temperature_R = np.where(is_own_R, np.repeat([s.temperature for s in rows], counts), 1.0)
        coef_O = self._to_device(coef_R[~is_own_R], self.dtype)
        flat_R = np.concatenate([p[t - 1] for p, t in zip(row_indices, tokens, strict=True)])
        return ReadTargets(
            flat_R=self._to_device(flat_R),
            host_flat_R=flat_R,
            targets_R=self._to_device(np.concatenate([s.token_ids[t] for s, t in every]).astype(np.int64)),
            temperature_R=self._to_device(temperature_R, self.dtype),
            support_RK=self._support(planned.samples, tokens),
            sample_R=np.repeat(np.asarray(planned.samples, dtype=np.int64), counts),
            token_R=np.concatenate(tokens),
            at_S=self._to_device(np.flatnonzero(is_own_R)),
            at_O=self._to_device(np.flatnonzero(~is_own_R)),
            coef_O=torch.zeros_like(coef_O) if planned.is_padding else coef_O,
        )

    def _rows(self, planned: PlannedBatch) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, Any]]:
        """Return the ids [B, T], the flat index that predicts each target [S], and further fields of the micro-batch:
        positions, media, packing and row indices."""
        inputs = [self.inputs[i] for i in planned.samples]
        # Token t is predicted at position t - 1: this subtraction is the shift.
        before = [self.weighted[i] - 1 for i in planned.samples]
        if planned.shared:
            packing = pack(inputs, shared=planned.shared)
            input_ids = np.zeros((1, packing.num_tokens), dtype=np.int64)
            for span, ids in zip(packing.row_indices, inputs, strict=True):
                input_ids[0, span] = ids
            flat_S = np.concatenate([span[t] for span, t in zip(packing.row_indices, before, strict=True)])
            positions = self._to_device(packing.positions_N)[None]
            read = {"position_ids": positions, "media_inputs": {}, "packing": packing, "row_indices": packing.row_indices}
            return input_ids, flat_S, read
        width = max(map(len, inputs))
        input_ids = np.zeros((len(inputs), width), dtype=np.int64)
        for b, ids in enumerate(inputs):
            input_ids[b, : len(ids)] = ids
        flat_S = np.concatenate([b * width + t for b, t in enumerate(before)])
        row_indices = tuple(b * width + np.arange(len(ids)) for b, ids in enumerate(inputs))
        if self.media is None:
            return (
                input_ids,
                flat_S,
                {"position_ids": torch.arange(width, device=self.device)[None], "row_indices": row_indices},
            )
        inputs_and_media = [(self.inputs[i], self.samples[i].media) for i in planned.samples]
        read = self.media.stack(inputs_and_media, width=width, device=self.device)
        return (
            input_ids,
            flat_S,
            {"position_ids": read.pop("position_ids"), "media_inputs": read, "row_indices": row_indices},
        )

    def _to_device(self, array: NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
        """Return an array as a tensor on the device, without waiting for the kernels that the device still has to run."""
        # Safe although the array may be freed: CUDA copies memory that is not pinned before the call returns.
        return torch.from_numpy(array).to(device=self.device, dtype=dtype, non_blocking=True)

    def _routes(self, rows: Sequence[int], row_indices: Sequence[NDArray[np.int64]], count: int) -> NDArray[np.int32] | None:
        """Return [N, L, K] the experts of each token of the flat axis, which has N = `count` tokens; -1 at padding and for
        tokens whose experts are unknown. Return None if no experts are known."""
        routes_of_rows = [self.samples[i].routed_experts for i in rows]
        known = next((routes for routes in routes_of_rows if routes is not None), None)
        if known is None:
            return None
        flat = np.full((count, *known.shape[1:]), -1, np.int32)
        for span, routes in zip(row_indices, routes_of_rows, strict=True):
            if routes is not None:
                own = routes[: len(span)]  # [T, L, K], cut at the same token as the row
                flat[span] = np.where(has_route(own)[:, None, None], own.astype(np.int32), -1)
        return flat

    def _support(self, rows: Sequence[int], tokens: Sequence[NDArray[np.int64]]) -> Tensor | None:
        """Return [S, K] the supports of the given tokens of each row; None if all were sampled from the whole vocabulary."""
        supports = [self.samples[i].support for i in rows]
        parts = [(len(own), None if known is None else known[own]) for own, known in zip(tokens, supports, strict=True)]
        support_SK = joined_support(parts)
        if support_SK is None or not (support_SK >= 0).any():
            return None
        return self._to_device(support_SK.astype(np.int64))

    def _take(self, name: str, rows: Sequence[int]) -> Any:
        """Return [S] the samples' array `name` at the targets of `rows`; None if they have no such array."""
        arrays = self.arrays[name]
        if arrays is None:
            return None
        picked = np.concatenate([np.asarray(arrays[i])[self.weighted[i]] for i in rows])
        return self._to_device(picked, self.dtype)


def scatter_back(batches: Sequence[MicroBatch], values: Sequence[Tensor], *, lengths: Sequence[int]) -> list[Floats]:
    """Convert per-target numbers to one array per sample: [T], 0 at tokens that are not targets.

    Args:
        batches: The micro-batches from `layout`.
        values: For each batch [S] the numbers of its targets.
        lengths: The length of each sample that was passed to `layout`.
    """
    pairs = [(batch, value_S.detach()) for batch, value_S in zip(batches, values, strict=True) if not batch.is_padding]
    # Copy from the device once for all micro-batches, because each copy waits until the device is done.
    values_N = torch.cat([value_S for _, value_S in pairs] or [torch.empty(0)]).to("cpu", torch.float32).numpy()
    return by_sample([batch for batch, _ in pairs], values_N, lengths=lengths)


def by_sample(batches: Sequence[MicroBatch], values_N: Floats, *, lengths: Sequence[int]) -> list[Floats]:
    """Convert [N] the numbers of the targets of all `batches`, one batch after the other, as `scatter_back` does."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    # Write into one flat array and cut it into samples at the end: this takes one write instead of one per sample.
    flat = np.zeros(starts[-1], dtype=np.float32)
    flat[np.concatenate([starts[b.sample_S] + b.token_S for b in batches] or [np.empty(0, np.int64)])] = values_N
    return [flat[a:b] for a, b in itertools.pairwise(starts)]


_OPTIONAL = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "correction", "marks")


def _all_or_none(samples: Sequence[TrainSample], name: str) -> list[Floats] | None:
    """Return one array per sample, or None if no sample has it. An array that only some samples have is an error."""
    arrays: list[Floats | None] = [getattr(s, name) for s in samples]
    present = [a for a in arrays if a is not None]
    if present and len(present) < len(arrays):
        lacking = samples[arrays.index(None)].id
        raise AlignmentError(
            f"sample {lacking} has no {name}, but other samples have; set {name} on all samples of a batch or on none"
        )
    return present or None
