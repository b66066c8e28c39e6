"""Measures the overhead of the OpenAI-compatible endpoint per request, at an open-loop rate. Prints one JSON line.

    python benchmarks/openai_overhead.py [--rate 200] [--seconds 20] [--latency-ms 20]

There are 64 sessions, each with its own episode, whose history grows by a turn and a tool result (from 1,000 to 4,000
tokens, then it restarts). Requests arrive at random times at the given rate, whether or not earlier ones were answered.
Server and client are separate processes; the engine takes a fixed time and samples nothing. The overhead is the time from
when a request was due until its whole answer was read, minus the engine's time (its sleep, as measured in the server). The
client sends bodies that were encoded beforehand, so the figure covers the server and the socket, and little of the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import time
from typing import Any

import aiohttp
import numpy as np

NUM_SESSIONS = 64
SAID = "The price of the apples is 4, so the answer is 4 times 12, which is 48. " * 3
RESULT = '{"rows": [{"item": "apples", "price": 4, "stock": 17}, {"item": "pears", "price": 6, "stock": 9}]} ' * 6
SYSTEM = "You are a careful assistant that looks things up before it answers. " * 30
MAX_TURNS = 24


def serve(latency_s: float, pipe: Any) -> None:
    """Serve 64 episodes in this process until a message ends it."""
    from polyturn.core.generation import Completion, FinishReason, GenerateRequest
    from polyturn.rollout.limits import Limits
    from polyturn.rollout.run_episode import run_episode
    from polyturn.serving.openai.scheduler import BlackBox
    from polyturn.testing.episodes import scripted_context, task, turn_ids

    async def main() -> None:
        stop, addresses = asyncio.Event(), []
        slept: list[float] = []

        async def agent(base_url: str, api_key: str) -> float:
            addresses.append((base_url, api_key))
            await stop.wait()
            return 0.0

        context = scripted_context(
            [SAID],
            scheduler=BlackBox(agent=agent, max_calls=10**9),
            limits=Limits(max_turns=None, max_tokens_per_turn=None),
            sanity_every=0,
        )
        engine: Any = context.engine
        ids = turn_ids(SAID)
        completion = Completion(token_ids=ids, logprobs=np.full(len(ids), -1.0), finish_reason=FinishReason.STOP)

        async def slowly(request: GenerateRequest) -> Completion:
            start = time.perf_counter()
            if latency_s:
                await asyncio.sleep(latency_s)
            slept.append(time.perf_counter() - start)
            return completion

        engine.generate = slowly
        running = [
            asyncio.create_task(run_episode(context, task(data_source=None), id=f"e{i}")) for i in range(NUM_SESSIONS)
        ]
        while len(addresses) < NUM_SESSIONS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        pipe.send(addresses)
        await asyncio.to_thread(pipe.recv)
        start = time.process_time()
        slept.clear()
        pipe.send("started")
        await asyncio.to_thread(pipe.recv)
        pipe.send((time.process_time() - start, slept))
        stop.set()
        trajectories = await asyncio.gather(*running)
        assert not [t.error for t in trajectories if t.turns and t.error]

    asyncio.run(main())


class Session:
    """A growing history, as the bodies of its requests."""

    def __init__(self, number: int, address: tuple[str, str]) -> None:
        self.number = number
        self.url, key = address[0] + "/chat/completions", address[1]
        self.headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self.round = 0
        self.is_busy = False
        self._begin()

    def _begin(self) -> None:
        self.round += 1
        question = {"role": "user", "content": f"Question {self.round} of {self.number}: how much is it?"}
        self.messages: list[Any] = [{"role": "system", "content": SYSTEM}, question]
        self._encode()

    def _encode(self) -> None:
        self.body = json.dumps({"model": "m", "messages": self.messages, "max_tokens": 400}).encode()

    def heard(self, message: Any) -> None:
        """Continue the history with an answer."""
        self.messages += [message, {"role": "user", "content": RESULT}]
        if len(self.messages) > 2 * MAX_TURNS:
            self._begin()
        else:
            self._encode()


async def drive(sessions: list[Session], *, rate: float, seconds: float) -> tuple[list[float], int]:
    """Return the seconds from when each request was due until its answer, and the largest number of prompt ids."""
    rng, took, most = random.Random(0), [], 0
    free: asyncio.Queue[Session] = asyncio.Queue()
    for session in sessions:
        free.put_nowait(session)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ask(session: Session, due: float) -> None:
            nonlocal most
            async with http.post(session.url, data=session.body, headers=session.headers) as reply:
                text = await reply.read()
            took.append(time.perf_counter() - due)
            answer = json.loads(text)
            most = max(most, answer["usage"]["prompt_tokens"])
            session.heard(answer["choices"][0]["message"])
            free.put_nowait(session)

        due, end, requests = time.perf_counter() + 0.1, time.perf_counter() + 0.1 + seconds, []
        while due < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            # A session answers one request at a time, so a request waits while all 64 are busy; the wait counts.
            session = await free.get()
            requests.append(asyncio.create_task(ask(session, due)))
            due += rng.expovariate(rate)
        await asyncio.gather(*requests)
    return took, most


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second, over all sessions")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--latency-ms", type=float, default=20.0, help="time that the engine takes")
    options = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(options.latency_ms / 1000, theirs), daemon=True
    )
    server.start()
    sessions = [Session(i, address) for i, address in enumerate(ours.recv())]
    asyncio.run(drive(sessions, rate=options.rate, seconds=2.0))  # warm-up
    ours.send("start")
    ours.recv()
    took, most = asyncio.run(drive(sessions, rate=options.rate, seconds=options.seconds))
    ours.send("stop")
    cpu_s, slept = ours.recv()
    server.join(10)
    # The engine's time is nearly the same for all requests, so its median is subtracted from each.
    overhead_ms = 1000 * (np.array(took) - float(np.median(slept)))
    print(
        json.dumps(
            {
                "rate_per_s": options.rate,
                "sessions": NUM_SESSIONS,
                "requests": len(took),
                "engine_ms": round(1000 * float(np.median(slept)), 2),
                "prompt_tokens_at_most": most,
                "overhead_p50_ms": round(float(np.percentile(overhead_ms, 50)), 2),
                "overhead_p90_ms": round(float(np.percentile(overhead_ms, 90)), 2),
                "overhead_p99_ms": round(float(np.percentile(overhead_ms, 99)), 2),
                "server_cpu_ms_per_request": round(1000 * cpu_s / len(took), 3),
                "load": round(os.getloadavg()[0], 1),
            }
        )
    )


if __name__ == "__main__":
    main()
