"""ModelBackend: a network in this process with its optimizer, the loop over micro-batches, and the state.

    samples, coefficients -> micro-batches -> for each: forward, terms of the objective, backward
    optim_step: norm, clip, AdamW, clear

The `Placement` decides whether the parameters are whole on one device or in this rank's shards. One call of
`forward_backward` takes all samples of one optimizer step. The coefficients are already normalised over that batch, so the
gradients of its micro-batches add up exactly (I7).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor, nn
from transformers import PreTrainedModel

from polyturn.batching.layout import LayoutSettings, MicroBatch, by_sample, scatter_back
from polyturn.batching.layout import layout as cut_samples
from polyturn.core.arrays import Floats
from polyturn.core.errors import CheckpointError, ConfigError, TrainingError
from polyturn.core.metrics import Metrics, Sum, merge
from polyturn.core.protocols import PassResult
from polyturn.core.sample import TrainSample
from polyturn.core.seeds import derive_seed
from polyturn.engines.routers import Routers
from polyturn.engines.weights.group import GroupEnd
from polyturn.engines.weights.stream import TensorKind
from polyturn.tokens.positions import MediaRows
from polyturn.training.agreement import agreement
from polyturn.training.backend import ENTROPY, NO_WEIGHTS, OWN, REFERENCE, TermWeights
from polyturn.training.lora import adapter_replaced, advice, base_weights, has_lora, merged_weights
from polyturn.training.loss_terms import Objective, PassFigures, as_step
from polyturn.training.model import PolicyModel, ScoringModel, ValueModel
from polyturn.training.optim import Optimizer, OptimSettings
from polyturn.training.pass_clock import PassClock
from polyturn.training.reference import Scorer
from polyturn.training.shards import (
    flat,
    inside,
    is_written,
    read_shards,
    require_same_shapes,
    stored_kinds,
    write_shards,
)
from polyturn.training.weight_shifts import WeightShifts, groups_of

logger = logging.getLogger(__name__)

Cut = Callable[[Sequence[TrainSample], Sequence[ArrayLike]], list[MicroBatch]]


class Placement:
    """Where a network's parameters are, and how its passes and checkpoints handle them.

    This base class leaves the model where it is. An engine may share its tensors, which are only written in place.
    """

    needs_packing = False
    """Whether only packed rows can be computed."""

    def __init__(self) -> None:
        self._seed = torch.initial_seed() >> 1
        self._row = 0
        """Number of this process's row; the processes of a row see the same samples."""

    def policy(
        self, model: PreTrainedModel, *, routers: Routers | None = None, replays: bool = False, is_copy: bool = True
    ) -> ScoringModel:
        """Return the network of a causal language model, with its `routers` if they are recorded. `is_copy` says that its
        weights are those of the trained model."""
        return PolicyModel(model, routers=routers, replays=replays)

    def values(self, backbone: PreTrainedModel) -> ScoringModel:
        """Return the network of a value function over `backbone`."""
        return ValueModel(backbone)

    def optimizer(self, network: ScoringModel, settings: OptimSettings) -> Optimizer:
        """Move `network` to its devices for training, and return its optimizer."""
        return Optimizer(network.saved, settings)

    def freeze(self, network: ScoringModel, *, is_copy: bool) -> None:
        """Move `network`, which only scores, to its devices; `is_copy` says that it is a copy of the trained network."""

    def device(self, network: ScoringModel) -> torch.device:
        """Return the device of this process."""
        return next(network.saved.parameters()).device

    def in_step(self, cut: Cut) -> Cut:
        """Wrap `cut` so that every process gets as many micro-batches as the process with the most."""
        return cut

    @contextmanager
    def drawing(self, device: torch.device, *of: int) -> Iterator[None]:
        """Draw the random numbers of dropout from the run's seed and `of`, which identifies a pass: a resumed run and the
        processes of a row draw the same ones, and other rows others."""
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(derive_seed(self._seed, *of, self._row))
            yield

    def before_backward(self, network: ScoringModel, *, is_last: bool) -> None:
        """Prepare for a backward pass; `is_last` says that it is the last one before the optimizer step."""

    def release(self, network: ScoringModel) -> None:
        """Free the parameters that the last pass gathered from other processes."""

    def adapter_replaced(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Use other adapter tensors within the context. Until its end the parameters point to other storage, so an engine
        that shares the original storage is unaffected."""
        return adapter_replaced(model, tensors)


def fitting_layout(
    settings: LayoutSettings, networks: Sequence[ScoringModel], placement: Placement
) -> tuple[LayoutSettings, bool]:
    """Try out all networks. If one cannot be packed, return the settings without packing, and True.

    Raises:
        ConfigError: a network cannot be packed, and the placement requires packing.
    """
    # All networks, because a reference and a teacher score the same micro-batches as the policy.
    packs, whys = settings.packed or settings.shared_prefix, []
    for network in networks:
        whys.append((type(network.backbone).__name__, network.try_out(packs=packs)))
        placement.release(network)
    for name, why in whys:
        if why is not None and placement.needs_packing:
            raise ConfigError(
                f"train.distributed.context_parallel splits packed rows, and {name} cannot be packed, because {why}; set it "
                "to 1"
            )
        if why is not None:
            logger.warning(
                "Samples are laid out in padded rows without shared prefixes, because %s cannot be packed: %s",
                name,
                why,
            )
            return dataclasses.replace(settings, packed=False, shared_prefix=False), True
    return settings, False


class ModelBackend:
    """Trains a network, or this process's share of it; implements `Backend`."""

    def __init__(
        self,
        network: ScoringModel,
        *,
        optimizer: Optimizer,
        objectives: Mapping[str, Objective],
        placement: Placement,
        layout: LayoutSettings,
        media: MediaRows | None = None,
        reference: Scorer | None = None,
        is_packing_refused: bool = False,
    ) -> None:
        """Train `network`, which `placement` has moved to its devices.

        Args:
            network: The forward pass.
            optimizer: The optimizer from `placement`.
            objectives: Name -> objective.
            placement: The placement of the network.
            layout: The size of micro-batches and how samples lie in them.
            media: Lays out images, videos and sounds; None for text.
            reference: The frozen reference; None without one.
            is_packing_refused: Whether packing was requested but `layout` does not pack, because the model cannot be packed.
        """
        self.network = network.train()
        self.optimizer = optimizer
        self._objectives = dict(objectives)
        self._placement = placement
        self._reference = reference
        self._is_packing_refused = is_packing_refused
        self._shifts = WeightShifts()
        self._writing: Future[Any] | None = None
        self._group_end = GroupEnd()
        # For coefficients, advantages and log-probabilities: the 8 bits of bfloat16 cannot resolve a ratio near 1.
        dtype = torch.promote_types(next(network.parameters()).dtype, torch.float32)
        cut = functools.partial(cut_samples, settings=layout, dtype=dtype, device=placement.device(network), media=media)
        self.lay_out = placement.in_step(cut)
        """(samples, coefs) -> the micro-batches of this process."""

    @property
    def model(self) -> nn.Module:
        """The trained model, with the names of its state."""
        return self.network.saved

    @property
    def step_count(self) -> int:
        """Number of optimizer steps, taken or skipped."""
        return self.optimizer.step_count

    def score(self, samples: Sequence[TrainSample], scorer: str = OWN) -> list[Floats]:
        """Return for each sample [T] the result of `scorer` at each weighted token, 0 elsewhere.

        Raises:
            ConfigError: `scorer` is the reference, and there is none.
        """
        if scorer in (OWN, ENTROPY):
            scores = self.network.scores if scorer == OWN else self.network.entropies
        elif self._reference is not None:
            scores = self._reference.logprobs
        else:
            raise ConfigError("this policy was built without a reference; pass reference=True")
        batches = self.lay_out(samples, [s.loss_weights for s in samples])
        # Without dropout, as in the engine: an adapter's dropout is not part of the policy that is scored.
        self.network.eval()
        try:
            with torch.no_grad():
                values = []
                for batch in batches:
                    # The reference chooses its experts itself.
                    with self.network.routed(batch) if scorer != REFERENCE else nullcontext():
                        values.append(scores(batch))
        finally:
            self.network.train()
        self._placement.release(self.network)
        return scatter_back(batches, values, lengths=[len(s) for s in samples])

    def forward_backward(
        self,
        samples: Sequence[TrainSample],
        coefs: Sequence[ArrayLike],
        objective: str,
        weights: TermWeights = NO_WEIGHTS,
    ) -> PassResult:
        """Add the gradient of an objective over `samples`.

        Raises:
            TrainingError: the samples lack arrays that the objective needs; the gradient is cleared. If the loss is not
                finite, `optim_step` skips the step or ends the run.
        """
        start = time.perf_counter()
        batches = self.lay_out(samples, coefs)
        layout_s = time.perf_counter() - start
        device = self._placement.device(self.network)
        figures, clock = PassFigures(), PassClock(device)
        self.network.train()
        minimised = self._objectives[objective]
        terms_of = minimised.bind(samples, weights)
        try:
            for number, batch in enumerate(batches):
                # Around both passes, because the backward pass may compute layers again.
                with self.network.routed(batch), self._placement.drawing(device, self.step_count, number):
                    with clock.lap("time/forward"):
                        terms = terms_of(self.network, batch)
                        loss = terms.total(batch.loss_coef_S)
                        if not batch.is_padding:
                            figures.add(batch, terms, loss)
                    # Even if the loss is not finite, because the pass is collective and all ranks must make it.
                    with clock.lap("time/backward"):
                        self._placement.before_backward(self.network, is_last=number == len(batches) - 1)
                        loss.backward()
                        self.optimizer.collect()
        except TrainingError:
            self.optimizer.zero_grad()
            raise
        results = figures.read()
        problem = None if results.spoilt is None else minimised.problem(samples, *results.spoilt, step=self.step_count)
        seconds = clock.seconds()
        metrics: Metrics = as_step(merge(results.parts)) | {name: Sum(spent) for name, spent in seconds.items()}
        metrics["time/layout"] = Sum(layout_s)
        metrics["time/forward_backward"] = Sum(sum(seconds.values()))
        metrics["tokens/shared_prefix"] = Sum(sum(b.num_shared for b in figures.batches))
        if self._is_packing_refused:
            metrics["tokens/packing_refused"] = Sum(1)
        lengths = [len(s) for s in samples]
        both = (results.logprobs_N, results.entropies_N)
        logprobs, entropies = (None if of is None else by_sample(figures.batches, of, lengths=lengths) for of in both)
        if problem is not None:  # passed to the optimizer instead of raised: all ranks must reach the same step and skip it
            self.optimizer.spoil(problem)
        elif logprobs is not None:
            metrics |= agreement(samples, logprobs)
        return PassResult(metrics, logprobs, entropies, is_finite=problem is None)

    def optim_step(self) -> Metrics:
        """Take one optimizer step from the summed gradient, and clear it.

        Raises:
            TrainingError: more consecutive steps had a loss or gradient that is not finite than may be skipped.
        """
        self._placement.release(self.network)  # a gathered copy would keep the weights from before the step
        return self.optimizer.step()

    def save(self, folder: Path) -> None:
        """Start writing this process's part of the state to `folder`, from a copy."""
        self._writing = write_shards(self.state_dict(), folder)

    def is_saved(self) -> bool:
        """Return whether the state is written on all ranks.

        Raises:
            CheckpointError: it could not be written.
        """
        return self._writing is None or is_written(self._writing, whose=self.network.whose)

    def load(self, folder: Path) -> None:
        """Load the state from `folder`, written by any number of ranks; every rank must call it.

        Raises:
            CheckpointError: the state is missing, damaged, of another model, or lacks the reference.
        """
        whose, names, clock = self.network.whose, self.network.names, self.optimizer.state_dict()
        # Metadata first, so that a state of another model raises before any tensor is overwritten.
        kinds = stored_kinds(folder, whose=whose)
        # A parameter has moments from its first gradient on; make the moments that the folder has, to read into them.
        self.optimizer.make_moments(lambda name: all(f"moments/exp_avg/{n}" in kinds for n in names.sources(name)))
        sections = self._sections()
        self._check(kinds, flat({prefix: names.kinds(tensors) for prefix, tensors in sections.items()}))
        names.read(sections, folder, whose=whose)
        read_shards(clock, folder, whose=whose)
        self.optimizer.load_state_dict(clock)

    def state_dict(self) -> dict[str, Any]:
        """Return this process's part of a checkpoint: live tensors or parts of tensors, and numbers."""
        sections = self._sections().items()
        return self.optimizer.state_dict() | flat({p: self.network.names.shards(tensors) for p, tensors in sections})

    def kinds(self, is_merged: bool) -> dict[str, TensorKind]:
        """Return the names that `gathered` accepts: the weights with an adapter merged, or the trained tensors."""
        return self.network.names.kinds(self.network.own_tensors() if is_merged else self.network.tensors())

    def gathered(self, names: Sequence[str], is_merged: bool) -> dict[str, Tensor] | None:
        """Gather whole tensors on the CPU of rank 0, one at a time; return None on other ranks."""
        return self._gathered(names, is_merged, Tensor.cpu)

    def _gathered(
        self, names: Sequence[str], is_merged: bool, keep: Callable[[Tensor], Tensor] = lambda whole: whole
    ) -> dict[str, Tensor] | None:
        self._placement.release(self.network)
        tensors = self.network.own_tensors() if is_merged else self.network.tensors()
        is_adapted, collected = is_merged and has_lora(self.network.saved), dict[str, Tensor]()
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        for name in names:
            whole = self.network.names.whole(tensors, name)
            if is_adapted:
                whole = self.network.merged(name, whole)
            if whole is not None and is_first:
                collected[name] = keep(whole)
        return collected if is_first else None

    def over(self, pieces: Sequence[Sequence[str]], is_merged: bool, use: Callable[..., Any]) -> Any:
        """Gather the tensors of each piece of names in turn, and return the result of `use(tensors, group_end)` on these
        mappings (see `UseThere`). Only rank 0 calls `use`; the other ranks take part in gathering and return None."""
        tensors = (self._gathered(names, is_merged) or {} for names in pieces)
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        try:
            return use(tensors, self._group_end) if is_first else None
        finally:  # also if `use` raises: the other ranks gather every piece, and would wait for rank 0
            for _ in tensors:
                continue

    def weights(self) -> Mapping[str, Tensor]:
        """Return name -> weight without gradient, for an engine: live, or a merged copy if an adapter changes it."""
        return merged_weights(self.network.saved) if has_lora(self.network.saved) else base_weights(self.network.saved)

    def trained(self) -> Mapping[str, Tensor]:
        """Return name -> live tensor that training changes; with LoRA, the adapter's."""
        return {name: tensor.detach() for name, tensor in self.network.tensors().items()}

    def weight_groups(self, is_merged: bool = True) -> list[str]:
        """Return the groups for `shift_weights`, from the names of `weights` or of `trained`."""
        return list(groups_of(self.kinds(is_merged)))

    def shift_weights(self, group: str, scale: float) -> None:
        """Add to a group of weights `scale` times noise of their size; 0 restores them."""
        self._placement.release(self.network)
        is_own = group in (own := groups_of(self.kinds(is_merged=True)))
        names = own[group] if is_own else groups_of(self.kinds(is_merged=False))[group]
        tensors = self.network.own_tensors() if is_own else self.network.tensors()
        self._shifts.shift(names, self.network.names.parts(tensors), scale)

    def held(self) -> dict[str, Tensor]:
        """Return name -> live tensor, or part of it, of the trained model in this process."""
        return {name: tensor.detach() for name, tensor in self.network.backbone.state_dict().items()}

    def free_cache(self) -> None:
        """Release cached, unused GPU memory."""
        self._placement.release(self.network)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free the gradient and the frozen models."""
        self._group_end.close()
        self.optimizer.zero_grad()
        self._reference = None
        self._objectives.clear()

    def _sections(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the tensors of a checkpoint, prefix -> name -> live tensor: the trained parameters, the optimizer's state
        and, unless it can be read from a file, the reference."""
        self._placement.release(self.network)
        kept = None if self._reference is None else self._reference.kept()
        return {"model/": self.network.tensors(), **self.optimizer.sections(), "reference/": kept or {}}

    def _check(self, stored: Mapping[str, TensorKind], own: Mapping[str, TensorKind]) -> None:
        """Raise for a state of another model, or one without the reference.

        Raises:
            CheckpointError: with the difference.
        """
        whose, hint = self.network.whose, ""
        saved, live = inside(stored, "model/"), inside(own, "model/")
        if has_lora(self.network.saved):
            hint = advice(saved, live)
        require_same_shapes(saved, live, whose=whose, hint=hint)
        if (masters := inside(stored, "masters/").keys()) != (needed := inside(own, "masters/").keys()):
            raise CheckpointError(
                f"the {whose} keeps float32 copies of {len(masters)} parameters and this model needs {len(needed)}; "
                "was it written with another model.dtype?"
            )
        require_same_shapes(inside(stored, "moments/"), inside(own, "moments/"), whose=f"{whose}'s optimizer")
        if kept := inside(own, "reference/"):
            if not (reference := inside(stored, "reference/")):
                raise CheckpointError(
                    "the checkpoint was written by a run without a KL term, and this run needs its reference policy; set "
                    "algorithm.kl.coef to 0, or start a new run from the checkpoint's weights"
                )
            require_same_shapes(reference, kept, whose=f"{whose}'s reference")
