"""Requests of ms-swift's trainer to /infer/: its whole request_config, stop words, and every field of a request."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Any

import pytest
import torch

from polyturn.compat.swift.adapter import SwiftScheduler
from polyturn.compat.swift.base import MultiTurnScheduler
from polyturn.core.errors import ConfigError, DataError
from polyturn.core.task import Task
from polyturn.rollout.schedulers import SingleTurn
from polyturn.serving import RolloutService
from polyturn.serving.app import create_app
from polyturn.serving.auth import ServerRules
from polyturn.serving.listen import bind, serving
from polyturn.serving.rollout_protocol import RequestConfig, RolloutInferRequest
from polyturn.testing.episodes import scripted_context

REQUEST = RolloutInferRequest(messages=[{"role": "user", "content": "What is 2+2?"}], uuid="a")
TRAINERS = RequestConfig(
    n=1, return_details=True, logprobs=True, max_tokens=64, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0,
    repetition_penalty=1.0, stop=["Observation:"],
)  # fmt: skip
"""The trainer's request_config where `stop_words` is set."""
SAID = "Action: add\nObservation: 7 surely"


class Once(MultiTurnScheduler):
    """Ends with the first turn."""

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        return True


@pytest.mark.parametrize("scheduler", [SingleTurn(), SwiftScheduler(Once)])
async def test_stop_word_of_the_request_ends_the_reply(scheduler: Any) -> None:
    service = RolloutService(scripted_context([SAID], scheduler=scheduler))
    (stopped,) = await service.infer([asdict(REQUEST)], asdict(TRAINERS))
    assert stopped["error"] is None
    assert stopped["response"]["choices"][0]["message"]["content"] == "Action: add\n"
    assert stopped["messages"][-1] == {"role": "assistant", "content": "Action: add\n"}
    assert [len(ids) for ids in stopped["response_token_ids"]] == [len(m) for m in stopped["response_loss_mask"]]
    service = RolloutService(scripted_context([SAID], scheduler=scheduler))
    (whole,) = await service.infer([asdict(REQUEST)], {**asdict(TRAINERS), "stop": None})
    assert whole["messages"][-1]["content"] == SAID
    assert len(stopped["response_token_ids"][0]) < len(whole["response_token_ids"][0])


async def test_episodes_of_a_client_that_leaves_are_cancelled() -> None:
    service = RolloutService(scripted_context([SAID], latency_s=1e6))
    bound, body = bind("127.0.0.1", 0), json.dumps({"infer_requests": [asdict(REQUEST)]}).encode()
    head = f"POST /infer/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with serving(create_app(service, model=torch.nn.Linear(1, 1)), ServerRules(), bound), asyncio.timeout(60):
        _, writer = await asyncio.open_connection(*bound.getsockname()[:2])
        writer.write(head + body)
        for num_live in (1, 0):
            while service.num_live != num_live:  # noqa: ASYNC110  the service has no event for this
                await asyncio.sleep(0.01)
            writer.close()


@pytest.mark.parametrize(
    ("field", "value"), [("objects", {"bbox": [1]}), ("chat_template_kwargs", {"enable_thinking": False}), ("add_eos", True)]
)
async def test_field_that_is_not_read_is_refused(field: str, value: Any) -> None:
    service = RolloutService(scripted_context([SAID]))
    (reply,) = await service.infer([{**asdict(REQUEST), field: value}])
    assert f"the request's {field} is" in reply["error"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("stop", v) for v in (3, "", [1], [""], {"a": 1})),
        *(("max_tokens", v) for v in (1.0, 0, "1", True)),
        *(("temperature", v) for v in (1e-45, -1, float("nan"), True)),
        *(("top_k", v) for v in (1.5, -2, 2**63)),
        *(("seed", v) for v in (1.5, True, "1")),
        *((name, "yes") for name in ("logprobs", "return_details")),
        *(("top_logprobs", v) for v in (5, -1)),
        ("stream", True),
    ],
)
async def test_sampling_that_no_engine_can_do_is_refused(name: str, value: Any) -> None:
    """Some of these would break the whole batch that they are sampled in."""
    service = RolloutService(scripted_context([SAID]))
    with pytest.raises(ConfigError, match=rf"{name}(\.0)? is"):
        await service.infer([asdict(REQUEST)], {name: value})


class Picky(SingleTurn):
    """Takes tasks with a solution, and breaks at those with a wrong one."""

    def check_task(self, task: Task) -> None:
        if task.ground_truth is None:
            raise DataError(f"task {task.id!r} has no solution")
        int(task.ground_truth)


async def test_request_that_its_scheduler_cannot_run_is_refused() -> None:
    service = RolloutService(scripted_context([SAID], scheduler=Picky()))
    rows: list[dict[str, Any]] = [{}, {"solution": "four"}, {"solution": "4"}]
    replies = await service.infer([{**asdict(REQUEST), "data_dict": row} for row in rows])
    errors = [reply["error"] for reply in replies]
    assert "task 'a' has no solution" in errors[0]
    assert "check_task raised ValueError" in errors[1]
    assert errors[2] is None
