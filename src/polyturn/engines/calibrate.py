"""Fit: measure what a running server's time depends on, for the simulated server to be as quick (`Speed`).

    speed = await fit(engine, batches=(1, 4, 16, 32))        about a minute on a small model
    save(speed, Path("speed.yaml"));  load(Path("speed.yaml"))

Each figure is a difference of two timings, so that what both have in common falls out:

    tau(b)            b requests at once, with many tokens less with few, per token between; a median over repeats
    context_token_s   the same behind long prompts, less behind short ones, per token of their contexts
    prefill_token_s   one long prompt that the server has not seen, less a short one
    request_s         many requests of one token at once, less one, per request; their prompts and steps taken off
    prefix_cache      whether the long prompt costs less than half as much when it comes again
    cache_block       greatest common divisor of what the server says it had of prompts of several lengths

The server should serve nothing else meanwhile. Ways of measuring alternate within a repeat.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import math
import random
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import yaml

from polyturn.core.aio import first_error
from polyturn.core.arrays import Ids, ids_array
from polyturn.core.errors import ConfigError, EngineError
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.core.protocols import Engine
from polyturn.engines.record_file import read_record
from polyturn.engines.simulated import Speed

FEW, MANY = 8, 72
"""Tokens of the two requests whose difference gives a step's time."""
_FAR = 8
"""Sequences with long prompts, at most."""


class _Bench:
    """Asks one engine and takes the time."""

    def __init__(self, engine: Engine, *, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._rng = random.Random(0)
        self._numbers = itertools.count()
        self._prefilled = 0
        """Prompt tokens that the last request was computed for, as the server says."""

    def prompt(self, length: int) -> Ids:
        """Return ids that the server has not seen."""
        return ids_array([self._rng.randrange(self._vocab_size) for _ in range(length)])

    async def cached(self, length: int) -> int:
        """Return how many tokens of a prompt the server still has when it comes a second time, as it says itself."""
        prompt = self.prompt(length)
        await self.seconds([prompt], 1)
        await self.seconds([prompt], 1)
        return length - self._prefilled

    async def seconds(self, prompts: Sequence[Ids], max_tokens: int) -> float:
        """Return how long all of `prompts` take at once, with `max_tokens` each.

        Raises:
            EngineError: the server ends completions before that.
        """
        loop = asyncio.get_running_loop()

        async def ask(prompt: Ids) -> None:
            name = f"fit{next(self._numbers)}"
            request = GenerateRequest(
                request_id=f"{name}/0",
                session_id=name,
                prompt_ids=prompt,
                sampling=SamplingParams(max_tokens=max_tokens),
            )
            completion = await self._engine.generate(request)
            if len(completion.token_ids) != max_tokens:
                raise EngineError(
                    f"the server gave {len(completion.token_ids)} tokens where {max_tokens} were asked for, so a step "
                    "cannot be timed; let it ignore the end token, and give it room for them"
                )
            self._prefilled = int(completion.info.get("prefilled_tokens", len(prompt)))
            await self._engine.end_session(name)

        began = loop.time()
        with first_error():
            async with asyncio.TaskGroup() as group:
                for prompt in prompts:
                    group.create_task(ask(prompt))
        return loop.time() - began


async def fit(
    engine: Engine,
    *,
    vocab_size: int,
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
    prompt_tokens: int = 100,
    long_prompt_tokens: int = 1000,
    repeats: int = 5,
) -> Speed:
    """Measure `engine` and return a speed with its table; slots are the largest batch.

    Args:
        engine: A client of the server.
        vocab_size: Prompts are drawn from ids below it.
        batches: Batch sizes of the table; in between, time is a straight line.
        prompt_tokens: Length of the prompts behind which steps are timed; take what the workload has.
        long_prompt_tokens: Length of the prompt whose cost is measured.
        repeats: Each timing is a median over so many.

    Raises:
        ConfigError: there are no batch sizes, or they do not rise.
    """
    if not batches or list(batches) != sorted(set(batches)) or batches[0] < 1 or repeats < 1:
        raise ConfigError(f"batch sizes must rise from at least 1 and repeats be at least 1, not {batches} and {repeats}")
    bench = _Bench(engine, vocab_size=vocab_size)
    timed = _Timings(few={b: [] for b in batches}, many={b: [] for b in batches})
    num_far = max((batch for batch in batches if batch <= _FAR), default=batches[0])
    for repeat in range(repeats + 1):
        kept = timed if repeat else copy.deepcopy(timed)  # the first one warms up
        await _measure(bench, kept, num_far=num_far, short=prompt_tokens, long=long_prompt_tokens)
    widest = batches[-1]
    steps = {b: (median(timed.many[b]) - median(timed.few[b])) / (MANY - FEW) for b in batches}
    per_token = max(median(timed.far_steps) - steps[num_far], 0.0) / (num_far * (long_prompt_tokens - prompt_tokens))
    held = prompt_tokens + (FEW + MANY) / 2  # tokens of each sequence while its steps were timed
    table = [(b, max(seconds - per_token * b * held, 1e-6)) for b, seconds in steps.items()]
    long, short = median(timed.long), median(timed.short)
    prefill = max(long - short, 0.0) / (long_prompt_tokens - prompt_tokens)
    cost_of_each = (median(timed.one_each) - short) / max(widest - 1, 1) - prompt_tokens * prefill
    shares = [await bench.cached(long_prompt_tokens * k // 7) for k in (3, 4, 5, 6, 7)]
    return Speed(
        cache_block=max(math.gcd(*shares), 1),
        table=tuple(table),
        context_token_s=per_token,
        prefill_token_s=prefill,
        request_s=max(cost_of_each, 0.0),
        prefix_cache=median(timed.again) - short < 0.5 * (long - short),
        slots=widest,
    )


@dataclass(slots=True, kw_only=True)
class _Timings:
    """Seconds that a server took, each as often as it was measured."""

    few: dict[int, list[float]]
    """Batch size -> of `FEW` tokens each."""
    many: dict[int, list[float]]
    """Batch size -> of `MANY` tokens each."""
    far_steps: list[float] = field(default_factory=list)
    """Of one step behind long prompts."""
    long: list[float] = field(default_factory=list)
    """Of one token behind a long prompt."""
    again: list[float] = field(default_factory=list)
    """Of one token behind the same prompt."""
    short: list[float] = field(default_factory=list)
    """Of one token behind a short prompt."""
    one_each: list[float] = field(default_factory=list)
    """Of one token behind each of a batch of short prompts, the largest."""


async def _measure(bench: _Bench, timed: _Timings, *, num_far: int, short: int, long: int) -> None:
    """Measure everything once, with prompts of `short` and `long` tokens."""
    for batch in timed.few:
        for tokens, into in ((FEW, timed.few), (MANY, timed.many)):
            into[batch].append(await bench.seconds([bench.prompt(short) for _ in range(batch)], tokens))
    behind = [bench.prompt(long) for _ in range(num_far)]
    await bench.seconds(behind, 1)  # so that both of the next find them computed
    less = await bench.seconds(behind, FEW)
    timed.far_steps.append((await bench.seconds(behind, MANY) - less) / (MANY - FEW))
    prompt = bench.prompt(long)
    timed.long.append(await bench.seconds([prompt], 1))
    timed.again.append(await bench.seconds([prompt], 1))
    timed.short.append(await bench.seconds([bench.prompt(short)], 1))
    timed.one_each.append(await bench.seconds([bench.prompt(short) for _ in range(max(timed.few))], 1))


def save(speed: Speed, path: Path) -> None:
    """Write a speed to a YAML file."""
    values = {**dataclasses.asdict(speed), "table": [[b, round(seconds, 7)] for b, seconds in speed.table]}
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def load(path: Path) -> Speed:
    """Read what `save` wrote.

    Raises:
        ConfigError: there is no such file, or it says something else.
    """
    if not path.is_file():
        raise ConfigError(
            f"there is no speed file {path}; `polyturn simulate --fit URL --out {shlex.quote(str(path))}` measures one"
        )
    return read_record(path, Speed)
