"""The quick start's tasks, tools and demonstrations, all from seeded generators: nothing is downloaded.

There are two families of tasks. `arithmetic` is a word problem in GSM8K's answer format; the `gsm8k` interaction rejects a
wrong answer and the model may try again. `lookup` asks for a price that is drawn anew for every episode, so a policy can
only learn it by calling the tool.

    What is the price of "red lamp"?  ->  lookup({"item": "red lamp"})  ->  "red lamp = 83"  ->  "#### 83"

Training and held-out problems never share parameters (the three numbers, or the colour and the thing), and no
demonstration ends with a wrong answer.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import polyturn
from polyturn.core.trajectory import Trajectory
from polyturn.data.conversations import Conversation
from polyturn.rewards import gsm8k
from polyturn.tools.base import BaseTool

SYSTEM_PROMPT = "Answer as #### number. Tools:"
FEEDBACK = "Your response is incorrect! You need to reflect on your answer and try again."

COLOURS = (
    "red", "blue", "green", "pink", "gold", "black", "white", "brown", "grey", "silver", "purple", "orange",
    "tan", "teal", "lime", "plum",
)  # fmt: skip
THINGS = (
    "lamp", "chair", "cup", "bag", "hat", "shoe", "coat", "desk", "clock", "ring", "vase", "bowl", "scarf", "tent",
    "drum", "kite",
)  # fmt: skip
NAMES = ("Mia", "Tom", "Ana", "Leo", "Zoe", "Sam")
GOODS = ("coins", "books", "pens", "cards", "shells", "eggs")
LOOKUP_WORDINGS = (
    'What is the price of "{item}"?',
    'How much is "{item}"?',
    'Tell me the price of "{item}"?',
    '{name} asks for the price of "{item}"?',
)
ARITHMETIC_WORDINGS = {
    "{a} + {b} + {c}": (
        "{name} has {a} {goods}, buys {b} and finds {c}. How many {goods} does {name} have?",
        "{name} sees {a} {goods}, then {b} and then {c} more. How many {goods} is that?",
    ),
    "{a} * {b} + {c}": (
        "{name} has {a} boxes of {b} {goods} and finds {c} more. How many {goods} does {name} have?",
        "{name} fills {a} bags with {b} {goods} each and keeps {c} apart. How many {goods} is that?",
    ),
    "{a} * {b} - {c}": (
        "{name} has {a} boxes of {b} {goods} and loses {c}. How many {goods} are left?",
        "{name} fills {a} bags with {b} {goods} each, then sells {c}. How many {goods} remain?",
    ),
}
HELD_OUT_EVERY = 4
"""One combination of parameters in this many is kept for evaluation."""
ANSWERS = range(10, 100)
"""The possible answers. All have two digits, because a model this small copies by position: it would copy answers of a rare
length wrongly long after it has learnt to call the tool."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem, independent of an episode."""

    question: str
    tool: str
    argument: str
    """The argument of the right tool call: an item (`red lamp`) or an expression (`4 * 7 + 3`)."""
    answer: int | None
    """The right answer; None if each episode draws it."""


def problems(seed: int, *, is_held_out: bool) -> Iterator[Problem]:
    """Yield distinct problems without end, the same for the same seed; half of them are lookups."""
    rng = random.Random(f"problems-{seed}-{is_held_out}")
    while True:
        make = _lookup_problem if rng.random() < 0.5 else _arithmetic_problem
        yield make(rng, is_held_out)


def _is_held_out(*parameters: int) -> bool:
    return sum((i + 1) * parameter for i, parameter in enumerate(parameters)) % HELD_OUT_EVERY == 0


def _lookup_problem(rng: random.Random, is_held_out: bool) -> Problem:
    while True:
        colour, thing = rng.randrange(len(COLOURS)), rng.randrange(len(THINGS))
        if _is_held_out(colour, thing) == is_held_out:
            break
    item = f"{COLOURS[colour]} {THINGS[thing]}"
    return Problem(rng.choice(LOOKUP_WORDINGS).format(item=item, name=rng.choice(NAMES)), "lookup", item, None)


def _arithmetic_problem(rng: random.Random, is_held_out: bool) -> Problem:
    pattern = rng.choice(tuple(ARITHMETIC_WORDINGS))
    while True:
        a, b, c = (rng.randint(2, 9) for _ in range(3))
        expression = pattern.format(a=a, b=b, c=c)
        answer = calculate(expression)
        if _is_held_out(a, b, c) == is_held_out and len({a, b, c}) == 3 and answer in ANSWERS:
            break
    wording = rng.choice(ARITHMETIC_WORDINGS[pattern])
    question = wording.format(a=a, b=b, c=c, name=rng.choice(NAMES), goods=rng.choice(GOODS))
    return Problem(question, "calculator", expression, answer)


# Tasks


def tasks(seed: int, num_tasks: int, is_held_out: bool = False) -> list[polyturn.Task]:
    """Return `num_tasks` different tasks."""
    by_question: dict[str, polyturn.Task] = {}
    for problem in problems(seed, is_held_out=is_held_out):
        if len(by_question) == num_tasks:
            break
        if problem.question not in by_question:
            id = f"{'held-out' if is_held_out else 'train'}-{len(by_question)}"
            by_question[problem.question] = _task(problem, id=id)
    return list(by_question.values())


def _task(problem: Problem, *, id: str) -> polyturn.Task:
    interaction = None
    if problem.answer is not None:
        kwargs = {"name": "gsm8k", "ground_truth": str(problem.answer)}
        interaction = polyturn.InteractionRef(name="gsm8k", kwargs=kwargs)
    return polyturn.Task(
        id=id,
        prompt=_prompt(problem),
        data_source=f"quickstart/{'lookup' if problem.answer is None else 'arithmetic'}",
        ground_truth=None if problem.answer is None else str(problem.answer),
        interaction=interaction,
        extra={"item": problem.argument},
    )


def _prompt(problem: Problem) -> tuple[polyturn.Message, ...]:
    return (
        polyturn.Message(role="system", content=SYSTEM_PROMPT),
        polyturn.Message(role="user", content=problem.question),
    )


# Tools


def price(episode_id: str, item: str) -> int:
    """Return the price of an item in one episode, drawn from ANSWERS; another episode has other prices."""
    digest = hashlib.blake2b(f"{episode_id}/{item}".encode(), digest_size=4).digest()
    return ANSWERS[int.from_bytes(digest, "big") % len(ANSWERS)]


class PriceLookup(BaseTool):
    """A price list that is drawn anew for every episode."""

    stateless = True

    def get_openai_tool_schema(self) -> Any:
        parameters = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
        description = "Look up the price of an item."
        return {"type": "function", "function": {"name": "lookup", "description": description, "parameters": parameters}}

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        colour, _, thing = parameters["item"].partition(" ")
        if colour not in COLOURS or thing not in THINGS:
            raise polyturn.ToolError(f"no item {parameters['item']!r}")
        return f"{parameters['item']} = {price(instance_id, parameters['item'])}"


@polyturn.tool
async def calculator(expression: str) -> str:
    """Work out an expression.

    Args:
        expression: Numbers joined by +, - and *.
    """
    return f"{expression} = {calculate(expression)}"


def calculate(expression: str) -> int:
    """Return the value of numbers joined by +, - and *; raises ToolError for anything else."""
    if not re.fullmatch(r"\d{1,4}( [-+*] \d{1,4}){0,8}", expression):
        raise polyturn.ToolError("write numbers joined by +, - or *, with spaces between them")
    total = 0
    for sign, product in re.findall(r"(^|[-+] )(\d+(?: \* \d+)*)", expression):
        value = 1
        for factor in product.split(" * "):
            value *= int(factor)
        total += -value if sign.startswith("-") else value
    return total


# Rewards


def lookup_score(trajectory: Trajectory) -> float:
    """Return 1.0 if the last turn answers with this episode's price, in GSM8K's format."""
    wanted = price(trajectory.id, str(trajectory.task.extra["item"]))
    return gsm8k.compute_score(trajectory.turns[-1].message.text, str(wanted)) if trajectory.turns else 0.0


# Demonstrations


def demonstrations(
    seed: int,
    num_conversations: int,
    lookup_share: float = 0.5,
    lookup_tool_share: float = 0.38,
    feedback_share: float = 0.5,
    calculator_share: float = 0.38,
) -> list[Conversation]:
    """Return demonstrations of someone who often knows the answer and writes it at once.

    A model that imitates them writes answers that it cannot know. A minority shows what works for any model: call the tool,
    copy its result. The calculator appears only after feedback.

    Args:
        seed: Seed of the problems and choices.
        num_conversations: Number of demonstrations.
        lookup_share: Share of demonstrations that ask for a price.
        lookup_tool_share: Share of those demonstrations that call the tool; in the others the assistant knows the price.
        feedback_share: Share of arithmetic demonstrations that begin with a wrong attempt and its feedback; the attempt is
            context and is not trained.
        calculator_share: Share of turns after feedback that call the calculator.
    """
    rng = random.Random(f"demonstrations-{seed}")
    dialogues = []
    for _ in range(num_conversations):
        if rng.random() < lookup_share:
            dialogues.append(_demonstrate(_lookup_problem(rng, False), rng, False, lookup_tool_share))
        else:
            has_feedback = rng.random() < feedback_share
            share = calculator_share if has_feedback else 0.0
            dialogues.append(_demonstrate(_arithmetic_problem(rng, False), rng, has_feedback, share))
    return dialogues


def _demonstrate(problem: Problem, rng: random.Random, has_feedback: bool, tool_share: float) -> Conversation:
    answer = rng.choice(ANSWERS) if problem.answer is None else problem.answer
    messages = list(_prompt(problem))
    weights: list[float] = []
    if has_feedback:
        wrong = answer + rng.choice([-10, -2, -1, 1, 2, 10])
        messages += [_direct(problem, wrong), polyturn.Message(role="user", content=FEEDBACK)]
        weights.append(0.0)
    if rng.random() < tool_share:
        key = "item" if problem.tool == "lookup" else "expression"
        call = polyturn.ToolCall(id="call_0", name=problem.tool, arguments={key: problem.argument})
        messages += [
            polyturn.Message(role="assistant", tool_calls=(call,)),
            polyturn.Message(
                role="tool", content=f"{problem.argument} = {answer}", tool_call_id="call_0", name=problem.tool
            ),
            polyturn.Message(role="assistant", content=f"#### {answer}"),
        ]
        weights += [1.0, 1.0]
    else:
        messages.append(_direct(problem, answer))
        weights.append(1.0)
    return Conversation(messages=tuple(messages), weights=tuple(weights))


def _direct(problem: Problem, answer: int) -> polyturn.Message:
    return polyturn.Message(role="assistant", content=f"Easy:\n{problem.argument} = {answer}\n#### {answer}")


def corpus() -> list[str]:
    """Return the texts to train the tokenizer on."""
    texts = [
        "\nsystem\nuser\nassistant\n",
        SYSTEM_PROMPT,
        FEEDBACK,
        '{"name": "lookup", "arguments": {"item": "',
        '{"name": "calculator", "arguments": {"expression": "',
    ]
    for c in demonstrations(0, 1500):
        texts += [m.text for m in c.messages if m.text]
    return texts * 2
