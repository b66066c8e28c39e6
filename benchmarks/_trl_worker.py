"""TRL's side of `trl_comparison.py`, run by the interpreter of its environment. Prints one JSON line.

    python benchmarks/_trl_worker.py MODEL --groups 8 --group-size 8 --steps 6 --micro-batch 64

The settings are chosen for speed: no gradient checkpointing, no reference, nothing logged or saved, one micro-batch for the
whole step unless another size is faster, float32 as on the other side.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time

import _trl_game as game
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template


class Clock(TrainerCallback):
    """Records the seconds of every optimizer step, including generation."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self.generate_s: list[float] = []
        self.positions: list[float] = []
        self.trainer: GRPOTrainer | None = None
        self.sampled: list[float] = []
        self.calls: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self._began = time.perf_counter(), time.process_time()
        self.generate_s.append(0.0)
        self.positions.append(0.0)

    def on_step_end(self, args, state, control, **kwargs):
        self.wall_s.append(time.perf_counter() - self._began[0])
        self.cpu_s.append(time.process_time() - self._began[1])
        metrics = self.trainer._metrics["train"]
        self.sampled.append(metrics["completions/mean_length"][-1])
        self.calls.append(metrics["tools/call_frequency"][-1] if self.trainer.tools else 0.0)


def watch(trainer: GRPOTrainer, clock: Clock) -> None:
    """Make `clock` count the seconds of the trainer's generation and the positions of its passes with a gradient."""
    generate = trainer._generate

    def timed(*args, **kwargs):
        start = time.perf_counter()
        try:
            return generate(*args, **kwargs)
        finally:
            clock.generate_s[-1] += time.perf_counter() - start

    def count(module, args, kwargs):
        if torch.is_grad_enabled():
            clock.positions[-1] += kwargs["input_ids"].numel()

    trainer._generate = timed
    trainer.model.register_forward_pre_hook(count, with_kwargs=True)


def by_chance(completions, **kwargs):
    """Return a random reward for every completion."""
    return [game.reward() for _ in completions]


def main() -> None:
    """Train for a few steps and print their times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--micro-batch", type=int, default=0, help="samples in one forward and backward; 0 is all of them")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--continuous", action="store_true", help="generate with transformers' continuous batching")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    samples = args.groups * args.group_size
    micro = args.micro_batch or samples
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if game.tools():
        tokenizer.response_template = qwen3_template
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=samples // micro,
            num_generations=args.group_size,
            max_completion_length=game.max_tokens(),
            max_tool_calling_iterations=8,
            temperature=1.0,
            beta=0.0,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            max_steps=args.steps,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_transformers_continuous_batching=args.continuous,
            seed=0,
        )
        rows = [{"prompt": [{"role": "user", "content": game.prompt(i)}]} for i in range(game.NUM_TASKS)]
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            processing_class=tokenizer,
            args=config,
            train_dataset=Dataset.from_list(rows),
            reward_funcs=by_chance,
            tools=game.tools() or None,
            callbacks=[clock],
        )
        clock.trainer = trainer
        watch(trainer, clock)
        trainer.train()
    print(
        json.dumps(
            {
                "wall_s": clock.wall_s,
                "cpu_s": clock.cpu_s,
                "generate_s": clock.generate_s,
                "positions": clock.positions,
                "sampled_per_sample": clock.sampled,
                "calls_per_sample": clock.calls,
                "samples": samples,
            }
        )
    )


if __name__ == "__main__":
    main()
