"""Damaged turns through every parser, and its time on hard inputs of two lengths. Prints one JSON line.

    python benchmarks/fuzz_parsers.py [--turns 50000] [--seed 0]

`failures` counts exceptions, results that break the contract (a call without its text, a broken call without a reason, ids
that are not unique) and turns that take longer than a second. `worst_growth` is the time of 200,000 characters against that
of 20,000, over runs of every tag and hard character, each alone and behind an opened argument; times under 10 ms are taken
as 10 ms, and the garbage collector is off. The exit code is 1 when anything failed or the growth passes 15.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time

from polyturn.testing.writings import PIECES, TOOLS, VARIANTS, WRITINGS, mutate
from polyturn.tokens.parsers import ParsedTurn, TurnParser, parsers

OPENERS = (
    "",
    "<tool_call>f<arg_key>k</arg_key><arg_value>",
    "<tool_call><function=f><parameter=a>",
    '<minimax:tool_call><invoke name="f"><parameter name="a">',
    "<|python_start|>[f(a='",
    "[TOOL_CALLS][",
    '{"name": "',
    "<think>",
)


def families() -> dict[str, TurnParser]:
    """Return one parser of each family under its first name."""
    found: dict[str, TurnParser] = {}
    for name in parsers:
        family = parsers.resolve(name)
        if issubclass(family, TurnParser) and family not in map(type, found.values()):
            found[name] = family(calls_in_reasoning=True)
    return found


def problem_of(turn: ParsedTurn) -> str | None:
    """Return what breaks the contract of parsers in a turn that was read."""
    if len({c.id for c in turn.tool_calls}) < len(turn.tool_calls):
        return "ids are not unique"
    for call in turn.tool_calls:
        if not call.raw:
            return "a call without its text"
        if not call.name and not call.error:
            return "a broken call without a reason"
        try:
            json.dumps(dict(call.arguments), allow_nan=False)
        except (TypeError, ValueError) as problem:
            return f"arguments that are not JSON ({problem})"
    return None


def fuzz(name: str, parser: TurnParser, *, turns: int, seed: int) -> tuple[int, float]:
    """Read damaged turns; return how many failed, and the longest time in seconds."""
    rng = random.Random(f"{name}/{seed}")
    family = type(parser)
    seeds = [t for n, t in (*WRITINGS.items(), *VARIANTS) if parsers.resolve(n) is family]
    failures, longest = 0, 0.0
    for index in range(turns):
        text = mutate(seeds[index % len(seeds)], rng)
        start = time.process_time()
        try:
            problem = problem_of(parser.parse(text, tools=TOOLS))
        except Exception as error:
            problem = repr(error)
        longest = max(longest, time.process_time() - start)
        if problem is not None:
            failures += 1
            if failures <= 3:
                print(f"{name}: {problem} on {text!r}", file=sys.stderr)
    return failures + (longest > 1.0), longest


def growth(parser: TurnParser) -> tuple[float, float, str]:
    """Return the worst ratio of times for ten times the text, the longest time in seconds, and the text of the worst."""
    worst, longest, where = 0.0, 0.0, ""
    for opener in OPENERS:
        for piece in PIECES:
            short, long = (opener + piece * (length // len(piece)) for length in (20_000, 200_000))
            seconds = min(_seconds(parser, long) for _ in range(2))
            ratio = seconds / max(min(_seconds(parser, short) for _ in range(2)), 0.01)
            longest = max(longest, seconds)
            if ratio > worst:
                worst, where = ratio, opener + piece
    return worst, longest, where


def _seconds(parser: TurnParser, text: str) -> float:
    gc.disable()  # its cost depends on all that is alive in the process
    start = time.process_time()
    parser.parse(text, tools=TOOLS)
    seconds = time.process_time() - start
    gc.enable()
    return seconds


def main() -> int:
    """Run and print the JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=50_000)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    result: dict[str, object] = {"turns_per_parser": args.turns}
    failures, worst, longest, slowest = 0, 0.0, 0.0, 0.0
    for name, parser in families().items():
        start = time.process_time()
        failed, slow = fuzz(name, parser, turns=args.turns, seed=args.seed)
        ratio, seconds, where = growth(parser)
        failures += failed
        worst, longest, slowest = max(worst, ratio), max(longest, seconds), max(slowest, slow)
        print(f"{name}: {failed} failures, growth {ratio:.1f} ({where!r}), {time.process_time() - start:.1f} s", flush=True)
    result |= {
        "parsers": len(families()),
        "failures": failures,
        "worst_growth": round(worst, 2),
        "longest_200k_chars_s": round(longest, 4),
        "longest_damaged_turn_ms": round(1000 * slowest, 2),
    }
    print(json.dumps(result))
    return 1 if failures or worst > 15 else 0


if __name__ == "__main__":
    sys.exit(main())
