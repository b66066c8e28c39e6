"""A collection of plug-ins in ms-swift's form: rewards, a ReAct tool scheduler, a reward-model plug-in, an empty environment.

Written anew for these tests: the names, formats and imports are those of ms-swift's example, none of its code is.
"""

import asyncio
import re
from copy import deepcopy
from typing import Any, Dict, List

import torch

from swift.infer_engine import RequestConfig, TransformersEngine
from swift.infer_engine.protocol import ChatCompletionResponseChoice, RolloutInferRequest
from swift.rewards import ORM, AsyncORM, orms, rm_plugins
from swift.rewards.rm_plugin import DefaultRMPlugin
from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns
from swift.template import Template
from swift.utils import get_logger, to_device

logger = get_logger()


class CountdownORM(ORM):

    def __call__(self, completions, target, nums, **kwargs) -> List[float]:
        rewards = []
        for said, wanted, numbers in zip(completions, target, nums):
            found = re.search(r'<answer>(.*?)</answer>', said, re.DOTALL)
            equation = found.group(1).strip() if found else ''
            used = sorted(int(n) for n in re.findall(r'\d+', equation))
            is_plain = re.fullmatch(r'[\d+\-*/().\s]+', equation) is not None
            try:
                value = eval(equation, {'__builtins__': None}, {}) if is_plain else None
            except Exception:
                value = None
            rewards.append(float(used == sorted(int(n) for n in numbers) and value is not None
                                 and abs(float(value) - float(wanted)) < 1e-5))
        return rewards


class MultiTurnThinkingTips(ORM):
    """One reward for all samples of a trajectory: the accuracy of its last turn."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        from swift.rewards.orm import MathAccuracy
        self.acc_func = MathAccuracy()

    def __call__(self, completions, **kwargs) -> List[float]:
        trajectory_inputs = kwargs.get('trajectory_inputs')
        rewards = []
        for request_id in kwargs.get('request_id'):
            last = trajectory_inputs[request_id][-1]
            rewards.append(self.acc_func([last['messages'][-1]['content']], [last['solution']])[0])
        return rewards


class SlowLength(AsyncORM):

    async def __call__(self, completions, **kwargs) -> List[float]:
        await asyncio.sleep(0.01)
        return [len(said) / 100 for said in completions]


orms['external_countdown'] = CountdownORM
orms['thinking_tips'] = MultiTurnThinkingTips
orms['async_length'] = SlowLength


class CustomizedRMPlugin:

    def __init__(self, model, template):
        self.model = model
        self.template: Template = template

    def __call__(self, inputs: List[Dict[str, Any]], **kwargs) -> List[float]:
        with torch.inference_mode():
            return self.model(**to_device(inputs, 'cpu')).logits[:, 0].tolist()


class GenRMPlugin(DefaultRMPlugin):

    def __init__(self, model, template):
        super().__init__(model, template)
        self.engine = TransformersEngine(self.model, template=self.template)
        self.request_config = RequestConfig()


rm_plugins['my_rmplugin'] = CustomizedRMPlugin
rm_plugins['qwenlong'] = GenRMPlugin


class ToolCallScheduler(MultiTurnScheduler):
    """ReAct: `Action: x` and `Action Input: y` run a tool, whose result goes on in the same message, masked."""

    def __init__(self, infer_engine=None, max_turns=None, *args, **kwargs):
        super().__init__(infer_engine, max_turns, *args, **kwargs)
        self.tools = {'calculator': self.calculator}

    @staticmethod
    def calculator(expression: str) -> str:
        if not re.fullmatch(r'[\d+\-*/(). ]+', expression):
            return 'Error: expression contains disallowed characters.'
        try:
            return f"Result: {eval(expression, {'__builtins__': None}, {})}"
        except Exception as e:
            return f'Calculation error: {e}'

    def _calls(self, text: str) -> List[Dict[str, str]]:
        found = re.findall(r'Action:\s*(.*?)\s*\nAction Input:\s*(.*?)(?:\n|$)', text, re.DOTALL)
        return [{'tool': tool.strip(), 'params': params.strip()} for tool, params in found]

    def _run(self, calls) -> List[str]:
        return [self.tools[c['tool']](c['params']) if c['tool'] in self.tools else f"unknown tool {c['tool']}" for c in calls]

    def check_finished(self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice,
                       current_turn: int) -> bool:
        if not self._calls(response_choice.message.content):
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice,
             current_turn: int) -> Dict:
        token_ids = response_choice.token_ids
        loss_mask = [1] * len(token_ids)
        logprobs = self._extract_logprobs_from_choice(response_choice)
        results = self._run(self._calls(response_choice.message.content))
        infer_request.messages[-1]['content'] += results[0]
        result_tokens = self.tokenizer.encode(results[0], add_special_tokens=False)
        token_ids.extend(result_tokens)
        loss_mask.extend([0] * len(result_tokens))
        return {
            'infer_request': infer_request,
            'response_token_ids': token_ids,
            'response_loss_mask': loss_mask,
            'rollout_logprobs': logprobs,
            'rollout_infos': {'tool_results': results[0], 'num_turns': current_turn},
        }


multi_turns['tool_call_scheduler'] = ToolCallScheduler


class CustomEnv(Env):
    pass


envs['custom_env'] = CustomEnv
