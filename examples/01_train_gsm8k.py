"""Train Qwen3-0.6B on GSM8K with a calculator, on one GPU.

`--tiny` runs on a laptop, here and in the next examples, with a small model of random weights. If all its rewards are 0, the
model learns nothing; the run only shows that the parts work together.
"""

import sys

import polyturn

GSM8K = {"dataset": "openai/gsm8k", "subset": "main", "columns": {"prompt": "question", "ground_truth": "answer"}}
BFLOAT16 = {"path": "Qwen/Qwen3-0.6B", "dtype": "bfloat16"}
VLLM = {"kind": "vllm", "launch": {"args": ["--gpu-memory-utilization", "0.4"]}}


@polyturn.tool
def calculate(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers, + - * / and brackets, for instance (3 + 4) * 12.
    """
    if set(expression) - set("0123456789.+-*/() ") or "**" in expression:
        raise polyturn.ToolError("write numbers, + - * / and brackets only")
    return str(eval(expression))


def correct(trajectory: polyturn.Trajectory) -> float:
    """Return 1 if the last reply ends in the answer as GSM8K writes it: #### 72."""
    answer = trajectory.turns[-1].message.text.rpartition("####")[2]
    truth = str(trajectory.task.ground_truth).rpartition("####")[2]
    return float(answer.strip().replace(",", "") == truth.strip().replace(",", ""))


if "--tiny" in sys.argv:
    sums = [{"prompt": f"What is {i} + {i}?", "ground_truth": f"#### {2 * i}"} for i in range(8)]
    small = {"steps": 2, "groups_per_step": 2, "max_tokens_per_turn": 48}
    options = {"model": polyturn.tiny("Qwen/Qwen3-0.6B"), "tasks": sums, **small}
else:
    options = {"model": BFLOAT16, "tasks": GSM8K, "engine": VLLM, "steps": 200}
run = polyturn.train(**options, tools=[calculate], reward=correct, max_turns=4, name="gsm8k")
print(run)
