"""EmbeddedEngine: inference in the trainer's process with the trainer's parameters.

Requests join and leave at every decoding step, on the event loop that also runs tools and interactions. Every session owns a
slot of the KV cache and keeps it between turns.

    slot   ids [ prompt ............ | sampled so far ]
               <---- in cache ---->  <- not yet ->          known - cached = 1: ready to decode
                                                            known - cached > 1: prefill all but the last token

So prefill never samples. A decoding step feeds the last known token of every ready slot and samples the next one. Weight
updates fall between steps, because a step never awaits.

In an asynchronous run the trainer computes gradients in another thread while the engine samples from the same parameters.
Before it changes them it calls `freeze`, and the engine waits until `update_weights` names their new version.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import random
import threading
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from polyturn.core.continuation import nothing
from polyturn.core.errors import ConfigError, EngineError, did_you_mean, one_line
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import Engine, EngineCapabilities, EngineLoad
from polyturn.engines import slot_attention
from polyturn.engines.base import EngineSetup, MeanOverTime
from polyturn.engines.batch_step import BatchStep
from polyturn.engines.media import ShownPrompts
from polyturn.engines.onednn import use_onednn, use_torch
from polyturn.engines.request_limits import RequestLimits
from polyturn.engines.routers import Routers
from polyturn.engines.slot_allocator import SlotAllocator
from polyturn.engines.slots import EngineStats, SlotRequest, Slots
from polyturn.tokens.multimodal import MediaProcessor

_Module = TypeVar("_Module", bound=nn.Module)

MAX_YIELDS = 8
"""Largest number of event loop passes before the next step, in which finished requests may return with their next turn."""
MAX_BURST_S = 0.05
"""Largest time between two yields to the event loop, in seconds, unless one step takes longer."""
YIELD_S = 0.001
"""Seconds after which these passes (see `MAX_YIELDS`) stop and the next step begins."""
FOLLOW_UP_SHARE = 0.03
"""After a step longer than a burst, the engine waits this share of the step's time for finished requests to return with
their next turn. A tool in a thread answers within milliseconds, but a request that misses a step of a large model waits
hundreds of milliseconds for the next."""


class EmbeddedEngine:
    """Samples from a transformers causal language model in this process and on its event loop."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int = 64,
        max_context: int | None = None,
        prefill_chunk: int = 256,
        deterministic: bool = False,
        share_prefixes: bool = True,
        media: MediaProcessor | None = None,
        routes: bool = False,
    ) -> None:
        """Sample from `model`, whose parameters are shared, not copied.

        Args:
            model: A causal language model with full attention in every layer.
            num_slots: Largest number of requests that decode at once, and of sessions whose cache is kept.
            max_context: Largest length of prompt plus completion, in tokens; None takes the model's limit.
            prefill_chunk: Largest number of tokens of one prompt in one forward pass.
            deterministic: Make a seeded request's bits independent of other requests: prompts are prefilled one at a time,
                decoding is padded to 8 rows a thread, nothing is copied between sessions. Set torch's number of threads
                before, and use at least as many slots as live sessions: a session whose cache was dropped is computed in
                other pieces, with other rounding.
            share_prefixes: Copy the keys and values of a prefix from another slot; off if deterministic.
            media: The model's processor, for requests that show images, videos or sounds; None for text.
            routes: Report with each completion the experts of its tokens and of its prompt.

        Raises:
            ConfigError: `routes` is set for a model without experts, a layer has no full attention, or a number is below 1.
        """
        for name, value in (("num_slots", num_slots), ("max_context", max_context), ("prefill_chunk", prefill_chunk)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; the embedded engine needs at least 1")
        self._accepts = RequestLimits.of(model, max_context=max_context, takes_media=media is not None, routes=routes)
        self.module = slot_attention.use(share_parameters(model))
        if deterministic:
            use_torch(self.module)
        else:
            use_onednn(self.module)
        routers = Routers.of(self.module) if routes else None
        if routes and routers is None:
            raise ConfigError(f"{type(model).__name__} has no experts, so there are no routes; remove `routes`")
        self._prompts = None if media is None else ShownPrompts(model, media)
        self.stats = stats = EngineStats()
        self.version = 0  # the policy version of the current parameters
        self.max_burst_s = MAX_BURST_S
        limit = self._accepts.max_context
        self._slots = slots = Slots.make(num_slots, limit, routes=None if routers is None else routers.shape)
        self._allocator = SlotAllocator(
            slots, max_context=limit, share_prefixes=share_prefixes and not deterministic, stats=stats
        )
        self._steps = BatchStep(
            self.module,
            slots,
            self._allocator,
            prefill_chunk=prefill_chunk,
            is_alone=deterministic,
            stats=stats,
            routers=routers,
        )
        self._waiting: list[SlotRequest] = []
        self._requests: dict[str, SlotRequest] = {}
        self._seeds = random.Random(0)  # for requests without a seed
        self._others_s, self._num_finished = 0.0, 0
        self._queue, self._kv_use = MeanOverTime(), MeanOverTime()
        self._pump_task: asyncio.Task[None] | None = None
        self._arrival: asyncio.Future[None] | None = None
        self.follow_up_share = FOLLOW_UP_SHARE
        self._computing = threading.Lock()
        self._is_frozen = False
        self._thawed: asyncio.Future[None] | None = None
        self._is_closed = False

    @property
    def capabilities(self) -> EngineCapabilities:
        """The engine is seeded, returns logprobs as training computes them, and runs on the trainer's event loop."""
        return dataclasses.replace(self._accepts.capabilities, shares_loop=True)

    @property
    def busy_s(self) -> float:
        """Seconds spent generating so far."""
        return self.stats.busy_s

    @property
    def load(self) -> EngineLoad:
        """The number of requests waiting for a slot, and the share of cache positions in use."""
        return EngineLoad(self._queue.value, self._kv_use.value)

    def read_metrics(self) -> Mapping[str, float]:
        """Return the mean number of requests waiting for a slot, and the share of cache positions in use."""
        return {"engine/queue": self._queue.read(), "engine/kv_use": self._kv_use.read()}

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion; `info` has the number of prefilled prompt tokens.

        A session's next prompt prefills only the tokens that its slot lacks: the last sampled token (which was never fed)
        and the tokens after it. A completion that reaches the end of the context ends with LENGTH.

        Raises:
            EngineError: the prompt is empty or does not fit, its media do not match its ids, there is no processor for
                media, its id is live, or the engine is closed or broken.
        """
        self._accepts.check(request, live=self._requests, is_closed=self._is_closed)
        seed = request.sampling.seed
        uniform = random.Random(self._seeds.getrandbits(64) if seed is None else seed)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        running = SlotRequest(
            request=request,
            future=future,
            uniform=uniform,
            versions=[(0, self.version)],
            prompt_with_media=None if self._prompts is None else self._prompts.of(request),
        )
        self._requests[request.request_id] = running
        self._waiting.append(running)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
        if self._pump_task is None or self._pump_task.done():
            self._pump_task = asyncio.create_task(self._pump(), name="polyturn-embedded-engine")
        # A frozen engine takes no steps, before which late requests are dropped.
        late = None if request.deadline is None else loop.call_at(request.deadline, self._drop_late)
        try:
            return await future
        finally:
            if late is not None:
                late.cancel()
            if self._requests.get(request.request_id) is running:  # cancelled
                self._drop(running)

    async def abort(self, request_id: str) -> None:
        """End a request now; its `generate` returns the tokens so far, with ABORT. Unknown ids are fine."""
        running = self._requests.get(request_id)
        if running is None:
            return
        if running.slot < 0:
            self._waiting.remove(running)
            self._deliver(running, nothing(self.version))
        else:
            self._finish(running, FinishReason.ABORT)

    async def end_session(self, session_id: str) -> None:
        """Release the session's slot. Unknown ids are fine."""
        self._allocator.end_session(session_id)

    def freeze(self) -> None:
        """Sample nothing until the next `update_weights`; returns after the current decoding step. For the thread that is
        about to change the shared parameters."""
        self._is_frozen = True
        with self._computing:
            pass

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Serve `version` from the next decoding step on; a completion that spans the update records where.

        The KV cache is dropped, and running requests recompute their keys and values, so every logprob comes from exactly
        one version of the weights.

        Args:
            version: The new policy version.
            weights: name -> tensor, copied into the shared parameters; None if the trainer has changed them in place.

        Raises:
            EngineError: `weights` names a parameter that the model does not have.
        """
        if weights is not None:
            self._load(weights)
        self.version = version
        self._is_frozen = False
        if self._thawed is not None and not self._thawed.done():
            self._thawed.set_result(None)
        for running in self._requests.values():
            start = 0 if running.slot < 0 else int(self._slots.known[running.slot] - self._slots.prompt[running.slot])
            if running.versions[-1][0] == start:  # the previous version sampled no token
                running.versions.pop()
            running.versions.append((start, version))
        self._slots.cached[:] = 0  # also for idle sessions, whose next turn would attend to keys of the old weights

    async def close(self) -> None:
        """Fail running and waiting requests, and forget all sessions."""
        self._is_closed = True
        self._fail_all(EngineError("the embedded engine was closed while the request ran"))
        if self._pump_task is not None and not self._pump_task.done():
            self._pump_task.cancel()
        self._allocator.end_all_sessions()
        self._steps.close()

    def _load(self, weights: Mapping[str, Any]) -> None:
        own = {**dict(self.module.named_parameters(remove_duplicate=False)), **dict(self.module.named_buffers())}
        for name in weights:
            if name not in own:
                raise EngineError(f"the model has no parameter {name!r}.{did_you_mean(name, own)}")
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)

    # -- the pump: one task that lives while there is work ---------------------------------------------------------------

    async def _pump(self) -> None:
        """Run the model while there are requests; yield to the event loop between bursts."""
        try:
            while self._requests:
                if self._is_frozen:
                    self._thawed = asyncio.get_running_loop().create_future()
                    await self._thawed
                    continue
                start = time.perf_counter()
                # Decoding gets three quarters of the time if the rest of the loop is busy, in bursts of bounded length.
                budget, elapsed = min(3 * self._others_s, self.max_burst_s), 0.0
                while True:
                    if self._waiting:
                        self._drop_late()
                        self._waiting, copies = self._allocator.admit(self._waiting)
                        self._steps.copy(copies)
                    with self._computing:
                        if self._is_frozen:
                            break
                        ended = self._steps.run()
                    for running, reason in ended:
                        self._finish(running, reason)
                    elapsed = time.perf_counter() - start
                    if elapsed >= budget or not self._requests:
                        break
                self.stats.busy_s += elapsed
                self._queue.set(len(self._waiting))
                self._kv_use.set(float(self._slots.cached.sum()) / self._slots.ids.size)
                await self._yield(burst_s=elapsed)
        except Exception as problem:
            error = EngineError(f"the embedded engine broke: {one_line(problem)}")
            error.__cause__ = problem
            self._fail_all(error)

    async def _yield(self, *, burst_s: float) -> None:
        """Yield to the event loop, and measure how long; wait briefly for the next turns of finished requests."""
        num_expected, self._num_finished = len(self._waiting) + self._num_finished, 0
        passes = MAX_YIELDS if num_expected > len(self._waiting) else 1
        start = time.perf_counter()
        for _ in range(passes):
            await asyncio.sleep(0)
            self._others_s = time.perf_counter() - start
            if self._others_s > YIELD_S:
                break
        if burst_s <= self.max_burst_s:
            return
        until = start + self.follow_up_share * burst_s
        while len(self._waiting) < num_expected and self._requests and (left_s := until - time.perf_counter()) > 0:
            self._arrival = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._arrival], timeout=left_s)

    def _drop_late(self) -> None:
        now = asyncio.get_running_loop().time()
        for running in [r for r in self._waiting if r.request.deadline is not None and r.request.deadline <= now]:
            self._waiting.remove(running)
            self._deliver(running, nothing(self.version))

    # -- the end of a request ----------------------------------------------------------------------------------------

    def _finish(self, running: SlotRequest, reason: FinishReason) -> None:
        slots, slot = self._slots, running.slot
        begin, end = int(slots.prompt[slot]), int(slots.known[slot])
        ids, logprobs = slots.ids[slot, begin:end].copy(), slots.logprobs[slot, begin:end].copy()
        ids.flags.writeable = logprobs.flags.writeable = False
        routes, support = slots.routes_of(slot, running.request.routed_from), slots.support_of(slot)
        self._allocator.leave(running)  # after the reads: another request may take the slot from here on
        completion = Completion(
            token_ids=ids,
            logprobs=logprobs,
            support=support,
            finish_reason=reason,
            # A version that arrived after the last token sampled no token.
            policy_versions=tuple(run for run in running.versions if run[0] < max(1, len(ids))),
            routed_experts=routes,
            info={"prefilled_tokens": running.prefilled},
        )
        self.stats.completions += 1
        self._deliver(running, completion)

    def _deliver(self, running: SlotRequest, completion: Completion) -> None:
        del self._requests[running.request.request_id]
        self._num_finished += 1
        if not running.future.done():
            running.future.set_result(completion)

    def _drop(self, running: SlotRequest) -> None:
        """Drop a request whose caller is gone."""
        del self._requests[running.request.request_id]
        if running.slot < 0:
            self._waiting.remove(running)
        else:
            self._allocator.leave(running)

    def _fail_all(self, error: EngineError) -> None:
        for running in list(self._requests.values()):
            if running.slot >= 0:
                self._allocator.leave(running)
            if not running.future.done():
                running.future.set_exception(error)
        self._requests.clear()
        self._waiting.clear()


def share_parameters(model: _Module) -> _Module:
    """Return a copy of `model`'s structure, in eval mode, whose parameters and buffers use the same memory.

    Only storage is shared: the trainer's module stays in train mode, with its gradients. In-place changes (an optimizer
    step) are visible at once, so a weight sync copies nothing.

    Parameters become new, gradient-free `Parameter` objects over the same storage (tied ones stay tied); buffers, also
    those outside the state dict such as rotary frequencies, are the same tensors. Configs and plain attributes are copied.
    """
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer
    return copy.deepcopy(model, memo).eval()


def build(setup: EngineSetup) -> Engine:
    """Make the engine."""
    options = setup.options
    if torch.cuda.is_available():
        setup.model.to("cuda")  # type: ignore[arg-type]  # a mixin of transformers hides the signature
    return EmbeddedEngine(
        setup.model,
        num_slots=options.num_slots,
        max_context=setup.max_context,
        prefill_chunk=options.prefill_chunk,
        deterministic=options.deterministic,
        media=setup.media,
        routes=setup.routes is not None,
    )
