"""Find unknown keys of a configuration, with a hint for each.

    unknown_keys(RunConfig, {"train": {"step": 3}})  ->  [Unknown(path=("train", "step"), value=3, hint=" Did you …"), …]

Pydantic reports an unknown key in a union once per member and without a suggestion. This module walks the annotations to
give one sentence with the nearest key, or with the successor of a key or value of a former version.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from polyturn.config.schema import (
    KeyPath,
    child,
    distinguishing_key,
    dotted,
    is_model,
    keys_of,
    kinds_of,
    meant,
    schema_table,
    takes_more,
    unwrap,
)
from polyturn.config.well_known import suggestion
from polyturn.core.errors import did_you_mean
from polyturn.infra.plugins import offered

NUM_LISTED = 6
"""Largest number of a section's keys in a message."""
CLOSE = 0.8
"""difflib similarity from which a key of the same section is suggested before another trainer's key or another section's."""

RETIRED: Mapping[str, str] = {
    "algorithm.kl_coef": "write algorithm.kl.coef",
    "algorithm.kl_estimator": "write algorithm.kl.estimator",
    "algorithm.kl_target": "write algorithm.kl.target",
    "algorithm.kl_horizon": "write algorithm.kl.horizon",
    "algorithm.kl_in_reward": "write algorithm.kl={place: reward, coef: …}, in a list if the loss has a KL term too",
    "algorithm.clip_dual": "write algorithm.loss.dual_clip",
    "algorithm.loss_kwargs": "write its entries beside the name: algorithm.loss={name: …, tau_pos: …}",
    "algorithm.advantage_kwargs": "write its entries beside the name: algorithm.advantage={name: …, gamma: …}",
    "data.mix": "write data.sampler={name: mix, weights: {…}}",
    "data.sampler_kwargs": "write its entries beside the name: data.sampler={name: …, start: …}",
    "engine.in_process": "remove it: engine.kind=sglang starts servers, with the options of engine.launch",
    "engine.num_threads": "remove it: num_threads counts for sampling and for training",
    "engine.order": "remove it: waiting requests are served in the order of arrival",
    "engine.order_kwargs": "remove it: waiting requests are served in the order of arrival",
    "engine.process": "remove it: the embedded engine samples during training if train.max_staleness is above 0",
    "model.lora.rank_stabilized": "multiply model.lora.alpha by the square root of the rank, which has the same effect",
    "model.train_tokenizer": "write model.tokenizer={corpus: …, vocab_size: …}",
    "optim.warmup_ratio": "write warmup_steps, where a number below 1 is a share of the steps",
    "policies.*.train": "a run trains one policy; let it play several parts (model: policy), or train the other in its run",
    "reward.batch_size": "write reward.batch.size",
    "reward.batch_wait_s": "write reward.batch.wait_s",
    "reward.function.kwargs": "write its entries beside the name: reward.function={name: …, bonus: …}",
    "reward.routes.*.kwargs": "write its entries beside the name: {name: …, bonus: …}",
    "rollout.reasoning_parser": "write rollout.parser.reasoning",
    "rollout.tools.breaker.min_episodes": "remove it: the failures of all episodes count, and concurrent ones count once",
    "train.distributed.strategy": "write train.backend: torch (FSDP2 on several ranks) or megatron",
    # values
    "engine.weights=disk": "use folder, with engine.weights_folder",
    "engine.weights=group": "use nccl between GPUs, or gloo",
    "engine.weights=http": "use gloo (or nccl between GPUs), the server's own transfer",
    "engine.weights=shared_memory": "use folder",
    "reward.batch.wait_s=None": "write the number of seconds for which a call is collected, such as 1.0",
}
"""Key or key=value of a former version -> what to write now. `*` stands for a name; the key may be inside another section.
Keys whose last part is unchanged, such as `algorithm.clip_low`, are not listed: their new section is found."""


class Unknown(NamedTuple):
    """An unknown key."""

    path: KeyPath
    value: Any
    hint: str


def unknown_keys(model: type, values: Mapping[str, Any]) -> list[Unknown]:
    """Return the unknown keys of `values` at all levels of `model`, with the nearest known key."""
    everywhere = functools.cache(lambda: [row.key for row in schema_table(model)])
    return list(_unknown(model, values, (), everywhere))


def _unknown(annotation: Any, value: Any, path: KeyPath, everywhere: Callable[[], list[str]]) -> Iterator[Unknown]:
    """Yield the unknown keys below `path`."""
    of = meant(annotation, value)
    if isinstance(value, Mapping):
        known = keys_of(of) if is_model(of) else None
        for key, inner in value.items():
            if known is not None and key not in known:
                if retired := successor(dotted((*path, key))):
                    yield Unknown((*path, key), inner, f" It is no longer a key; {retired}.")
                elif not takes_more(of):
                    hint = _of_another_kind(annotation, of, str(key), value, path)
                    yield Unknown((*path, key), inner, hint or _nearest(str(key), inner, known, path, everywhere))
            else:
                yield from _unknown(child(of, key), inner, (*path, key), everywhere)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _unknown(child(of, index), inner, (*path, index), everywhere)


def _of_another_kind(annotation: Any, of: Any, key: str, value: Mapping[str, Any], path: KeyPath) -> str:
    """Return a hint with the kinds of the section that have the key, " It is for engine.kind vllm, …"; "" if none has it."""
    sections = [m for m in unwrap(annotation) if is_model(m)]
    by = distinguishing_key(sections) if len(sections) > 1 else ""
    kinds = [kind for m in sections if by and key in keys_of(m) for kind in kinds_of(m).get(by, ("your own",))]
    if not kinds:
        return ""
    now, where = value.get(by, keys_of(of)[by].default), dotted((*path, by))
    if by not in value and keys_of(of)[by].is_required:
        return f" It is for {where} {' or '.join(kinds)}; set {by}, or remove {key} (null)."
    names = offered(getattr(of, "GROUP", ""))
    if names and now not in names and (near := did_you_mean(str(now), names)).startswith(" Did"):
        return f" {where}: there is no {now!r}.{near}"
    return f" It is for {where} {' or '.join(kinds)}, and {by} is {now!r}; set {by}, or remove {key} (null)."


def _nearest(key: str, value: Any, known: Mapping[str, Any], path: KeyPath, everywhere: Callable[[], list[str]]) -> str:
    """Suggest a near key, polyturn's key for another trainer's, or the same key in another section."""
    near = f"{dotted(path)}." if path else ""
    if close := get_close_matches(key, known, n=2, cutoff=CLOSE):
        return f" Did you mean {' or '.join(repr(near + name) for name in close)}?"
    is_about_training = "train.groups_per_step" in everywhere() and path[:1] != ("evaluation",)
    if is_about_training and (ours := suggestion(key, value)):
        return f" It is another trainer's name; write {ours}."
    # Next in other sections: a correctly spelt key is more likely in the wrong section than misspelt.
    elsewhere = [k for k in everywhere() if k.rpartition(".")[2] == key] or nearest_keys(key, everywhere())
    if path[:1] == ("evaluation",):  # a key of the training would change the training
        elsewhere = [k for k in elsewhere if k.startswith("evaluation.")]
    below = [k for k in elsewhere if k.startswith(near)]  # in the same section
    if path and not below and (longer := [name for name in known if name.startswith(f"{key}_")]):
        return f" Did you mean {' or '.join(repr(near + name) for name in longer[:2])}?"
    candidates = sorted(dict.fromkeys(below or elsewhere), key=lambda k: (not k.startswith("train."), "<" in k, "[" in k))
    if candidates:
        hint = f" Did you mean {' or '.join(repr(k) for k in candidates[:2])}?"
        # If several distant sections have the name, the keys of this section are as good a hint.
        if below or not path or len(elsewhere) == 1:
            return hint
        more = ", …" if len(known) > NUM_LISTED else ""
        return f"{hint} {dotted(path)} has {', '.join(map(repr, [*known][:NUM_LISTED]))}{more}."
    hint = did_you_mean(key, known)
    return re.sub(r"'([^']+)'", rf"'{near}\1'", hint) if hint.startswith(" Did") else hint


def nearest_keys(name: str, keys: Iterable[str]) -> list[str]:
    """Return the full keys whose last part is nearest to a misspelt one; empty if none is close."""
    by_name: dict[str, list[str]] = {}
    for key in keys:
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    close = get_close_matches(name, by_name, n=2, cutoff=CLOSE)
    return [key for one in close for key in by_name[one]]


def successor(key: str) -> str:
    """Return the advice for a retired `key` or `key=value`, "" for any other."""
    return next((text for pattern, text in RETIRED.items() if fnmatchcase(f".{key}", f"*.{pattern}")), "")
