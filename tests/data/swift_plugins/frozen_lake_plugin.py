"""FrozenLake as text, in ms-swift's plug-in form: an environment that a row chooses with env_config {"name", "seed", …}.

Written anew for these tests: the names, formats and imports are those of ms-swift's example, none of its code is.
"""

import random
import re
from typing import Any, Dict, List, Optional, Tuple

from swift.infer_engine.protocol import RolloutInferRequest
from swift.rollout.gym_env import Env, envs
from swift.template import Messages
from swift.utils import get_logger

logger = get_logger()

MOVES = {'up': (-1, 0), 'down': (1, 0), 'left': (0, -1), 'right': (0, 1)}
TAGGED = re.compile(r'<action>\s*(\w+)\s*</action>', re.IGNORECASE)
BARE = re.compile(r'\b(' + '|'.join(MOVES) + r')\b', re.IGNORECASE)
RULES = 'Walk from P to G on the ice F, around the holes H. Answer with <action>up|down|left|right</action>.'


def can_be_solved(board: List[List[str]]) -> bool:
    cells = {(r, c): v for r, row in enumerate(board) for c, v in enumerate(row)}
    todo = [at for at, v in cells.items() if v == 'S']
    seen = set(todo)
    while todo:
        r, c = todo.pop()
        if cells[r, c] == 'G':
            return True
        for dr, dc in MOVES.values():
            at = (r + dr, c + dc)
            if at not in seen and cells.get(at, 'H') != 'H':
                seen.add(at)
                todo.append(at)
    return False


def make_map(size: int = 4, p: float = 0.8, seed: Optional[int] = None) -> List[str]:
    rng = random.Random(seed)
    while True:
        board = [['F' if rng.random() < p else 'H' for _ in range(size)] for _ in range(size)]
        start = rng.randrange(size), rng.randrange(size)
        goal = rng.randrange(size), rng.randrange(size)
        if start == goal:
            continue
        board[start[0]][start[1]] = 'S'
        board[goal[0]][goal[1]] = 'G'
        if can_be_solved(board):
            return [''.join(row) for row in board]


class FrozenLakeEnv(Env):

    def __init__(self, env_config: Dict[str, Any]):
        super().__init__(env_config)
        self.map: List[str] = []
        self.at = (0, 0)
        self.is_closed = False

    def show(self) -> str:
        rows = [list(row) for row in self.map]
        rows[self.at[0]][self.at[1]] = 'P'
        return '\n'.join(' '.join(row) for row in rows)

    async def reset(self, config: RolloutInferRequest) -> Tuple[str, Dict[str, Any], str]:
        own = self.env_config
        self.map = make_map(int(own.get('size', 4)), float(own.get('p', 0.8)), own.get('seed'))
        self.at = next((r, row.index('S')) for r, row in enumerate(self.map) if 'S' in row)
        return self.show(), {'map': self.map}, RULES

    async def step(self, action: Messages) -> Tuple[str, float, bool, Dict[str, Any]]:
        said = action[-1]['content']
        tagged = TAGGED.search(said)
        words = [tagged.group(1)] if tagged else BARE.findall(said)
        move = words[-1].lower() if words else None
        if move not in MOVES:
            return f'Invalid response: could not find a move.\n{self.show()}', 0.0, False, {}
        last = len(self.map) - 1
        r, c = (max(0, min(last, a + d)) for a, d in zip(self.at, MOVES[move]))
        self.at = (r, c)
        cell = self.map[r][c]
        return self.show(), float(cell == 'G'), cell in 'GH', {'cell': cell}

    async def close(self):
        assert not self.is_closed, 'closed twice'
        self.is_closed = True


envs['frozen_lake'] = FrozenLakeEnv
