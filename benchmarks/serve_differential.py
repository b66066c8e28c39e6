"""Plays 200 random schedulers in process and through the server's HTTP application. Prints one JSON line.

The prompt determines the model's texts, so the server causes every difference. The exit code is 1 if any result differs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import httpx

from polyturn.serving import RolloutService
from polyturn.serving.app import create_app
from polyturn.testing.tiny_models import tiny_tokenizer
from support.models import tiny_model
from support.scripted_scheduler import ScriptedScheduler, plan_context, random_plan

NUM_PLANS = 200
KEYS = ("messages", "response_token_ids", "response_loss_mask", "rollout_logprobs", "rollout_infos", "stop_reason", "error")


async def main() -> int:
    """Return the number of schedulers with different results."""
    model, start, num_tokens, different = tiny_model(tiny_tokenizer()), time.perf_counter(), 0, []
    requests = [{"messages": [{"role": "user", "content": "What is 2+2?"}], "uuid": "u"}]
    body = {"infer_requests": requests, "request_config": {"seed": 1}}
    for seed in range(NUM_PLANS):
        plan = random_plan(seed)
        here, there = (RolloutService(plan_context(plan, scheduler=ScriptedScheduler(plan))) for _ in range(2))
        ours = await here.infer(requests, {"seed": 1})
        transport = httpx.ASGITransport(create_app(there, model=model))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            theirs = (await http.post("/infer/", json=body)).json()
        if [{k: o[k] for k in KEYS} for o in ours] != [{k: o[k] for k in KEYS} for o in theirs]:
            different.append(seed)
        num_tokens += sum(len(ids) for o in ours for ids in o["response_token_ids"])
    figures = {"plans": NUM_PLANS, "different": different, "tokens": num_tokens, "s": round(time.perf_counter() - start, 2)}
    print(json.dumps(figures))
    return len(different)


if __name__ == "__main__":
    sys.exit(min(asyncio.run(main()), 1))
