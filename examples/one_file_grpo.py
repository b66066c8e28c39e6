"""Multi-turn GRPO in one file: a guessing game, from random weights, in about three minutes on a laptop.

The user thinks of a number from 1 to 5; the model may guess three times, and is told "higher" or "lower". At first its
guesses are mostly random (a short supervised start taught it the format). Reinforcement learning teaches it to use the
hints: the share of won games rises from about a half to nine in ten (perfect play would win them all).

    user: Guess.   assistant: 2   user: higher   assistant: 4   user: lower   assistant: 3   -> reward 1

The whole loop is in this file: task -> episode -> trajectory -> training sample -> loss -> new weights -> again.
Run it:  python examples/one_file_grpo.py
"""

import argparse
import asyncio
import random

import torch

import polyturn

MAX_TURNS = 3
ARCHITECTURE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,
}
NUMBERS = range(1, 6)
PROMPT = (polyturn.Message(role="user", content="Guess."),)


# 1. The environment: one object serves all episodes and keeps the state of each under its id.


class GuessingGame(polyturn.BaseInteraction):
    """A user who thinks of a number and answers a guess with "higher" or "lower"."""

    def __init__(self, config: dict) -> None:
        super().__init__(config)
        self.secrets: dict[str, int] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: object) -> str:
        """Store the number of the task's row."""
        assert instance_id is not None
        self.secrets[instance_id] = int(kwargs["secret"])
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict], **kwargs: object
    ) -> tuple[bool, str, float, dict]:
        """Compare the last guess with the secret."""
        guess, secret = messages[-1]["content"].strip(), self.secrets[instance_id]
        if guess == str(secret):
            return True, "right", 1.0, {}
        if guess in map(str, NUMBERS):
            return False, "higher" if secret > int(guess) else "lower", 0.0, {}
        return True, "That is none of the numbers.", 0.0, {}

    async def finalize_interaction(self, instance_id: str = "", **kwargs: object) -> None:
        """Forget the episode."""
        del self.secrets[instance_id]


def task(secret: int) -> polyturn.Task:
    """Return the task of guessing `secret`; without a data_source, the interaction's last score is the reward."""
    ref = polyturn.InteractionRef(name="game", kwargs={"name": "game", "secret": secret})
    return polyturn.Task(id=f"number-{secret}", prompt=PROMPT, interaction=ref)


# 2. A supervised start: it teaches the format, with a player who uses the hints every other time.


def demonstration(rng: random.Random) -> polyturn.Conversation:
    """Return a game in the right format, whose player uses the hints only half of the time."""
    secret, messages, possible = rng.choice(NUMBERS), list(PROMPT), list(NUMBERS)
    for turn in range(MAX_TURNS):
        guess = rng.choice(possible if rng.random() < 0.5 else NUMBERS)
        messages.append(polyturn.Message(role="assistant", content=str(guess)))
        if guess == secret or turn == MAX_TURNS - 1:
            break
        messages.append(polyturn.Message(role="user", content="higher" if secret > guess else "lower"))
        possible = [n for n in possible if (n > guess) == (secret > guess) and n != guess]
    return polyturn.Conversation(messages=tuple(messages))


# 3. The loop.


async def main(*, sft_steps: int, steps: int, groups_per_step: int, group_size: int, seed: int) -> list[float]:
    """Train and return the success of each step: the share of games won within three guesses."""
    torch.manual_seed(seed)
    rng = random.Random(seed)

    # Create a tokenizer and a model; any causal language model of transformers would do.
    codec = polyturn.Codec(polyturn.train_tokenizer(["Guess.", "higher", "lower", "right"], vocab_size=300))
    model = polyturn.build_model({**ARCHITECTURE, "vocab_size": codec.vocab_size}, seed=seed)

    # The engine samples from the same parameters that the policy trains, so a weight sync copies nothing.
    engine = polyturn.EmbeddedEngine(model, num_slots=groups_per_step * group_size, max_context=128)
    context = polyturn.RolloutContext(
        engine=engine,
        codec=codec,
        parser=polyturn.PlainParser(),
        tools=polyturn.Toolbox([]),
        interactions={"game": GuessingGame({"name": "game"})},
        rewarder=polyturn.RewardRouter(),
        scheduler=polyturn.MultiTurnScheduler(),
        limits=polyturn.Limits(max_turns=MAX_TURNS, max_tokens_per_turn=4),
    )
    pool = polyturn.RolloutPool(context)

    # Supervised start, with the same encoding and the same loss weights.
    encoder = context.encoder_for(task(1))
    games = [polyturn.encode_conversation(demonstration(rng), encoder, id=str(i)) for i in range(32 * sft_steps)]
    sft = polyturn.local_policy(model, optim=polyturn.OptimSettings(lr=3e-3, warmup_steps=5))
    polyturn.run_sft(sft, games, polyturn.SftOptions(steps=sft_steps, batch_size=32), seed=seed)

    policy = polyturn.local_policy(model, optim=polyturn.OptimSettings(lr=5e-4, warmup_steps=5))
    history: list[float] = []
    for step in range(steps):
        # Rollout: groups of episodes of one task, all concurrently.
        # An episode depends only on the seed and the task, so each group needs another seed.
        specs = [
            polyturn.GroupSpec(
                id=f"g{step}-{i}",
                task=task(rng.choice(NUMBERS)),
                size=group_size,
                seed=rng.getrandbits(32),
            )
            for i in range(groups_per_step)
        ]
        groups = await pool.run(specs)
        trajectories = [t for g in groups for t in g.trajectories]
        history.append(sum(t.reward.total for t in trajectories if t.reward is not None) / len(trajectories))

        # Credit: compare each trajectory with the others of its group.
        kept = polyturn.filter_groups(groups).groups
        samples = [s for g in kept for s in polyturn.to_samples(g, temperature=1.0)]
        samples = polyturn.assign_advantages(kept, samples, estimator=polyturn.grpo)

        # Update: the loss uses sampled tokens only, and the next episodes use the new weights.
        if samples:
            policy.forward_backward(samples)
            policy.optim_step()
        await engine.update_weights(step + 1)
        if (step + 1) % 10 == 0 or step + 1 == steps:
            print(f"step {step + 1:3d}   games won in the last ten steps: {sum(history[-10:]) / len(history[-10:]):.2f}")
    await engine.close()
    return history


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Multi-turn GRPO on a guessing game.")
    options.add_argument("--sft-steps", type=int, default=120)
    options.add_argument("--steps", type=int, default=150)
    options.add_argument("--groups-per-step", type=int, default=32)
    options.add_argument("--group-size", type=int, default=8)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    if min(arguments.steps, arguments.groups_per_step) < 1 or arguments.group_size < 2:
        options.error("--steps and --groups-per-step are at least 1, and --group-size at least 2")
    asyncio.run(main(**vars(arguments)))
