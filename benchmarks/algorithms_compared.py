"""Compares variants of the algorithm with GRPO with PPO's clip, on a guessing game and with the same seeds.

    python benchmarks/algorithms_compared.py --out runs/compared
    python benchmarks/algorithms_compared.py --out runs/compared --only grpo vespo --seeds 0 1 2

The game is that of `examples/one_file_grpo.py`: the user thinks of a number from 1 to 5 and says "higher" or "lower". The
model has three guesses, and half of the demonstrations ignore the answers. All runs start from the same warm start and take
60 steps of 80 episodes (2 groups of 8 per number), with two updates each. There are two figures: the share of 400 games won
afterwards, and the mean reward of all training episodes, which also shows how fast a run learns. A variant helps or hurts if
the mean of its differences from GRPO, seed by seed, is further from 0 than Student's t allows at 95 %. The teacher is GRPO
after 180 steps with another seed.

Each run adds a line to OUT/runs.jsonl and is not repeated; a call reports all of them as one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import logging
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from transformers import PreTrainedModel

import polyturn
from polyturn.algorithms.advantages import advantages, bind_estimator, members_needed, traits_of
from polyturn.algorithms.losses import policy_losses
from polyturn.config.models import AlgorithmConfig
from polyturn.config.parts import arguments_of
from polyturn.core.seeds import derive_seed
from polyturn.training.loss_terms import LossSettings
from polyturn.training.options import TrainOptions
from polyturn.training.self_distill import SelfDistillation
from polyturn.training.update import Update, UpdateSettings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from one_file_grpo import ARCHITECTURE, MAX_TURNS, NUMBERS, GuessingGame, demonstration, task

TEACHER = "the teacher"
FAMILIES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "high_entropy": {"high_entropy_share": 0.2},
    "observation": {"observation_coef": 0.1},
    "self_distill": {"self_distill": {"privileged": "secret", "template": "right {privileged}", "coef": 0.3}},
    "teacher": {"loss": {"name": "ppo_clip", "distill": {"teacher": TEACHER, "coef": 0.1}}},
    "dppo_tv": {"loss": "dppo_tv"},
    "dppo_kl": {"loss": "dppo_kl"},
    "vespo": {"loss": "vespo"},
    "luspo": {"loss": "luspo", "aggregate": "seq-mean-token-sum"},
    "dro": {"loss": "dro"},
    "maxrl": {"advantage": "maxrl"},
    "rae": {"advantage": "rae"},
    "kl_importance": {"kl": {"coef": 0.01, "importance": True}},
    "entropy_target": {"entropy_target": 1.0, "entropy_step": 0.005},
}
"""Family -> its `algorithm` section."""
GROUPS_OF_NUMBER, GROUP_SIZE, STEPS, TEACHER_STEPS, GAMES = 2, 8, 60, 180, 400
GROUPS = GROUPS_OF_NUMBER * len(NUMBERS)
STUDENT_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Degrees of freedom -> the quantile for an interval of 95 %."""


def secret(trajectory: polyturn.Trajectory, group: polyturn.TrajectoryGroup) -> str:
    """Return the user's number, which the policy does not see."""
    return group.task.id.removeprefix("number-")


class Table:
    """The parts that all runs share: the tokenizer, the warm start and the teacher."""

    def __init__(self) -> None:
        """Train the warm start."""
        self.codec = polyturn.Codec(polyturn.train_tokenizer(["Guess.", "higher", "lower", "right"], vocab_size=300))
        torch.manual_seed(0)
        rng = random.Random(0)
        self.start: PreTrainedModel = polyturn.build_model({**ARCHITECTURE, "vocab_size": self.codec.vocab_size}, seed=0)
        encoder = self.context(self.start).encoder_for(task(1))
        games = [polyturn.encode_conversation(demonstration(rng), encoder, id=str(i)) for i in range(32 * 120)]
        policy = polyturn.local_policy(self.start, optim=polyturn.OptimSettings(lr=3e-3, warmup_steps=5))
        polyturn.run_sft(policy, games, polyturn.SftOptions(steps=120, batch_size=32), seed=0)
        self.teacher: PreTrainedModel | None = None

    def context(self, model: PreTrainedModel) -> polyturn.RolloutContext:
        """Return the context for episodes of `model`."""
        return polyturn.RolloutContext(
            engine=polyturn.EmbeddedEngine(model, num_slots=GROUPS * GROUP_SIZE, max_context=128),
            codec=self.codec,
            parser=polyturn.PlainParser(),
            tools=polyturn.Toolbox([]),
            interactions={"game": GuessingGame({"name": "game"})},
            rewarder=polyturn.RewardRouter(),
            scheduler=polyturn.MultiTurnScheduler(),
            limits=polyturn.Limits(max_turns=MAX_TURNS, max_tokens_per_turn=4),
        )

    def update(self, model: PreTrainedModel, section: dict[str, Any]) -> Update:
        """Return the update of `model` for an `algorithm` section."""
        algorithm: Any = TypeAdapter(AlgorithmConfig).validate_python(section)
        loss = LossSettings(
            policy_loss=policy_losses.resolve(algorithm.loss.name),
            policy_loss_kwargs=arguments_of(algorithm.loss, but=("correction", "distill")),
            distill=algorithm.loss.distill,
            algorithm=algorithm,
        )
        policy = polyturn.local_policy(
            model,
            optim=polyturn.OptimSettings(lr=1e-3, warmup_steps=3),
            loss=loss,
            reference=algorithm.has_kl,
            teacher=self.teacher if algorithm.loss.distill else None,
        )
        name = algorithm.advantage.name
        estimator = bind_estimator(advantages.resolve(name), offered={}, kwargs=arguments_of(algorithm.advantage))
        teaches = algorithm.loss.distill is not None or algorithm.learns_without_rewards
        encoder = self.context(model).encoder_for(task(1))
        own = None
        if algorithm.self_distill is not None:
            own = SelfDistillation(
                algorithm.self_distill,
                privileged=secret,
                encode=lambda one: encoder.start(one.prompt),
                max_positions=128,
            )
        return Update(
            policy,
            estimator=estimator,
            settings=UpdateSettings(
                train=TrainOptions(steps=STEPS, groups_per_step=GROUPS, group_size=GROUP_SIZE, minibatches=2),
                algorithm=algorithm,
                min_members=members_needed(estimator, group_size=GROUP_SIZE),
                drop_small_groups=not teaches,
                drop_zero_variance=traits_of(estimator).only_compares and not teaches,
            ),
            entropy=policy.entropy if algorithm.entropy_target is not None else None,
            teacher=own,
        )


async def play(context: polyturn.RolloutContext, *, of_number: int, name: str, seed: int) -> list[polyturn.TrajectoryGroup]:
    """Return `of_number` groups of games for each number."""
    specs = [
        polyturn.GroupSpec(id=f"{name}-{n}-{i}", task=task(n), size=GROUP_SIZE, seed=derive_seed(seed, name, i))
        for n in NUMBERS
        for i in range(of_number)
    ]
    return await polyturn.RolloutPool(context).run(specs)


def rewards(groups: Sequence[polyturn.TrajectoryGroup]) -> list[float]:
    """Return the reward of each episode."""
    return [t.reward.total for g in groups for t in g.trajectories if t.reward is not None]


async def train(
    table: Table, section: dict[str, Any], *, seed: int, steps: int = STEPS
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Train from the warm start; return the model and the figures of the run."""
    began = time.process_time()
    torch.manual_seed(seed)
    model = copy.deepcopy(table.start)
    context, update, earned = table.context(model), table.update(model, section), list[float]()
    for step in range(steps):
        groups = await play(context, of_number=GROUPS_OF_NUMBER, name=f"g{step}", seed=seed)
        earned += rewards(groups)
        update.run(groups, step=step)
        await context.engine.update_weights(step + 1)
    won = rewards(await play(context, of_number=GAMES // (GROUP_SIZE * len(NUMBERS)), name="final", seed=seed))
    await context.engine.close()
    return model, {
        "success": statistics.fmean(won),
        "reward": statistics.fmean(earned) if earned else math.nan,
        "cpu_s": round(time.process_time() - began, 1),
    }


def compare(runs: Sequence[dict[str, Any]], figure: str) -> dict[str, Any]:
    """Return, per family, the mean and spread of a figure and of its differences from GRPO with the same seeds."""
    values: dict[str, dict[int, float]] = {}
    for row in runs:
        values.setdefault(row["family"], {})[row["seed"]] = row[figure]
    base, report = values.get("grpo", {}), {}
    for family, of_seed in values.items():
        own = list(of_seed.values())
        report[family] = {"n": len(own), "mean": round(statistics.fmean(own), 3)}
        if len(own) > 1:
            report[family]["std"] = round(statistics.stdev(own), 3)
        paired = [of_seed[seed] - base[seed] for seed in of_seed if seed in base]
        if family == "grpo" or len(paired) < 2:
            continue
        mean = statistics.fmean(paired)
        reach = STUDENT_95[len(paired) - 1] * statistics.stdev(paired) / math.sqrt(len(paired))
        verdict = "helps" if mean > reach else "hurts" if mean < -reach else "no difference shown"
        report[family] |= {"difference": round(mean, 3), "interval_95": round(reach, 3), "verdict": verdict}
    return report


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Do the missing runs and return the comparison."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines = arguments.out / "runs.jsonl"
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.is_file() else []
    table = Table()
    if "teacher" in arguments.only:
        table.teacher = (await train(table, {}, seed=200, steps=TEACHER_STEPS))[0]
    for seed in arguments.seeds:  # seed by seed, so that an interrupted run compares all families
        for family in arguments.only:
            if any(row["family"] == family and row["seed"] == seed for row in rows):
                continue
            _, figures = await train(table, FAMILIES[family], seed=seed)
            rows.append({"family": family, "seed": seed, **figures})
            with lines.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    return {figure: compare(rows, figure) for figure in ("success", "reward")} | {"runs": len(rows)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(json.dumps({"benchmark": "algorithms_compared", "steps": STEPS, **asyncio.run(run(parser.parse_args()))}))


if __name__ == "__main__":
    main()
