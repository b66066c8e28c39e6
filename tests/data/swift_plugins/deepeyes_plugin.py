"""DeepEyes in ms-swift's plug-in form: a tool that zooms into the image, whose crop is shown in the next turn; a reward.

Written anew for these tests: the names, formats and imports are those of ms-swift's example, none of its code is.
"""

import json
import re
from math import ceil, floor
from typing import Any, Dict, List

from PIL import Image

from swift.infer_engine.protocol import ChatCompletionResponseChoice, RolloutInferRequest
from swift.rewards import ORM, orms
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns

HINT = '\nThink first, then call **image_zoom_in_tool** again if needed. Give the answer in <answer> </answer>.'


def load(image: Any) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, str) and image.startswith('data:'):
        import base64
        import io
        return Image.open(io.BytesIO(base64.b64decode(image.partition(',')[2])))
    return Image.open(image)


class VisualToolBoxScheduler(MultiTurnScheduler):

    def _last_call(self, text: str):
        calls = re.findall(r'<tool_call>(.*?)</tool_call>', text, re.DOTALL)
        return calls[-1].strip() if calls else None

    def check_finished(self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice,
                       current_turn: int) -> bool:
        if self._last_call(response_choice.message.content) is None:
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def _box(self, arguments, size):
        left, top, right, bottom = arguments['bbox_2d']
        width, height = size
        left, top, right, bottom = max(0, left), max(0, top), min(width, right), min(height, bottom)
        if right <= left or bottom <= top:
            raise ValueError('the box has no area')
        w, h = right - left, bottom - top
        if max(w, h) / min(w, h) > 100 or min(w, h) <= 30:
            raise ValueError('the box is too narrow')
        return floor(left), floor(top), ceil(right), ceil(bottom)

    def step(self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice,
             current_turn: int) -> Dict:
        infos: Dict[str, Any] = {}
        try:
            call = json.loads(self._last_call(response_choice.message.content))
            if call['name'] != 'image_zoom_in_tool':
                raise ValueError(f"unknown tool {call['name']}")
            image = load(infer_request.images[0])
            crop = image.crop(self._box(call['arguments'], image.size))
            infer_request.images.append(crop)
            infos['images'] = infer_request.images
            query = f'<tool_response><image>{HINT}</tool_response>'
        except Exception as e:
            query = f'Error: Invalid tool call format: {e}'
        infer_request.messages.append({'role': 'user', 'content': query})
        return {'infer_request': infer_request, 'rollout_infos': infos}


class DeepEyesReward(ORM):

    def __call__(self, completions, reward_model, extra_info, data_source, **kwargs) -> List[float]:
        rewards = []
        for said, truth, source, messages in zip(completions, reward_model, data_source, kwargs['messages']):
            found = re.findall(r'<answer>(.*?)</answer>', said, re.DOTALL)
            right = bool(found) and found[-1].strip() == truth['ground_truth']
            used = any('<tool_call>' in str(m['content']) for m in messages if m['role'] == 'assistant')
            rewards.append(0.8 * right + 0.2 * bool(found) + (1.2 if right and used else 0.0))
        return rewards


multi_turns['deepeyes_scheduler'] = VisualToolBoxScheduler
orms['deepeyes_reward'] = DeepEyesReward
