"""Counts the prefilled tokens of a second turn.

Sessions take a first turn and continue with their history and new tokens; members of a group share a prompt. Prints one JSON
line with the tokens that the model processed and the new ones, including the last sampled token, which was not processed
before.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from _engine_common import ask_all, demo_model, prompt

from polyturn.engines.embedded import EmbeddedEngine

NUM_SESSIONS = 32
GROUP = 8
OBSERVATION = 20


def main() -> None:
    """Count and print."""
    print(json.dumps({"benchmark": "engine_prefill", **asyncio.run(count())}))


async def count() -> dict[str, int]:
    """Return the prefilled tokens of two turns of every session."""
    engine = EmbeddedEngine(demo_model(), num_slots=NUM_SESSIONS)
    sessions = [f"s{i}" for i in range(NUM_SESSIONS)]
    prompts = [prompt(100, i // GROUP) for i in range(NUM_SESSIONS)]
    first = await ask_all(engine, prompts, [15] * NUM_SESSIONS, sessions=sessions)
    after_first = replace(engine.stats)
    again = [
        [*ids, *answer.token_ids.tolist(), *prompt(OBSERVATION, 1000 + i)]
        for i, (ids, answer) in enumerate(zip(prompts, first, strict=True))
    ]
    second = await ask_all(engine, again, [15] * NUM_SESSIONS, sessions=sessions)
    return {
        "prompt_tokens_first_turn": sum(map(len, prompts)),
        "prefilled_first_turn": after_first.prefilled_tokens,
        "shared_first_turn": after_first.shared_tokens,
        "prompt_tokens_second_turn": sum(map(len, again)),
        "new_tokens_second_turn": NUM_SESSIONS * (OBSERVATION + 1),
        "prefilled_second_turn": sum(c.info["prefilled_tokens"] for c in second),
    }


if __name__ == "__main__":
    main()
