"""Converters for verl's training backend with its parallel sizes, the optimizer and the learning rate.

The keys have two forms: FSDP's and Megatron's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyturn.config.translate.source import Source

ACTOR = "actor_rollout_ref.actor"
STRATEGY = f"{ACTOR}.strategy"
ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"


def backend(s: Source) -> None:
    """Set the training backend, its parallel sizes, and the smallest number of ranks for them."""
    is_megatron = s.get(STRATEGY) == "megatron"
    if is_megatron:
        s.put("train.backend", "megatron", by=STRATEGY)
    ranks = 1
    for kind in ("tensor", "pipeline", "expert", "context"):
        key = f"{ACTOR}.megatron.{kind}{'' if kind == 'context' else '_model'}_parallel_size"
        size = s.whole(key, 1, least=1)
        if size != 1 and not is_megatron:
            s.refuse(key, "it needs actor_rollout_ref.actor.strategy megatron; set that, or remove the key")
        elif size != 1:
            s.put(f"train.distributed.{kind}_parallel", size, by=key)
            ranks *= 1 if kind == "expert" else size
            s.put("train.distributed.ranks", ranks, by=key)
    if (size := s.whole(ULYSSES, 1, least=1)) == 1:
        return
    if is_megatron:
        s.notes[ULYSSES] = (
            "it is a key of FSDP; under Megatron, actor.megatron.context_parallel_size splits the tokens of a sequence"
        )
    else:
        s.put("train.distributed.context_parallel", size, by=ULYSSES)
        s.put("train.distributed.ranks", size, by=ULYSSES)


def megatron_schedule(s: Source) -> None:
    """Set the decay of the learning rate from Megatron's keys: its final value and the step at which it is reached."""
    style, low, last = (f"{ACTOR}.optim.{name}" for name in ("lr_decay_style", "min_lr", "lr_decay_steps"))
    twins = [key for name in ("lr_scheduler_type", "warmup_style") if (key := f"{ACTOR}.optim.{name}") in s.written]
    if s.get(STRATEGY) != "megatron" or (twins and style in s.written):
        for key in (key for key in (style, low, last) if key in s.written):
            s.refuse(key, "it needs actor.strategy megatron; otherwise set only lr_scheduler_type and min_lr_ratio")
    elif (name := s.text(style, "constant")) != "constant":
        s.put("train.optim.schedule.name", name, by=style)
        if least := s.number(low, 0.0):
            s.put("train.optim.schedule.min_lr_ratio", least / s.number(f"{ACTOR}.optim.lr", 1e-6), by=low)
        if (end := s.get(last)) is not None:
            s.put("train.optim.schedule.total_steps", end, by=last)


def optimizer(s: Source) -> None:
    """Set the limit on the gradient's norm, which has two keys, and Adam's betas, which early releases lack."""
    keys = (f"{ACTOR}.grad_clip", f"{ACTOR}.optim.clip_grad")
    meant = next((key for key in keys if s.number(key, 1.0) != 1.0), keys[0])
    s.put("train.optim.max_grad_norm", s.number(meant, 1.0), by=meant)
    s.put("train.optim.betas", s.get(f"{ACTOR}.optim.betas", [0.9, 0.999]), by=f"{ACTOR}.optim.betas")


def warmup(s: Source) -> None:
    """Set the warm-up in steps, or as a share of the run's steps."""
    key = f"{ACTOR}.optim.lr_warmup_steps"
    steps, ratio = s.whole(key, -1, least=-1), s.number(f"{key}_ratio", 0.0)
    if steps > 0 or (steps == 0 and s.get(STRATEGY) != "megatron"):  # Megatron's trees take the ratio at 0 steps too
        s.put("train.optim.warmup_steps", steps, by=key)
    elif ratio >= 1:
        s.refuse(f"{key}_ratio", "it is a share of the run's steps, so it must be below 1")
    elif ratio:
        s.put("train.optim.warmup_steps", ratio, by=f"{key}_ratio")
