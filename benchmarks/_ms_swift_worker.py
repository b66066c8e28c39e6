"""ms-swift's side of `trl_comparison.py --peer ms_swift`, run by its environment's interpreter. Prints one JSON line.

    GAME=even OMP_NUM_THREADS=1 python benchmarks/_ms_swift_worker.py MODEL --groups 4 --steps 5 --micro-batch 32

The settings are chosen for speed, like TRL's: no gradient checkpointing, no reference, nothing logged, saved or evaluated,
float32. Its multi-turn scheduler samples with the trained model, as ms-swift does without vLLM. Its ChatML and the tool's
texts have the same bytes as the other side's template.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path

import _trl_game as game
import torch
from swift.arguments import RLHFArguments
from swift.callbacks import callbacks_map
from swift.pipelines.train.rlhf import SwiftRLHF
from swift.rewards import ORM, orms
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns
from transformers import TrainerCallback

SYSTEM = 'Tools:\nopen_box\nCall a tool with <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.DOTALL)


class Clock(TrainerCallback):
    """Records the seconds between the ends of optimizer steps, and the samples of each."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self.sampled: list[int] = []
        self.calls: list[int] = []
        self.tokens = self.num_calls = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.last = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter(), time.process_time()
        self.wall_s.append(now[0] - self.last[0])
        self.cpu_s.append(now[1] - self.last[1])
        self.sampled.append(self.tokens)
        self.calls.append(self.num_calls)
        self.tokens = self.num_calls = 0
        self.last = now


clock = Clock()


class Boxes(MultiTurnScheduler):
    """A scheduler that opens the box of the model's call and returns its content."""

    def check_finished(self, infer_request, response_choice, current_turn):
        clock.tokens += len(response_choice.token_ids)
        ended = super().check_finished(infer_request, response_choice, current_turn)
        return ended or CALL.search(response_choice.message.content) is None

    def step(self, infer_request, response_choice, current_turn):
        clock.num_calls += 1
        call = json.loads(CALL.search(response_choice.message.content)[1])
        answer = game.open_box(**call["arguments"])
        infer_request.messages.append({"role": "user", "content": f"<tool_response>\n{answer}\n</tool_response>"})
        return {"infer_request": infer_request}


class ByChance(ORM):
    """Gives every completion a random reward."""

    def __call__(self, completions, **kwargs):
        return [game.reward() for _ in completions]


def main() -> None:
    """Train for a few steps and print their times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-6)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    multi_turns["boxes"], orms["by_chance"], callbacks_map["clock"] = Boxes, ByChance, lambda args, trainer: clock
    samples = args.groups * args.group_size
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "tasks.jsonl")
        messages = ([{"role": "system", "content": SYSTEM}, {"role": "user", "content": game.prompt(i)}] for i in range(512))
        rows.write_text("".join(json.dumps({"messages": m}) + "\n" for m in messages), encoding="utf-8")
        swift = SwiftRLHF(
            RLHFArguments(
                rlhf_type="grpo",
                model=args.model,
                model_type="qwen3",
                template="chatml",
                tuner_type="full",
                torch_dtype="float32",
                dataset=[str(rows)],
                output_dir=folder,
                multi_turn_scheduler="boxes",
                max_turns=9,
                reward_funcs=["by_chance"],
                max_length=2048,
                max_completion_length=1024,
                temperature=1.0,
                top_k=-1,
                top_p=1.0,
                beta=0.0,
                num_generations=args.group_size,
                per_device_train_batch_size=args.micro_batch,
                gradient_accumulation_steps=samples // args.micro_batch,
                learning_rate=args.lr,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                max_steps=args.steps,
                gradient_checkpointing=False,
                report_to=[],
                save_strategy="no",
                eval_strategy="no",
                logging_steps=1000,
                split_dataset_ratio=0.0,
                dataloader_num_workers=0,
                callbacks=["clock"],
                use_hf=True,
                seed=0,
            )
        )
        swift.main()
    result = {"wall_s": clock.wall_s, "cpu_s": clock.cpu_s, "samples": samples}
    result |= {
        "sampled_per_sample": [n / samples for n in clock.sampled],
        "calls_per_sample": [n / samples for n in clock.calls],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
