"""ModelBackend: the network of this process, and its optimizer: the loop over micro-batches, and the state.

    samples, coefficients -> micro-batches -> for each: forward, terms of the objective, backward
    optim_step: norm, clip, AdamW, clear

Where its parameters are is the `Placement`'s: whole on one device, or this rank's shards. One call of `forward_backward`
takes everything that one optimizer step trains on: coefficients are normalised over that batch before, and the gradients of
its micro-batches add up to exactly its gradient (I7).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor, nn
from transformers import PreTrainedModel

from polyturn.batching.layout import LayoutSettings, MicroBatch, scatter_back
from polyturn.batching.layout import layout as cut_samples
from polyturn.core.arrays import Floats
from polyturn.core.errors import CheckpointError, ConfigError, TrainingError
from polyturn.core.metrics import Metrics, Sum, merge
from polyturn.core.protocols import PassResult
from polyturn.core.sample import TrainSample
from polyturn.engines.routers import Routers
from polyturn.engines.weight_files import write_safetensors
from polyturn.engines.weight_transport import TensorKind
from polyturn.tokens.positions import MediaRows
from polyturn.training.agreement import agreement
from polyturn.training.backend import ENTROPY, NO_WEIGHTS, OWN, REFERENCE, TermWeights
from polyturn.training.lora import adapter_replaced, base_weights, has_lora, merged_weights
from polyturn.training.loss_terms import Objective, PassFigures, as_step
from polyturn.training.network import Network, PolicyNetwork, ValueNetwork
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
    """The placement of a network's parameters, and the needs of its passes and checkpoints that follow from it.

    Here everything is where the model is; an engine may share its tensors, which are only ever written in place.
    """

    needs_packing = False
    """Whether it computes packed rows alone."""

    def policy(
        self, model: PreTrainedModel, *, routers: Routers | None = None, replays: bool = False, is_copy: bool = True
    ) -> Network:
        """Return the form that a causal language model has here, with its `routers` if they are looked at; `is_copy` says
        that its weights are those of what is trained."""
        return PolicyNetwork(model, routers=routers, replays=replays)

    def values(self, backbone: PreTrainedModel) -> Network:
        """Return the form that a value function over `backbone` has here."""
        return ValueNetwork(backbone)

    def optimizer(self, network: Network, settings: OptimSettings) -> Optimizer:
        """Put `network` where it is trained, and return its optimizer."""
        return Optimizer(network.saved, settings)

    def freeze(self, network: Network, *, is_copy: bool) -> None:
        """Put `network` where it is only scored with; `is_copy` says that it is one of what is trained."""

    def device(self, network: Network) -> torch.device:
        """Return the device of this process."""
        return next(network.saved.parameters()).device

    def in_step(self, cut: Cut) -> Cut:
        """Return `cut`, made to give every process as many micro-batches as the one that has most."""
        return cut

    def drawing(self, *of: int) -> AbstractContextManager[None]:
        """Let processes that see the same samples draw the same random numbers in a pass, which `of` names."""
        return nullcontext()

    def before_backward(self, network: Network, *, is_last: bool) -> None:
        """Prepare for a backward pass, the last of an update or an earlier one."""

    def release(self, network: Network) -> None:
        """Free what the last pass gathered."""

    def adapter_replaced(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Let `model` score with another adapter meanwhile: the storage is exchanged, so that an engine which shares it
        notices nothing."""
        return adapter_replaced(model, tensors)


def fitting_layout(
    settings: LayoutSettings, networks: Sequence[Network], placement: Placement
) -> tuple[LayoutSettings, bool]:
    """Return the settings without packing, and True, where one of the networks cannot be packed; all are tried out.

    Raises:
        ConfigError: it cannot, and the placement needs it.
    """
    # All of them, because a reference and a teacher score the same micro-batches as the policy.
    packs, whys = settings.packed or settings.shared_prefix, {}
    for network in networks:
        whys[type(network.backbone).__name__] = network.try_out(packs=packs)
        placement.release(network)
    for name, why in whys.items():
        if why is not None and placement.needs_packing:
            raise ConfigError(
                f"train.distributed.context_parallel splits packed rows, and {name} cannot be packed, because {why}; set it "
                "to 1"
            )
        if why is not None:
            logger.warning(
                "Samples lie in padded rows and every common prefix is computed again: %s cannot be packed, because %s",
                name,
                why,
            )
            return dataclasses.replace(settings, packed=False, shared_prefix=False), True
    return settings, False


class ModelBackend:
    """Trains a network that this process holds, or holds a share of; implements `Backend`."""

    def __init__(
        self,
        network: Network,
        *,
        optimizer: Optimizer,
        objectives: Mapping[str, Objective],
        placement: Placement,
        layout: LayoutSettings,
        media: MediaRows | None = None,
        reference: Scorer | None = None,
        is_packing_refused: bool = False,
    ) -> None:
        """Train `network`, which `placement` has put where it is.

        Args:
            network: The forward pass.
            optimizer: What `placement` returned for it.
            objectives: Name -> what may be minimised.
            placement: Where the parameters are.
            layout: The size of micro-batches and how samples lie in them.
            media: Lays out what samples show; None for text.
            reference: What is scored with beside the network; None where there is none.
            is_packing_refused: Whether packing was asked for and `layout` has none, because the model cannot be packed.
        """
        self.network = network.train()
        self.optimizer = optimizer
        self._objectives = dict(objectives)
        self._placement = placement
        self._reference = reference
        self._is_packing_refused = is_packing_refused
        self._shifts = WeightShifts()
        self._writing: Future[Any] | None = None
        # Coefficients, advantages and log-probabilities: of bfloat16's 8 bits a ratio near 1 would have nothing left.
        dtype = torch.promote_types(next(network.parameters()).dtype, torch.float32)
        cut = functools.partial(cut_samples, settings=layout, dtype=dtype, device=placement.device(network), media=media)
        self.lay_out = placement.in_step(cut)
        """(samples, coefs) -> the micro-batches of this process, as a pass computes them."""

    @property
    def model(self) -> nn.Module:
        """The trained model, under the names that a state uses."""
        return self.network.saved

    @property
    def step_count(self) -> int:
        """Number of optimizer steps that were taken or skipped."""
        return self.optimizer.step_count

    def score(self, samples: Sequence[TrainSample], scorer: str = OWN) -> list[Floats]:
        """Return for each sample [T] what `scorer` gives each weighted token, 0 elsewhere.

        Raises:
            ConfigError: the reference is asked of a policy that was built without one.
        """
        if scorer in (OWN, ENTROPY):
            scores = self.network.scores if scorer == OWN else self.network.entropies
        elif self._reference is not None:
            scores = self._reference.logprobs
        else:
            raise ConfigError("this policy was built without a reference; pass reference=True")
        batches = self.lay_out(samples, [s.loss_weights for s in samples])
        # Without dropout, as the engine samples: an adapter's noise is not part of the policy that is compared.
        self.network.eval()
        try:
            with torch.no_grad():
                values = []
                for batch in batches:
                    with (
                        self.network.routed(batch) if scorer != REFERENCE else nullcontext()
                    ):  # others choose for themselves
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
            TrainingError: the samples lack what the objective needs. The gradient is cleared. A loss that is not finite
                makes the step one that `optim_step` skips, or ends the run at.
        """
        start = time.perf_counter()
        batches = self.lay_out(samples, coefs)
        layout_s = time.perf_counter() - start
        real = [b for b in batches if not b.is_padding]
        figures, clock = PassFigures(), PassClock(self._placement.device(self.network))
        own: list[Tensor] = []
        entropies: list[Tensor] = []
        self.network.train()
        minimised = self._objectives[objective]
        terms_of = minimised.bind(samples, weights)
        try:
            for number, batch in enumerate(batches):
                # Around both passes, because the backward one computes layers again.
                with self.network.routed(batch), self._placement.drawing(self.step_count, number):
                    with clock.lap("time/forward"):
                        terms = terms_of(self.network, batch)
                        loss = terms.total(batch.loss_coef_S)
                        if not batch.is_padding:
                            figures.add(batch, terms, loss)
                            if terms.own_S is not None:
                                own.append(terms.own_S)
                                entropies += [terms.stats_S["policy/entropy"]] if "policy/entropy" in terms.stats_S else []
                    # Also of a loss that is not finite: over ranks the pass is collective, and all of them must make it.
                    with clock.lap("time/backward"):
                        self._placement.before_backward(self.network, is_last=number == len(batches) - 1)
                        loss.backward()
                        self.optimizer.collect()
        except TrainingError:
            self.optimizer.zero_grad()
            raise
        parts, spoilt = figures.read()  # the only wait for the device
        problem = None if spoilt is None else minimised.problem(samples, *spoilt, step=self.step_count)
        seconds = clock.seconds()
        metrics: Metrics = as_step(merge(parts)) | {name: Sum(spent) for name, spent in seconds.items()}
        metrics["time/layout"] = Sum(layout_s)
        metrics["time/forward_backward"] = Sum(sum(seconds.values()))
        metrics["tokens/shared_prefix"] = Sum(sum(b.num_shared for b in real))
        if self._is_packing_refused:
            metrics["tokens/packing_refused"] = Sum(1)
        lengths = [len(s) for s in samples]
        logprobs, on_tokens = (scatter_back(real, of, lengths=lengths) if of else None for of in (own, entropies))
        if problem is not None:  # told to the optimizer and not raised: all ranks must come to the same step, and skip it
            self.optimizer.spoil(problem)
        elif logprobs is not None:
            metrics |= agreement(samples, logprobs)
        return PassResult(metrics, logprobs, on_tokens, is_finite=problem is None)

    def optim_step(self) -> Metrics:
        """Take one optimizer step from the summed gradient, and clear it.

        Raises:
            TrainingError: loss or gradient is not finite, once more in a row than such steps are skipped.
        """
        self._placement.release(self.network)  # a gathered copy would go on with the weights of before the step
        return self.optimizer.step()

    def save(self, folder: Path) -> None:
        """Begin to write this process's part of the state into `folder`, from a copy; see `Backend.save`."""
        self._writing = write_shards(self.state_dict(), folder)

    def is_saved(self) -> bool:
        """Return whether what `save` began is written, here and on all ranks.

        Raises:
            CheckpointError: it could not be.
        """
        return self._writing is None or is_written(self._writing, whose=self.network.whose)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote, here or on another number of ranks; every rank must call it.

        Raises:
            CheckpointError: there is none, it is damaged, of another model, or lacks the reference.
        """
        whose, names, clock = self.network.whose, self.network.names, self.optimizer.state_dict()
        # The metadata first: a state of another model is refused before any tensor is written over.
        kinds = stored_kinds(folder, whose=whose)
        # A parameter has moments from its first gradient on; those that the folder has must be there to be read into.
        self.optimizer.make_moments(lambda name: all(f"moments/exp_avg/{n}" in kinds for n in names.sources(name)))
        sections = self._sections()
        self._check(kinds, flat({prefix: names.kinds(tensors) for prefix, tensors in sections.items()}))
        names.read(sections, folder, whose=whose)
        read_shards(clock, folder, whose=whose)
        self.optimizer.load_state_dict(clock)

    def state_dict(self) -> dict[str, Any]:
        """Return this process's part of a checkpoint: live tensors, or its parts of them, and numbers."""
        sections = self._sections().items()
        return self.optimizer.state_dict() | flat({p: self.network.names.shards(tensors) for p, tensors in sections})

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Begin with these weights, whole, some of the model's or all: each rank takes its part, and so does a reference
        that is a copy of the model."""
        for tensors in (self.network.saved.state_dict(), self._sections()["reference/"]):
            self.network.names.take(tensors, weights)
        self.optimizer.take_parameters()

    def kinds(self, is_merged: bool) -> dict[str, TensorKind]:
        """Return the names that `gathered` accepts: the model's own weights, into which an adapter is merged, or the
        trained tensors."""
        return self.network.names.kinds(self.network.own_tensors() if is_merged else self.network.tensors())

    def gathered(self, names: Sequence[str], is_merged: bool) -> dict[str, Tensor] | None:
        """Return name -> whole tensor on the CPU on rank 0, and None on the others, which hold one of them at a time."""
        self._placement.release(self.network)
        tensors = self.network.own_tensors() if is_merged else self.network.tensors()
        is_adapted, collected = is_merged and has_lora(self.network.saved), dict[str, Tensor]()
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        for name in names:
            whole = self.network.names.whole(tensors, name)
            if is_adapted:
                whole = self.network.merged(name, whole)
            if whole is not None and is_first:
                collected[name] = whole.cpu()
        return collected if is_first else None

    def write(self, pieces: Sequence[Sequence[str]], is_merged: bool, folder: Path) -> None:
        """Write what `gathered` returns as the weights of a checkpoint in `folder`, each piece of names to a file; rank 0
        writes."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_safetensors((self.gathered(names, is_merged) or {} for names in pieces), folder)
        else:
            for names in pieces:
                self.gathered(names, is_merged)

    def weights(self) -> Mapping[str, Tensor]:
        """Return name -> weight without gradient, for an engine: live tensors, and merged where an adapter changes them."""
        return merged_weights(self.network.saved) if has_lora(self.network.saved) else base_weights(self.network.saved)

    def trained(self) -> Mapping[str, Tensor]:
        """Return name -> what training changes, live: with LoRA the adapter."""
        return {name: tensor.detach() for name, tensor in self.network.tensors().items()}

    def weight_groups(self, is_merged: bool = True) -> list[str]:
        """Return the groups of parameters that `shift_weights` moves, by the names that `weights` or `trained` has."""
        return list(groups_of(self.kinds(is_merged)))

    def shift_weights(self, group: str, scale: float) -> None:
        """Move a group of weights to `scale` times some noise of their size from where they were; 0 puts it back."""
        self._placement.release(self.network)
        is_own = group in (own := groups_of(self.kinds(is_merged=True)))
        names = own[group] if is_own else groups_of(self.kinds(is_merged=False))[group]
        tensors = self.network.own_tensors() if is_own else self.network.tensors()
        self._shifts.shift(names, self.network.names.parts(tensors), scale)

    def held(self) -> dict[str, Tensor]:
        """Return name -> what this process holds of the model that is trained, live."""
        return {name: tensor.detach() for name, tensor in self.network.backbone.state_dict().items()}

    def free_cache(self) -> None:
        """Return cached, unused GPU memory."""
        self._placement.release(self.network)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free the gradient and the frozen models."""
        self.optimizer.zero_grad()
        self._reference = None
        self._objectives.clear()

    def _sections(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the tensors of a checkpoint, prefix -> name -> live tensor: the parameters (with LoRA the adapter's), the
        optimizer's part and, where it belongs to no file, the reference."""
        self._placement.release(self.network)
        kept = None if self._reference is None else self._reference.kept()
        return {"model/": self.network.tensors(), **self.optimizer.sections(), "reference/": kept or {}}

    def _check(self, stored: Mapping[str, TensorKind], own: Mapping[str, TensorKind]) -> None:
        """Refuse the state of another model, or one without the reference.

        Raises:
            CheckpointError: with what differs.
        """
        whose, hint = self.network.whose, "; model.lora must be what it was" if has_lora(self.network.saved) else ""
        require_same_shapes(inside(stored, "model/"), inside(own, "model/"), whose=whose, hint=hint)
        if (masters := inside(stored, "masters/").keys()) != (needed := inside(own, "masters/").keys()):
            raise CheckpointError(
                f"the {whose} keeps float32 copies of {len(masters)} parameters and this model needs {len(needed)}; "
                "was it written with another model.dtype?"
            )
        require_same_shapes(inside(stored, "moments/"), inside(own, "moments/"), whose=f"{whose}'s optimizer")
        if kept := inside(own, "reference/"):
            if not (reference := inside(stored, "reference/")):
                raise CheckpointError(
                    "the checkpoint has no reference policy and this run uses one; it was written without KL"
                )
            require_same_shapes(reference, kept, whose=f"{whose}'s reference")
