"""Converters for verl's keys whose native form depends on more than their own value.

Each function reads verl's keys from a `Source` and writes native keys to it; `keys.yaml` maps keys to functions. Each runs
once, after all keys that are moved unchanged.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from polyturn.algorithms.advantages import advantages
from polyturn.algorithms.losses import policy_losses, takes_option
from polyturn.compat.verl_config.convert_credit import critic, discount, kl_in_reward
from polyturn.compat.verl_config.convert_distill import distillation
from polyturn.compat.verl_config.convert_loss import (
    DISTILLATION,
    NO_REWARDS,
    correction,
    is_taught_by_advantages,
    kl,
    lora,
    ratio_bound,
    trains_on_rewards,
)
from polyturn.compat.verl_config.convert_optim import backend, megatron_schedule, optimizer, warmup
from polyturn.compat.verl_config.convert_reward import as_absolute, module_of, reward_function, reward_manager
from polyturn.compat.verl_config.convert_run import every, keep, run_folder, steps, trackers
from polyturn.compat.verl_config.table import is_of_verl
from polyturn.config.models import AlgorithmConfig
from polyturn.config.schema import child, meant, takes_more
from polyturn.config.translate.source import Source
from polyturn.core.errors import did_you_mean, one_line
from polyturn.core.task import NATIVE_AGENTS
from polyturn.tokens.parsers import parsers

ROLLOUT = "actor_rollout_ref.rollout"
MULTI_TURN = f"{ROLLOUT}.multi_turn"
ACTOR = "actor_rollout_ref.actor"
FUTURES = f"{MULTI_TURN}.num_repeat_rollouts"
NO_LIMIT_CHARS = 1_000_000
DUAL_CLIP = 3.0
"""verl's bound of the distillation loss for negative advantages, which has no key."""
_OWN = "name your own as file.py:function, or by the name under which a plug-in registers it"
_MEANS_OF_SEQUENCES = ("gspo", "sapo", "geo_mean")
"""Policy losses that are always averaged over sequences."""
AGENT_SCHEDULER = "polyturn.compat.verl.agent_scheduler:AgentLoopScheduler"


def model_path(s: Source) -> None:
    """Set the model and its tokenizer; a folder takes precedence over a name on the hub."""
    for key, native in (
        ("actor_rollout_ref.model.path", "model.path"),
        ("data.tokenizer", "model.tokenizer"),
        ("actor_rollout_ref.model.tokenizer_path", "model.tokenizer"),
    ):
        if value := s.text(key, ""):
            s.put_model(native, value, by=key)


def path(s: Source) -> None:
    """Set the tool and the interaction file."""
    for key, native in (
        (f"{MULTI_TURN}.tool_config_path", "rollout.tools.file"),
        (f"{MULTI_TURN}.interaction_config_path", "rollout.interactions"),
    ):
        if value := s.text(key, ""):
            s.put_path(native, str(Path(os.path.expanduser(value))), by=key)


def function_tools(s: Source) -> None:
    """Set the tools of a Python file."""
    key = f"{MULTI_TURN}.function_tool_path"
    if value := s.text(key, ""):
        s.put_path("rollout.tools.functions", [str(Path(os.path.expanduser(value)))], by=key)


def files(s: Source) -> None:
    """Set the files of tasks, or the class that reads them, and the number of tasks to use."""
    where, name = s.get("data.custom_cls.path"), s.get("data.custom_cls.name")
    if (where is None) != (name is None):
        s.refuse("data.custom_cls.path", "path and name belong together; set both")
        return
    for key, most, native in (
        ("data.train_files", "data.train_max_samples", "data.train"),
        ("data.val_files", "data.val_max_samples", "evaluation.data"),
    ):
        value, limit = s.get(key), s.whole(most, -1, least=-1)
        if not value:
            if key in s.written and value is not None:
                s.refuse(key, "the value names no file; give one, or leave the key out")
            continue
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(name, str) for name in values):
            s.refuse(key, "it must be a file, or a list of files")
            continue
        names = [str(Path(os.path.expanduser(name))) for name in values]
        if where is not None:
            kwargs = {
                "cls": as_absolute(f"{module_of(str(where))}:{name}"),
                "files": [as_absolute(n) for n in names],
                "split": "train" if native == "data.train" else "validation",
                "config": {**s.sections("data")["data"], "return_raw_chat": True},
                "model": as_absolute(s.text("data.tokenizer", s.text("actor_rollout_ref.model.path", ""))),
                "template": s.get("actor_rollout_ref.model.custom_chat_template"),
                "max_samples": limit,
            }
            s.put(f"{native}.generator", "polyturn.compat.verl.rl_dataset:custom_tasks", by="data.custom_cls.path")
            s.put(f"{native}.kwargs", kwargs, by="data.custom_cls.path")
            continue
        s.put_path(f"{native}.files", names, by=key)
        if limit > 0:
            s.put(f"{native}.limit", limit, by=most)


def sampler(s: Source) -> None:
    """Set the order of tasks."""
    where, name = s.get("data.sampler.class_path"), s.get("data.sampler.class_name")
    if (where is None) != (name is None):
        s.refuse("data.sampler.class_path", "class_path and class_name belong together; set both")
    elif where is not None:
        own = {"sampler": as_absolute(f"{module_of(str(where))}:{name}"), "config": s.sections("data")["data"]}
        s.put("data.sampler.name", "polyturn.compat.verl.sampler:SamplerOrder", by="data.sampler.class_path")
        for option, value in own.items():
            s.put(f"data.sampler.{option}", value, by="data.sampler.class_path")


def minibatches(s: Source) -> None:
    """Split a step into updates of `ppo_mini_batch_size` tasks."""
    key = f"{ACTOR}.ppo_mini_batch_size"
    tasks, size = s.whole("data.train_batch_size", 1024), s.whole(key, 256)
    if size < 1 or (size > tasks and key in s.written):
        s.refuse(key, f"it must be from 1 to data.train_batch_size, which is {tasks}")
    else:
        s.put("train.minibatches", math.ceil(tasks / size), by=key)


def max_tokens_per_batch(s: Source) -> None:
    """Set the token limit of a micro-batch, which is at least one trajectory of full length."""
    longest = _max_context(s)
    dynamic = s.switch(f"{ACTOR}.use_dynamic_bsz")
    key = f"{ACTOR}.ppo_max_token_len_per_gpu"
    s.put("train.max_tokens_per_batch", max(s.whole(key, 16384, least=1) if dynamic else 4096, longest), by=key)


def clip(s: Source) -> None:
    """Set the bounds of the ratio: the actor's, or those of the distillation loss if it is the whole loss.

    A user's own loss gets only the written bounds, because it may not use them; verl's losses have defaults.
    """
    section, name = ACTOR, s.text(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    if not trains_on_rewards(s):
        if not is_taught_by_advantages(s):
            return
        section, name = DISTILLATION, "vanilla"
    is_ours = name == "vanilla" or not takes_more(meant(child(AlgorithmConfig, "loss"), {"name": name}))
    for side in ("low", "high"):
        key, value = ratio_bound(s, section, side)
        if is_ours or key in s.written:
            s.put(f"algorithm.loss.clip_{side}", value, by=key)
    last = f"{section}.clip_ratio_c"
    if (dual := s.get(last, DUAL_CLIP if section == DISTILLATION else None)) is not None and (is_ours or last in s.written):
        s.put(f"algorithm.loss.{'cap' if name in ('dppo_tv', 'dppo_kl') else 'dual_clip'}", dual, by=last)


def temperature(s: Source) -> None:
    """Set the sampling of completions."""
    key = f"{ROLLOUT}.temperature"
    samples = s.switch(f"{ROLLOUT}.do_sample", default=True)
    s.put("rollout.sampling.temperature", s.number(key, 1.0) if samples else 0.0, by=key)


def top_k(s: Source) -> None:
    """Set the number of candidates; all forms of "no limit" become -1."""
    value = s.whole(f"{ROLLOUT}.top_k", -1, least=-1)
    s.put("rollout.sampling.top_k", value if value > 0 else -1, by=f"{ROLLOUT}.top_k")


def validation(s: Source) -> None:
    """Set verl's evaluation. A written temperature applies even if `do_sample` is not written, as in verl's agent loops."""
    at = f"{ROLLOUT}.val_kwargs"
    k, samples = s.whole(f"{at}.top_k", -1, least=-1), s.switch(f"{at}.do_sample")
    samples |= f"{at}.temperature" in s.written and f"{at}.do_sample" not in s.written
    temperature = s.number(f"{at}.temperature", 0) if samples else 0
    if samples and not temperature:
        s.notes[f"{at}.do_sample"] = "the temperature is 0, so the most likely token is taken anyway"
    sampling = {
        "temperature": temperature,
        "top_p": s.number(f"{at}.top_p", 1.0),
        "top_k": k if k > 0 else -1,
    }
    s.put("evaluation.sets", {"validation": {"sampling": sampling, "samples": s.whole(f"{at}.n", 1, least=1)}}, by=at)
    s.put("compat.validation_metrics", True, by=at)


def limits(s: Source) -> None:
    """Set the lengths: `response_length` bounds all turns of a trajectory together."""
    s.put("rollout.limits.max_prompt_tokens", _prompt(s), by=f"{ROLLOUT}.prompt_length")
    s.put("rollout.limits.max_tokens", _response(s) * _num_conversations(s), by=f"{ROLLOUT}.response_length")
    s.put("rollout.limits.max_tokens_per_turn", _response(s), by=f"{ROLLOUT}.response_length")
    s.put("rollout.limits.max_context", _max_context(s), by=f"{ROLLOUT}.max_model_len")
    for key, length in (("data.max_prompt_length", _prompt(s)), ("data.max_response_length", _response(s))):
        if s.values.get(key) == length:
            s.read.add(key)


def turns(s: Source) -> None:
    """Set the limit on a tool's answer if written, and the limit on turns if there are tools or interactions."""
    length = f"{MULTI_TURN}.max_tool_response_length"
    s.put("rollout.tools.max_result_chars", s.get(length, NO_LIMIT_CHARS), by=length)
    partners = _partners(s)
    key = f"{MULTI_TURN}.enable"
    if not s.switch(key):
        if partners and key in s.written:
            s.refuse(key, f"{partners[0]} is set; set enable to True, or remove that key with ~")
        if not partners and s.get(f"{ROLLOUT}.agent.agent_loop_config_path") is None:
            s.put("rollout.limits.max_turns", 1, by=key)
            return
    third = max(1, _max_context(s) // 3)
    for who, native in (("assistant", "max_turns"), ("user", "max_user_turns")):
        cap = f"{MULTI_TURN}.max_{who}_turns"
        s.put(f"rollout.limits.{native}", s.whole(cap, third, least=1) * _num_conversations(s), by=cap)


def _partners(s: Source) -> list[str]:
    """Return the keys that name tools or interactions."""
    names = ("tool_config_path", "function_tool_path", "interaction_config_path")
    return [key for key in (f"{MULTI_TURN}.{name}" for name in names) if s.get(key)]


def futures(s: Source) -> None:
    """Let a user's own agent loop fork conversations; `limits` and `turns` multiply the episode's limits accordingly."""
    if s.get(FUTURES) and s.get(f"{ROLLOUT}.agent.agent_loop_config_path") is None:
        s.refuse(
            FUTURES,
            "it needs an agent loop of your own that forks conversations after the first turn, and agent_loop_config_path "
            "is not set; the scheduler in examples/schedulers/lookahead.py forks after every turn, and needs a judge",
        )


def agent_loop(s: Source) -> None:
    """Set the agent loops of the file, from which rows choose, and the default loop."""
    key, file_key = f"{ROLLOUT}.agent.default_agent_loop", f"{ROLLOUT}.agent.agent_loop_config_path"
    name, file = s.get(key, "single_turn_agent"), s.get(file_key)
    loops: dict[str, Any] = {}
    if name == NATIVE_AGENTS[0] and key in s.written and (partners := _partners(s)):
        s.notes[key] = (
            f"{partners[0]} is set, so rows without an agent_name have many turns; write agent_name={name} into rows that "
            "have one turn"
        )
    if file is not None:
        try:
            items = OmegaConf.to_container(OmegaConf.load(Path(os.path.expanduser(file))), resolve=True)
            loops = {item.pop("name"): {**item, "_target_": item["_target_"]} for item in items}  # type: ignore[index, misc, union-attr, call-overload, dict-item]
        except (OSError, ValueError, TypeError, KeyError, OmegaConfBaseException) as problem:
            s.refuse(file_key, f"it must be a list of {{name, _target_}} ({one_line(problem)})")
            return
    if name not in NATIVE_AGENTS and name not in loops:
        s.refuse(key, f"agent_loop_config_path has no such loop.{did_you_mean(name, [*loops, *NATIVE_AGENTS])}")
    elif loops:
        s.put("rollout.scheduler", AGENT_SCHEDULER, by=file_key)
        own = {"loops": loops, "default": name, "config": s.sections("actor_rollout_ref", "algorithm", "data", "trainer")}
        s.put("rollout.scheduler_kwargs", own, by=file_key)


def engine(s: Source) -> None:
    """Set the named engine if it is installed, else the embedded one with a note."""
    key = "actor_rollout_ref.rollout.name"
    name = s.text(key, "embedded")
    kinds = {"sglang": "sglang", "sglang_async": "sglang", "vllm": "vllm", "hf": "embedded"}
    if name not in kinds:
        what = "there is no TensorRT-LLM engine; use sglang or vllm" if name == "trtllm" else "there is no such engine."
        s.refuse(key, what if name == "trtllm" else what + did_you_mean(name, kinds))
        return
    kind = kinds[name]
    if kind != "embedded" and importlib.util.find_spec(kind) is None:
        s.notes[key] = (
            f"{kind} is not installed in polyturn's environment, so the embedded engine samples; "
            f"+polyturn.engine.kind={kind} with +polyturn.engine.launch.python=… starts {kind} from another environment"
        )
        kind = "embedded"
    s.put("engine.kind", kind, by=key)


def sanity_mode(s: Source) -> None:
    """Set the mode of the sanity check, and check every episode, as verl does."""
    key = f"{MULTI_TURN}.tokenization_sanity_check_mode"
    s.put("rollout.tokenization_sanity_check_mode", s.get(key, "strict"), by=key)
    s.put("rollout.sanity_every", 1, by=key)


def parser(s: Source) -> None:
    """Set the parser of tool calls."""
    key = f"{MULTI_TURN}.format"
    names = {"chatml": "auto", "kimi": "kimi_k2", "minimax": "minimax-m2"}
    name = s.text(key, "auto")
    native = names.get(name, name)
    known = [*parsers, "auto"]
    if native in known:
        s.put("rollout.parser", native, by=key)
    else:
        s.refuse(key, f"there is no parser of that name.{did_you_mean(name, [*known, *names])}")


def advantage(s: Source) -> None:
    """Set the estimator by name."""
    key = "algorithm.adv_estimator"
    names = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
    name = s.text(key, "grpo")
    native = names.get(name, name)
    if native in advantages or ":" in native:
        _put_function(s, "algorithm.advantage.name", native, by=key)
    else:
        s.refuse(key, f"there is no such estimator; {_OWN}.{did_you_mean(name, advantages)}")
    if not s.get("algorithm.filter_groups.enable"):
        s.put("algorithm.drop_zero_variance", False, by="algorithm.filter_groups.enable")


def policy_loss(s: Source) -> None:
    """Set the policy loss by name; the section's other keys are its options."""
    key = f"{ACTOR}.policy_loss.loss_mode"
    name = s.text(key, "vanilla")
    if not trains_on_rewards(s):
        if name != "vanilla":
            s.notes[key] = NO_REWARDS
        return
    if name == "vanilla":
        section = key.removesuffix("loss_mode")
        for option in sorted(k for k in s.written if k.startswith(section) and not is_of_verl(k)):
            s.refuse(option, "the loss vanilla has no such option; remove it, or set loss_mode to the loss that has it")
        return
    if name not in policy_losses and ":" not in name:
        known = sorted({"vanilla", *policy_losses})
        s.refuse(key, f"there is no such policy loss; {_OWN}.{did_you_mean(name, known)}")
        return
    _put_function(s, "algorithm.loss.name", name, by=key)
    if name in _MEANS_OF_SEQUENCES:
        s.put("algorithm.aggregate", "seq-mean-token-mean", by=key)
    section = key.removesuffix("loss_mode")
    of_section = {k.removeprefix(section): v for k, v in s.values.items() if k.startswith(section)}
    own = {k: v for k, v in of_section.items() if k not in ("loss_mode", "_target_")}
    if name in policy_losses:  # the section holds the options of every loss
        own |= {k: v for k in ("tau_pos", "tau_neg") if (v := s.get(f"{ACTOR}.{k}")) is not None}
        own = {k: v for k, v in own.items() if takes_option(policy_losses.resolve(name), k)}
    for option, value in own.items():
        s.put(f"algorithm.loss.{option}", value, by=key)


def _put_function(s: Source, native_key: str, name: str, *, by: str) -> None:
    """Set a native key to a registered name, or to a function in a file."""
    if name.partition(":")[0].endswith(".py"):
        s.put_path(native_key, name, by=by)
    else:
        s.put(native_key, name, by=by)


def _num_conversations(s: Source) -> int:
    """Return the number of conversations in an episode: one, plus the conversations that an agent loop forks."""
    return 1 + s.whole(FUTURES, 0, least=0)


def _prompt(s: Source) -> int:
    return s.whole(f"{ROLLOUT}.prompt_length", 512, least=1)


def _response(s: Source) -> int:
    return s.whole(f"{ROLLOUT}.response_length", 512, least=1)


def _max_context(s: Source) -> int:
    both = _prompt(s) + _response(s)
    return min(s.whole(f"{ROLLOUT}.max_model_len", both, least=1), both)


CONVERTERS: Mapping[str, Callable[[Source], None]] = {
    f.__name__: f
    for f in (
        model_path, path, function_tools, files, sampler, minibatches, max_tokens_per_batch, clip, kl, optimizer, warmup,
        temperature, agent_loop, engine, top_k, validation, limits, turns, futures, sanity_mode, parser,
        advantage, discount, critic, kl_in_reward, trackers, megatron_schedule,
        policy_loss, distillation, lora, correction, reward_function, reward_manager, steps, backend, run_folder, every,
        keep,
    )
}  # fmt: skip
