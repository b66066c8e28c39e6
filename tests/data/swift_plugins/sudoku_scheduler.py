"""Sudoku behind an OpenEnv server, in ms-swift's plug-in form: five reward parts a turn, hints, and the end after a bad move.

Written anew for these tests: the names, formats and imports are those of ms-swift's example, none of its code is.
"""

import asyncio
import re
from typing import Any, Dict, List

from swift.rollout.multi_turn import OpenEnvScheduler, multi_turns

PARTS = ('empty_cell_reward', 'valid_move_reward', 'repetition_reward', 'progress_reward', 'correct_reward')
RULES = 'Fill the grid. Answer with [row col number].'


class SudokuScheduler(OpenEnvScheduler):

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._moves: Dict[str, List[str]] = {}
        self._filled: Dict[str, int] = {}

    async def on_trajectory_start(self, requests):
        semaphore = asyncio.Semaphore(getattr(self, 'max_concurrent_envs', 4))

        async def init_single(req):
            async with semaphore:
                uuid = req.uuid
                if uuid in self._envs:
                    await self._close_and_remove(uuid)
                own = (req.data_dict or {}).get('env_config', {}) if hasattr(req, 'data_dict') else {}
                config = {**getattr(self, 'env_config_defaults', {}), **own}
                wrapper = self._create_env(config)
                observation, metadata = await asyncio.to_thread(wrapper.reset)
                from swift.rollout.multi_turn import Messages
                messages: Messages = [{'role': 'system', 'content': config.get('system_message', RULES)},
                                      {'role': 'user', 'content': self._text(observation)}]
                req.messages = messages
                self._envs[uuid] = wrapper
                self._moves[uuid] = []
                self._filled[uuid] = 0
                self._total_rewards[uuid] = 0.0
                self._step_rewards[uuid] = []
                self._pending_obs[uuid] = None

        await asyncio.gather(*[init_single(req) for req in requests])

    async def _close_and_remove(self, uuid):
        await super()._close_and_remove(uuid)
        self._moves.pop(uuid, None)
        self._filled.pop(uuid, None)

    def _text(self, observation: Any) -> str:
        if isinstance(observation, dict):
            messages = observation.get('messages') or [{}]
            return messages[0].get('content', '') or observation.get('prompt', '')
        return str(observation)

    def parse_action(self, text: str):
        found = re.findall(r'\[\s*(\d)\s+(\d)\s+(\d)\s*\]', text)
        return {'message': '[{} {} {}]'.format(*found[-1])} if found else None

    async def on_turn_end(self, infer_request, response_choice, current_turn):
        uuid = infer_request.uuid
        wrapper = self._envs.get(uuid)
        if wrapper is None:
            return {'done': True, 'rollout_infos': {}}
        action = self.parse_action(response_choice.message.content)
        if action is None:
            self._step_rewards[uuid].append(-1.0)
            infos = {'total_reward': self._total_rewards[uuid] - 1.0, 'step_rewards': list(self._step_rewards[uuid]),
                     'gym_done': True}
            await self._close_and_remove(uuid)
            return {'done': True, 'rollout_infos': infos}
        observation, env_reward, done, metadata = await asyncio.to_thread(wrapper.step, action)
        text = self._text(observation)
        move, seen = action['message'], self._moves[uuid]
        is_valid = 'invalid' not in text.lower()
        repeats = seen.count(move)
        seen.append(move)
        self._filled[uuid] += is_valid and not repeats
        values = (1.0 if is_valid else -1.0, 1.0 if is_valid and not repeats else 0.0,
                  -min(2.0**repeats, 10.0) if repeats else 0.0, self._filled[uuid] / 51, float(env_reward or 0.0))
        self._total_rewards[uuid] = sum(values)
        self._step_rewards[uuid].append(sum(values))
        self._pending_obs[uuid] = None if done else f'{text}\nTried: {", ".join(seen)}'
        infos = {**dict(zip(PARTS, values)), 'total_reward': sum(values),
                 'step_rewards': list(self._step_rewards[uuid]), 'gym_done': done}
        if done:
            await self._close_and_remove(uuid)
        return {'done': done, 'rollout_infos': infos}


multi_turns['sudoku_scheduler'] = SudokuScheduler
