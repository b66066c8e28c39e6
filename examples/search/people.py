"""A search task that a tiny model can learn: questions about people who are only described in the index.

    Where was "Ana Brook" born?
    ->  search({"query_list": ["Ana Brook"]})
    <-  Doc 1 (Title: Ana Brook) Ana Brook was born in Lima in the year 1874 and worked as painter.
    ->  born in Lima. <answer> Lima </answer>

Each surname is shared by forty of the 1,600 people, and a search returns one passage, so a search for `Brook` alone mostly
finds another person. A quarter of the people appear in the evaluation only. Everything is drawn from seeded generators.

    pip install 'polyturn[train,search]'
    python people.py people.jsonl && polyturn data index people.jsonl --out people.index && polyturn train config.yaml
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import polyturn
from polyturn.data.conversations import Conversation

SYSTEM_PROMPT = "Answer as <answer> word </answer>. Tools:"
FIRST_NAMES = (
    "Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jan", "Kira", "Leo", "Mia", "Nils", "Olga", "Paul",
    "Rosa", "Sam", "Tara", "Udo", "Vera", "Walt", "Xenia", "Yuri", "Zoe", "Abel", "Bea", "Carl", "Dora", "Emil", "Faye",
    "Gus", "Hope", "Ivo", "June", "Kurt", "Lena", "Max", "Nora", "Otto",
)  # fmt: skip
SURNAMES = (
    "Ash", "Brook", "Cole", "Dale", "Elm", "Ford", "Grove", "Hill", "Ivory", "Jade", "Kent", "Lake", "Marsh", "North", "Oak",
    "Pond", "Quill", "Reed", "Stone", "Thorn", "Usher", "Vale", "Wood", "York", "Birch", "Cliff", "Dune", "East", "Frost",
    "Gale", "Heath", "Isle", "Knoll", "Lane", "Moor", "Nash", "Orchard", "Peak", "Rivers", "Shore",
)  # fmt: skip
CITIES = (
    "Lima", "Oslo", "Rome", "Cairo", "Delhi", "Paris", "Quito", "Seoul", "Tokyo", "Bern", "Dakar", "Hanoi", "Kyoto",
    "Lagos", "Milan", "Osaka", "Perth", "Riga", "Sofia", "Tunis", "Vienna", "Accra", "Basel", "Cork",
)  # fmt: skip
TRADES = (
    "painter", "baker", "sailor", "weaver", "doctor", "farmer", "singer", "tailor", "miner", "potter", "writer", "dancer",
    "smith", "judge", "clerk", "monk",
)  # fmt: skip
YEARS = range(1820, 1880)
QUESTIONS = {
    "born in": 'Where was "{name}" born?',
    "the year": 'When was "{name}" born?',
    "worked as": 'What was the work of "{name}"?',
}
"""Words before the answer in a passage -> the question about it."""
HELD_OUT_EVERY = 4
"""One person in this many is kept for evaluation."""


@dataclass(frozen=True, slots=True)
class Person:
    """A person, with the facts in the index."""

    name: str
    city: str
    year: str
    trade: str

    @property
    def text(self) -> str:
        """The passage about the person."""
        return f"{self.name} was born in {self.city} in the year {self.year} and worked as {self.trade}."


def people(*, seed: int = 0) -> list[Person]:
    """Return all people, in the order of the index."""
    rng = random.Random(f"people-{seed}")
    return [
        Person(f"{first} {last}", rng.choice(CITIES), str(rng.choice(YEARS)), rng.choice(TRADES))
        for last in SURNAMES
        for first in rng.sample(FIRST_NAMES, len(FIRST_NAMES))
    ]


def split(*, is_held_out: bool) -> list[Person]:
    """Return the people of the training questions or of the evaluation."""
    return [person for number, person in enumerate(people()) if (number % HELD_OUT_EVERY == 0) == is_held_out]


# Tasks


def tasks(seed: int, num_tasks: int, is_held_out: bool = False) -> list[polyturn.Task]:
    """Return `num_tasks` different questions."""
    rng = random.Random(f"tasks-{seed}-{is_held_out}")
    questions = [(person, fact) for person in split(is_held_out=is_held_out) for fact in QUESTIONS]
    chosen = rng.sample(questions, num_tasks)
    return [_task(person, fact, id=f"{seed}-{number}") for number, (person, fact) in enumerate(chosen)]


def _task(person: Person, fact: str, *, id: str) -> polyturn.Task:
    return polyturn.Task(
        id=id,
        prompt=_prompt(person, fact),
        data_source="searchR1_people",
        ground_truth={"target": [_known(person, fact)]},
        extra={"name": person.name},
    )


def _prompt(person: Person, fact: str) -> tuple[polyturn.Message, ...]:
    return (
        polyturn.Message(role="system", content=SYSTEM_PROMPT),
        polyturn.Message(role="user", content=QUESTIONS[fact].format(name=person.name)),
    )


def _known(person: Person, fact: str) -> str:
    return {"born in": person.city, "the year": person.year, "worked as": person.trade}[fact]


# Demonstrations


def demonstrations(
    seed: int, num_conversations: int, guess_share: float = 0.6, surname_share: float = 0.12
) -> list[Conversation]:
    """Return demonstrations of someone who mostly answers from memory and sometimes searches carelessly.

    A model that imitates them gives answers that it cannot know, or reads about a namesake. A minority shows what works:
    search for the full name, and copy the right word.

    Args:
        seed: Seed of the questions and choices.
        num_conversations: Number of demonstrations.
        guess_share: Share of demonstrations that answer at once, always rightly.
        surname_share: Share of demonstrations that search for the surname alone and copy the result, right or wrong.
    """
    rng = random.Random(f"demonstrations-{seed}")
    known = split(is_held_out=False)
    first_of: dict[str, Person] = {}
    for person in people():
        first_of.setdefault(person.name.split()[1], person)
    dialogues = []
    for _ in range(num_conversations):
        person, fact, drawn = rng.choice(known), rng.choice(tuple(QUESTIONS)), rng.random()
        prompt = _prompt(person, fact)
        if drawn < guess_share:
            dialogues.append(Conversation(messages=(*prompt, _answer(person, fact))))
            continue
        is_careless = drawn < guess_share + surname_share
        query = person.name.split()[1] if is_careless else person.name
        read = first_of[query] if is_careless else person
        dialogues.append(Conversation(messages=(*prompt, *_search(query, read), _answer(read, fact))))
    return dialogues


def _answer(person: Person, fact: str) -> polyturn.Message:
    known = _known(person, fact)
    return polyturn.Message(role="assistant", content=f"{fact} {known}.\n<answer> {known} </answer>")


def _search(query: str, read: Person) -> tuple[polyturn.Message, polyturn.Message]:
    call = polyturn.ToolCall(id="call_0", name="search", arguments={"query_list": [query]})
    result = json.dumps({"result": f"Doc 1 (Title: {read.name})\n{read.text}"})
    return (
        polyturn.Message(role="assistant", tool_calls=(call,)),
        polyturn.Message(role="tool", content=result, tool_call_id="call_0", name="search"),
    )


def corpus() -> list[str]:
    """Return the texts to train the tokenizer on."""
    texts = [SYSTEM_PROMPT, *('{"name": "search", "arguments": {"query_list": ["' + p.name + '"]}}' for p in people())]
    texts += [m.text for c in demonstrations(0, 1500) for m in c.messages if m.text]
    return texts * 2


def main(out: Path) -> None:
    """Write the passages."""
    lines = (json.dumps({"id": p.name, "title": p.name, "text": p.text}) + "\n" for p in people())
    out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
