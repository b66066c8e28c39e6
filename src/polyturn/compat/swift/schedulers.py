"""The schedulers that ms-swift ships: math tips, thinking tips, gym and OpenEnv.

User code subclasses them, so they use ms-swift's interface and keep the attributes that subclasses read and replace
(`_envs`, `_total_rewards`, `_step_rewards`, `_pending_obs`, `_create_env`, `_close_and_remove`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import string
from copy import deepcopy
from typing import Any

from polyturn.compat.swift.base import MultiTurnScheduler
from polyturn.compat.swift.gym_env import context_managers, envs
from polyturn.compat.swift.openenv_wrapper import OpenEnvWrapper
from polyturn.compat.swift.orm import MathAccuracy
from polyturn.compat.swift.registry import PluginDict
from polyturn.compat.swift.template import without_reasoning
from polyturn.core.code_origin import defined_at
from polyturn.core.errors import SchedulerError, did_you_mean, one_line
from polyturn.core.reward import as_flag, as_score
from polyturn.serving.rollout_protocol import (
    ChatCompletionResponseChoice,
    Messages,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)

logger = logging.getLogger(__name__)


class MathTipsScheduler(MultiTurnScheduler):
    """Removes a wrong answer, once, and lets the model continue the message after a hint."""

    tips_prompt = "But wait... It seems I made a mistake,"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acc_func = kwargs.get("acc_function") or MathAccuracy()

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        """End if the hint has been given, or the answer is right."""
        text = infer_request.messages[-1]["content"]
        if self.tips_prompt in text or self.acc_func([text], [infer_request.data_dict["solution"]])[0] == 1:
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        """Cut at the answer and add the hint, whose tokens are masked."""
        text = str(response_choice.message.content)
        cut = min((at for mark in ("<answer>", "</think>") if (at := text.find(mark)) >= 0), default=len(text))
        infer_request.messages[-1]["content"] = text[:cut] + self.tips_prompt
        if not response_choice.token_ids or self.tokenizer is None:
            return {"infer_request": infer_request}
        kept = _first_ids(self.tokenizer, response_choice.token_ids, len_text=cut)
        probs = self._extract_logprobs_from_choice(response_choice)
        tip = list(self.tokenizer.encode(self.tips_prompt, add_special_tokens=False))
        return {
            "infer_request": infer_request,
            "response_token_ids": response_choice.token_ids[:kept] + tip,
            "response_loss_mask": [1] * kept + [0] * len(tip),
            "rollout_logprobs": probs[:kept],
        }


class ThinkingModelTipsScheduler(MultiTurnScheduler):
    """Answers a wrong answer with a hint from the user, once; each turn is a separate output without earlier reasoning."""

    tips_prompt = "The answer is not correct, It seems You made a mistake, you need to recheck very carefully."

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acc_func = kwargs.get("acc_function") or MathAccuracy()

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> list[RolloutOutput]:
        """Return one output per turn."""
        request = infer_request
        outputs: list[RolloutOutput] = []
        assert self.infer_engine is not None
        async with self._trajectory(request):
            while True:
                history = _without_reasoning(request.messages)
                own_request = RolloutInferRequest(**{**vars(request), "messages": history})
                response = await self.infer_engine.infer_async(own_request, request_config, **kwargs)
                choice = response.choices[0]
                message = {"role": "assistant", "content": choice.message.content}
                request.messages.append(message)
                turn = len(outputs) + 1
                outputs.append(
                    RolloutOutput(
                        response=response,
                        messages=[*history, message],
                        response_token_ids=choice.token_ids or [],
                        rollout_infos={"num_turns": turn},
                    )
                )
                if await self._ask(self.check_finished, request, choice, turn):
                    return outputs
                request = (await self._ask(self.step, request, choice, turn))["infer_request"]

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        """End if the hint has been given, or the answer is right."""
        if self.tips_prompt in infer_request.messages[-2]["content"]:
            return True
        if self.acc_func([str(response_choice.message.content)], [infer_request.data_dict["solution"]])[0] == 1:
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        """Give the hint."""
        infer_request.messages.append({"role": "user", "content": self.tips_prompt})
        return {"infer_request": infer_request}


class GYMScheduler(MultiTurnScheduler):
    """Runs trajectories in the environment of the row's `env_config`; every turn is an action."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gym_env_name: str | None = kwargs.get("gym_env")
        self.context_manager_name: str | None = kwargs.get("context_manager")
        self._envs: dict[str | None, Any] = {}
        self._total_rewards: dict[str | None, float] = {}
        self._step_rewards: dict[str | None, list[float]] = {}
        self._pending_obs: dict[str | None, str | None] = {}

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        name = env_config.get("name", self.gym_env_name)
        if name is None or name not in envs:
            raise ValueError(
                f"Environment '{name}' not found. Available: {list(envs)}.{did_you_mean(str(name), envs) if name else ''}"
            )
        return envs[name](env_config)

    async def _close_and_remove(self, uuid: str | None) -> None:
        """Close an environment if it is open, and delete its state.

        An error of its `close` is only logged: the trajectory has ended, and its reward counts.
        """
        env = self._envs.pop(uuid, None)
        for state in (self._total_rewards, self._step_rewards, self._pending_obs):
            state.pop(uuid, None)
        if env is not None:
            try:
                await self._plain_or_async(env.close)
            except Exception as problem:
                logger.warning("%s.close raised in trajectory %s: %s", type(env).__name__, uuid, one_line(problem))

    async def _plain_or_async(self, method: Any, *args: Any) -> Any:
        """Call a method of an environment; a sync one runs without blocking other trajectories."""
        answer = method(*args) if inspect.iscoroutinefunction(method) else await self._ask(method, *args)
        return await answer if inspect.isawaitable(answer) else answer

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> Any:
        """Reset an environment for each request; its observation becomes the prompt."""

        async def start(request: RolloutInferRequest) -> None:
            if request.uuid in self._envs:
                await self._close_and_remove(request.uuid)
            env = self._envs[request.uuid] = self._create_env(dict(request.data_dict.get("env_config") or {}))
            answer = await self._plain_or_async(env.reset, request)
            if not (
                isinstance(answer, tuple | list)
                and len(answer) == 3
                and isinstance(answer[0], str | list)
                and isinstance(answer[2], str | None)
            ):
                raise _bad_answer(env, "reset", answer, request.uuid, "(observation, info, system_message), with texts")
            self._begin(request, answer[0], answer[2])

        await asyncio.gather(*map(start, requests))

    def _begin(self, request: RolloutInferRequest, observation: Any, system: str | None) -> None:
        request.messages = [
            *([{"role": "system", "content": system}] if system else []),
            {"role": "user", "content": observation},
        ]
        self._total_rewards[request.uuid] = 0.0
        self._step_rewards[request.uuid] = []
        self._pending_obs[request.uuid] = None

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        """Pass the reply to the environment as an action, and return the reward."""
        env = self._envs.get(infer_request.uuid)
        if env is None:
            return {"done": True, "rollout_infos": {}}
        answer = await self._plain_or_async(env.step, deepcopy(infer_request.messages))
        if not isinstance(answer, tuple | list) or len(answer) != 4:
            raise _bad_answer(env, "step", answer, infer_request.uuid, "(next_observation, reward, done, info)")
        observation, reward, done = answer[0], as_score(answer[1]), as_flag(answer[2])
        if reward is None or done is None:
            raise _bad_answer(
                env, "step", answer, infer_request.uuid, "a finite number as reward, and done as True or False"
            )
        if not done and not isinstance(observation, str | list):
            raise _bad_answer(env, "step", answer, infer_request.uuid, "an observation that is a text, unless done")
        return await self._scored(infer_request.uuid, observation, reward, done)

    async def _scored(self, uuid: str | None, observation: str | None, reward: float, done: bool) -> dict[str, Any]:
        self._total_rewards[uuid] = self._total_rewards.get(uuid, 0.0) + reward
        self._step_rewards.setdefault(uuid, []).append(reward)
        self._pending_obs[uuid] = None if done else observation
        infos = {
            "total_reward": self._total_rewards[uuid],
            "step_rewards": list(self._step_rewards[uuid]),
            "gym_done": done,
        }
        if done:
            await self._close_and_remove(uuid)
        return {"done": done, "rollout_infos": infos}

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        """Show the environment's observation."""
        observation = self._pending_obs.get(infer_request.uuid)
        if observation is not None:
            infer_request.messages.append({"role": "user", "content": observation})
        named = infer_request.data_dict.get("ctx_config") or {}
        name = named.get("name", self.context_manager_name)
        if name is not None:
            manager = context_managers.find(name)(named)
            infer_request.messages = manager.manage_context(infer_request.messages, str(infer_request.uuid))
        return {"infer_request": infer_request}

    async def on_trajectory_end(self, requests: list[RolloutInferRequest], error: BaseException | None = None) -> Any:
        """Close environments that are still open."""
        for request in requests:
            await self._close_and_remove(request.uuid)


class OpenEnvScheduler(GYMScheduler):
    """Runs trajectories in environments of an OpenEnv server; every turn is an action."""

    max_concurrent_envs = 4
    """Largest number of environments that a call of `on_trajectory_start` opens concurrently."""
    env_config_defaults: dict[str, Any] = {}  # noqa: RUF012  (subclasses replace it)
    """Defaults of a row's `env_config`."""

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        return OpenEnvWrapper(env_config)

    def parse_action(self, text: str) -> Any:
        """Return the action in a reply: a JSON object, else {"message": the reply}."""
        body = _unfenced(text)
        try:
            arguments = json.loads(body)
        except ValueError:
            arguments = None
        return arguments if isinstance(arguments, dict) else {"message": body if arguments is None else str(arguments)}

    def format_observation(self, observation: Any) -> str:
        """Return an observation as text for the model: JSON, even if it is a text."""
        try:
            return json.dumps(observation, ensure_ascii=False, default=str)
        except (TypeError, ValueError):
            return str(observation)

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> Any:
        """Open and reset an environment for each request."""
        slots = asyncio.Semaphore(self.max_concurrent_envs)

        async def start(request: RolloutInferRequest) -> None:
            async with slots:
                if request.uuid in self._envs:
                    await self._close_and_remove(request.uuid)
                config = {**self.env_config_defaults, **(request.data_dict.get("env_config") or {})}
                env = self._envs[request.uuid] = self._create_env(config)
                observation, _ = await self._plain_or_async(env.reset)
                self._begin(request, self.format_observation(observation), config.get("system_message"))

        await asyncio.gather(*map(start, requests))

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> Any:
        """Pass the reply to the environment as an action, and return the reward."""
        env = self._envs.get(infer_request.uuid)
        if env is None:
            return {"done": True, "rollout_infos": {}}
        action = self.parse_action(str(response_choice.message.content))
        observation, reward, done, _ = await self._plain_or_async(env.step, action)
        observed = None if done else self.format_observation(observation)
        return await self._scored(infer_request.uuid, observed, float(reward or 0.0), bool(done))


def _bad_answer(env: Any, method: str, answer: Any, uuid: str | None, advice: str) -> SchedulerError:
    at = defined_at(getattr(env, method))
    return SchedulerError(
        f"{type(env).__name__}.{method} returned {answer!r:.100} in trajectory {uuid!r}; return {advice}{at}"
    )


def _first_ids(tokenizer: Any, ids: list[int], *, len_text: int) -> int:
    """Return the smallest number of ids whose text has at least `len_text` characters."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(tokenizer.decode(ids[:middle], skip_special_tokens=False)) >= len_text:
            high = middle
        else:
            low = middle + 1
    return low


def _without_reasoning(messages: Messages) -> Messages:
    """Return a history without the reasoning of earlier replies."""
    return [{**m, "content": without_reasoning(m["content"])} if m["role"] == "assistant" else dict(m) for m in messages]


multi_turns = PluginDict(
    "multi_turns",
    {
        "math_tip_trick": MathTipsScheduler,
        "math_tip_trick_multi_turn": MathTipsScheduler,
        "thinking_tips_scheduler": ThinkingModelTipsScheduler,
        "gym_scheduler": GYMScheduler,
        "openenv_scheduler": OpenEnvScheduler,
    },
)
"""Name -> scheduler class; plug-ins add their own."""


def _unfenced(text: str) -> str:
    """Return the text between two fences, without surrounding blank lines; a text without fences is unchanged."""
    fenced = text.strip()
    inner = fenced[3:-3].lstrip(string.ascii_letters)
    first = len(inner) - len(inner.lstrip())
    begin = inner.rfind("\n", 0, first) + 1
    is_fenced = len(fenced) >= 6 and fenced.startswith("```") and fenced.endswith("```") and begin > 0
    return inner[begin:].rstrip() if is_fenced else text
