"""A walk over a frozen lake: the environment, its tasks, and a beginner's demonstrations, all from seeded generators.

P . . H      the model sees the map before every move and answers with one of
. H . .      <action>up</action> down left right
. . . .      reaching G ends the walk and scores 1, a hole (H) ends it and scores 0;
H . . G      a step off the map, or an answer that is not a move, changes nothing
G is 3 down and 3 right.
"""

from __future__ import annotations

import random
import re
from collections import deque
from typing import Any

import polyturn
from polyturn.data.conversations import Conversation

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
SIZE = 4
TASK = "Walk to G."
INVALID = "That is no move."
_ACTION = re.compile(r"<action>\s*(up|down|left|right)\s*</action>")


class FrozenLake:
    """One lake, drawn from its seed."""

    def __init__(self, size: int = SIZE, holes: float = 0.15, min_distance: int = 1) -> None:
        self.size = size
        self.holes = holes
        self.min_distance = min_distance

    def reset(self, *, seed: int) -> str:
        """Draw a lake whose goal can be reached, and return its map."""
        rng = random.Random(f"lake-{seed}")
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        while True:
            self.player, self.goal = rng.sample(cells, 2)
            self.is_hole = {c for c in cells if c not in (self.player, self.goal) and rng.random() < self.holes}
            steps = distances(self.goal, self.is_hole, self.size).get(self.player)
            if steps is not None and steps >= self.min_distance:
                return self.map()

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Move, and return (map, reward, whether the walk is over, info)."""
        move = _ACTION.search(action)
        if move is None:
            return f"{INVALID}\n{self.map()}", 0.0, False, {"is_valid": False}
        self.player = moved(self.player, move[1], self.size)
        if self.player in self.is_hole:
            return "You fell.", 0.0, True, {"is_valid": True}
        if self.player == self.goal:
            return "You made it.", 1.0, True, {"is_valid": True}
        return self.map(), 0.0, False, {"is_valid": True}

    def snapshot(self) -> list[Any]:
        """Return the state of the walk for a resumed run."""
        return [self.player, self.goal, sorted(self.is_hole)]

    def restore(self, state: list[Any]) -> None:
        """Continue the walk from `state`."""
        (self.player, self.goal), holes = map(tuple, state[:2]), state[2]
        self.is_hole = set(map(tuple, holes))

    def close(self) -> None:
        """Do nothing: a lake has no resources."""

    def map(self) -> str:
        """Return the map, one line per row, and the position of the goal relative to the player."""

        def letter(cell: tuple[int, int]) -> str:
            return "P" if cell == self.player else "G" if cell == self.goal else "H" if cell in self.is_hole else "."

        rows = [" ".join(letter((r, c)) for c in range(self.size)) for r in range(self.size)]
        down, right = self.goal[0] - self.player[0], self.goal[1] - self.player[1]
        distance = [
            f"{abs(n)} {less if n < 0 else more}" for n, less, more in ((down, "up", "down"), (right, "left", "right")) if n
        ]
        return "\n".join([*rows, f"G is {' and '.join(distance)}."])


def moved(cell: tuple[int, int], move: str, size: int) -> tuple[int, int]:
    """Return the cell after a move; a move off the map changes nothing."""
    rows, columns = MOVES[move]
    return min(max(cell[0] + rows, 0), size - 1), min(max(cell[1] + columns, 0), size - 1)


def distances(goal: tuple[int, int], is_hole: set[tuple[int, int]], size: int) -> dict[tuple[int, int], int]:
    """Return the number of moves to the goal, for each cell that the goal can be reached from."""
    steps = {goal: 0}
    queue = deque([goal])
    while queue:
        cell = queue.popleft()
        for move in MOVES:
            there = moved(cell, move, size)
            if there not in steps and there not in is_hole:
                steps[there] = steps[cell] + 1
                queue.append(there)
    return steps


def tasks(seed: int, num_tasks: int) -> list[polyturn.Task]:
    """Return tasks with one lake each; another seed gives other lakes."""
    return [
        polyturn.Task(
            id=f"lake-{seed}-{number}",
            prompt=(polyturn.Message(role="user", content=TASK),),
            extra={"env_config": {"seed": seed * 1_000_000 + number}},
        )
        for number in range(num_tasks)
    ]


def demonstrations(
    seed: int, num_conversations: int, max_moves: int = 3, care: float = 0.25, habit: float = 0.45
) -> list[Conversation]:
    """Return walks of a beginner who tends to move down.

    Args:
        seed: Seed of the moves.
        num_conversations: Number of walks.
        max_moves: The largest number of moves of a walk.
        care: Share of moves that lead nearer to G.
        habit: Share of moves that go down, wherever G is. All others are random.
    """
    rng = random.Random(f"walks-{seed}")
    walks = []
    for number in range(num_conversations):
        lake = FrozenLake()
        messages = [polyturn.Message(role="user", content=f"{TASK}\n{lake.reset(seed=-1 - number)}")]
        for _ in range(max_moves):
            steps = distances(lake.goal, lake.is_hole, lake.size)
            good = [m for m in MOVES if steps.get(moved(lake.player, m, lake.size), 99) < steps[lake.player]]
            drawn = rng.random()
            move = rng.choice(good if drawn < care else ["down"] if drawn < care + habit else list(MOVES))
            messages.append(polyturn.Message(role="assistant", content=f"<action>{move}</action>"))
            observation, _, is_done, _ = lake.step(messages[-1].text)
            if is_done:
                break
            messages.append(polyturn.Message(role="user", content=observation))
        if messages[-1].role == "user":
            messages.pop()
        walks.append(Conversation(messages=tuple(messages)))
    return walks


def corpus() -> list[str]:
    """Return the texts to train the tokenizer on."""
    texts = [INVALID, TASK]
    return texts * 50 + [m.text for c in demonstrations(0, 400) for m in c.messages]
