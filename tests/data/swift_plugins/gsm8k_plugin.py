"""GSM8K rewards in ms-swift's plug-in form.

Written anew for these tests: the names, formats and imports are those of ms-swift's example, none of its code is.
"""

import re
from typing import List

from swift.rewards import ORM, orms


def last_number(text: str):
    boxed = re.findall(r'\\boxed\{([^}]*)\}', text)
    marked = re.findall(r'####\s*(-?[\d,.]+)', text)
    plain = re.findall(r'-?\d[\d,]*\.?\d*', text)
    found = (boxed or marked or plain or [None])[-1]
    return None if found is None else found.replace(',', '').replace('$', '').rstrip('.').strip()


class GSM8KAccuracy(ORM):

    def __call__(self, completions, solution, **kwargs) -> List[float]:
        rewards = []
        for said, gold in zip(completions, solution):
            answer, truth = last_number(said), last_number(gold)
            try:
                rewards.append(float(abs(float(answer) - float(truth)) < 1e-5))
            except (TypeError, ValueError):
                rewards.append(0.0)
        return rewards


class GSM8KFormat(ORM):

    def __call__(self, completions, **kwargs) -> List[float]:
        return [float(bool(re.search(r'\\boxed\{[^}]+\}', c) or re.search(r'####\s*-?[\d,.]+', c))) for c in completions]


orms['gsm8k_accuracy'] = GSM8KAccuracy
orms['gsm8k_format'] = GSM8KFormat
