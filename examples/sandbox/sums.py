"""A sandbox task that a tiny model can learn: sums that it cannot compute itself, but Python can.

    What is 14 times 53 plus 26?
    ->  python({"code": "print(14 * 53 + 26)"})
    <-  768
    ->  #### 768

The code runs in the Python sandbox (bubblewrap, on Linux), where `x = 14 * 53 + 26` alone prints nothing. All results have
three digits. A quarter of the combinations of numbers appear in the evaluation only. Everything is drawn from seeded
generators.

    polyturn train config.yaml
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import polyturn
from polyturn.data.conversations import Conversation

SYSTEM_PROMPT = "Answer as #### number. Tools:"
SILENT = "The code ran and printed nothing."
"""The tool's result if the code printed nothing."""
HELD_OUT_EVERY = 4
"""One combination of numbers in this many is kept for evaluation."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of sum of two-digit numbers."""

    question: str
    expression: str
    """The sum as a Python expression."""
    num_numbers: int
    work_out: Callable[..., int]


KINDS = (
    Kind("What is {} times {} plus {}?", "{} * {} + {}", 3, lambda a, b, c: a * b + c),
    Kind("What is {} to the power {} modulo 997?", "pow({}, {}, 997)", 2, lambda a, b: pow(a, b, 997)),
    Kind("What do the digits of {} to the power {} add up to?", "sum(map(int, str({} ** {})))", 2,
         lambda a, b: sum(map(int, str(a**b)))),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Problem:
    """One sum."""

    question: str
    expression: str
    answer: int


def problem(rng: random.Random, *, is_held_out: bool) -> Problem:
    """Draw a sum of training or evaluation; its result has three digits."""
    kind = rng.choice(KINDS)
    while True:
        numbers = [rng.randint(10, 99) for _ in range(kind.num_numbers)]
        checksum = sum((i + 1) * number for i, number in enumerate(numbers))
        if (checksum % HELD_OUT_EVERY == 0) == is_held_out and 100 <= (result := kind.work_out(*numbers)) <= 999:
            return Problem(kind.question.format(*numbers), kind.expression.format(*numbers), result)


# Tasks


def tasks(seed: int, num_tasks: int, is_held_out: bool = False) -> list[polyturn.Task]:
    """Return `num_tasks` different sums."""
    rng = random.Random(f"tasks-{seed}-{is_held_out}")
    by_question: dict[str, polyturn.Task] = {}
    while len(by_question) < num_tasks:
        drawn = problem(rng, is_held_out=is_held_out)
        by_question[drawn.question] = polyturn.Task(
            id=f"{seed}-{drawn.expression}",
            prompt=_prompt(drawn),
            data_source="openai/gsm8k",
            ground_truth=str(drawn.answer),
            extra={"expression": drawn.expression},
        )
    return list(by_question.values())


def _prompt(drawn: Problem) -> tuple[polyturn.Message, ...]:
    return (
        polyturn.Message(role="system", content=SYSTEM_PROMPT),
        polyturn.Message(role="user", content=drawn.question),
    )


# Demonstrations


def demonstrations(
    seed: int, num_conversations: int, guess_share: float = 0.7, silent_share: float = 0.14
) -> list[Conversation]:
    """Return demonstrations of someone who mostly does sums in the head and often forgets to print.

    A model that imitates them writes numbers that it cannot know. A minority shows what works: print the result and copy it.

    Args:
        seed: Seed of the sums and choices.
        num_conversations: Number of demonstrations.
        guess_share: Share of demonstrations that answer at once, always rightly.
        silent_share: Share of demonstrations whose code prints nothing; the sum is then done in the head.
    """
    rng = random.Random(f"demonstrations-{seed}")
    dialogues = []
    for _ in range(num_conversations):
        drawn, mood = problem(rng, is_held_out=False), rng.random()
        copied = polyturn.Message(role="assistant", content=f"#### {drawn.answer}")
        in_the_head = polyturn.Message(
            role="assistant", content=f"Easy:\n{drawn.expression} = {drawn.answer}\n#### {drawn.answer}"
        )
        if mood < guess_share:
            turns: tuple[polyturn.Message, ...] = (in_the_head,)
        elif mood < guess_share + silent_share:
            turns = (*_call(f"x = {drawn.expression}", SILENT), in_the_head)
        else:
            turns = (*_call(f"print({drawn.expression})", f"{drawn.answer}\n"), copied)
        dialogues.append(Conversation(messages=(*_prompt(drawn), *turns)))
    return dialogues


def _call(code: str, output: str) -> tuple[polyturn.Message, polyturn.Message]:
    call = polyturn.ToolCall(id="call_0", name="python", arguments={"code": code})
    return (
        polyturn.Message(role="assistant", tool_calls=(call,)),
        polyturn.Message(role="tool", content=output, tool_call_id="call_0", name="python"),
    )


def corpus() -> list[str]:
    """Return the texts to train the tokenizer on."""
    rng = random.Random("corpus")
    drawn = [problem(rng, is_held_out=False) for _ in range(1500)]
    codes = [f"{start}{p.expression}{end}" for p in drawn for start, end in (("x = ", ""), ("print(", ")"))]
    texts = [f'{{"name": "python", "arguments": {{"code": "{code}"}}}}' for code in codes]
    return [SYSTEM_PROMPT, SILENT, "Easy:\n#### 1", *texts, *(p.question for p in drawn)] * 2
