"""The rollout server: a process on a port gives what the same scheduler gives in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from polyturn import build
from polyturn.cli.serve import overrides_of
from polyturn.compat.swift.command import read_swift
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError, EngineError
from polyturn.serving import RolloutClient, RolloutService
from polyturn.serving.app import create_app
from polyturn.serving.listen import bind
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.training import hf
from support.forked import served
from support.models import tiny_model
from support.refusals import refuses
from support.scripted_scheduler import ScriptedScheduler, plan_context, random_plan

pytestmark = pytest.mark.timeout(300)  # processes start, and a busy machine takes long to import what they need

PLUGIN = """
import asyncio
from pathlib import Path
import polyturn
from polyturn.rollout.schedulers import schedulers
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply

@schedulers.register("again")
class Again(MultiTurnScheduler):
    async def check_finished(self, episode, turn):
        return len(episode.turns) >= 3

    async def step(self, episode, turn):
        mode = episode.task.extra.get("mode")
        if mode == "break":
            raise ValueError("the tool is on fire")
        if mode == "hang":
            (Path(episode.task.extra["begun"]) / episode.task.id).touch()
            await asyncio.Event().wait()
        turn.info["seen"] = turn.index
        return Reply.of([{"role": "user", "content": "Again!"}])
"""
CONFIG = {"temperature": 1.0, "seed": 7}
HTTP = httpx.Client(timeout=50)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("served")
    tokenizer = tiny_tokenizer()
    hf.save_model(tiny_model(tokenizer), folder / "model", tokenizer=tokenizer)
    (folder / "my.py").write_text(PLUGIN)
    found = overrides_of(
        model=str(folder / "model"), scheduler="again", max_turns=3, plugins=[str(folder / "my.py")], engine="embedded"
    )
    return [*found, "rollout.limits.max_tokens_per_turn=8", "engine.deterministic=true", "num_threads=1"]


@pytest.fixture(scope="module")
def server(flags: list[str]) -> Iterator[str]:
    with served("serve", "--port", 0, *flags) as (_, url):
        yield url


def requests(num: int, **columns: object) -> list[dict[str, object]]:
    return [
        {"messages": [{"role": "user", "content": f"Say {i}"}], "uuid": f"u{i}", "data_dict": dict(columns)}
        for i in range(num)
    ]


async def test_server_gives_what_the_scheduler_gives_here(server: str, flags: list[str]):
    client = RolloutClient(server)
    theirs = await client.infer_async(requests(6), CONFIG)
    loaded = load_config(RunConfig, None, flags)
    parts = build.build_parts(build.ConfigSource(config=loaded.config, base=Path()))
    ours = await RolloutService(parts.context).infer(requests(6), CONFIG)
    keys = ("messages", "response_token_ids", "response_loss_mask", "rollout_logprobs", "rollout_infos", "stop_reason")
    assert [{k: r.outputs[0][k] for k in keys} for r in theirs] == [{k: o[k] for k in keys} for o in ours]
    assert [r.outputs[0]["response"]["id"] for r in theirs] == [f"u{i}" for i in range(6)]
    assert all(o["rollout_infos"] == {"seen": 1, "num_turns": 3} for o in ours)


async def test_server_that_does_not_answer_with_json_is_refused():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")  # as vLLM's /health
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        url = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
        with pytest.raises(EngineError, match=f"{url}/health/ does not answer with JSON"):
            await RolloutClient(url).wait_ready_async(timeout_s=0)


def test_failing_episode_is_a_reply_of_its_batch(server: str):
    batch = [*requests(2), *[{**r, "uuid": "bad"} for r in requests(1, mode="break")], {"message": []}]
    replies = RolloutClient(server).infer(batch, {**CONFIG, "max_tokens": 4, "seed": 3})
    assert [r.error is None for r in replies[:2]] == [True, True]
    assert all(r.outputs[0]["rollout_infos"]["num_turns"] == 3 for r in replies[:2])
    assert "messages" in (replies[3].error or "")
    assert "on fire" in (replies[2].error or "")
    assert not any(map(any, replies[2].outputs[0]["response_loss_mask"])), "nothing of it is trained"


async def test_request_without_a_uuid_may_be_sent_beside_any(server: str):
    unnamed, named = ({k: v for k, v in r.items() if k != "uuid"} for r in requests(2))
    replies = await RolloutClient(server).infer_async([unnamed, {**named, "uuid": "q0"}, unnamed], CONFIG)
    assert [reply.error for reply in replies] == [None] * 3
    assert [len({o["response"]["id"] for o in r.outputs}) for r in replies] == [1] * 3
    with pytest.raises(ConfigError, match="same uuid"):
        await RolloutClient(server).infer_async([{**named, "uuid": "q0"}] * 2)


def test_client_of_the_guide_asks_a_server(server: str, flags: list[str]):
    page = (Path(__file__).parents[3] / "docs/guides/serve.md").read_text(encoding="utf-8")
    block = page.partition("```python\n")[2].partition("```")[0]
    parts = build.build_parts(build.ConfigSource(config=load_config(RunConfig, None, flags).config, base=Path()))
    names: dict[str, Any] = {"model": parts.model}
    exec(block.replace("http://127.0.0.1:8000", server), names)
    assert [reply.error for reply in names["replies"]] == [None]
    assert HTTP.post(f"{server}/probe/").json()["version"] == 1


def test_endpoints_of_a_trainer_answer(server: str):
    assert HTTP.get(f"{server}/health/").json() == {"status": "ok"}
    assert HTTP.get(f"{server}/get_world_size/").json() == {"world_size": 1}
    assert HTTP.post(f"{server}/get_engine_type/").json()["enable_multi_turn"] is True
    assert "model.embed_tokens.weight" in HTTP.get(f"{server}/get_model_state_keys/").json()["keys"]
    assert HTTP.post(f"{server}/reset_prefix_cache/").status_code == 200


@pytest.mark.parametrize("path", ["init_communicator", "update_named_param", "update_adapter_param"])
def test_weights_by_another_transport_are_refused_by_name(server: str, path: str):
    reply = HTTP.post(f"{server}/{path}/", json={})
    assert reply.status_code == 501 and "weights" in reply.json()["detail"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not JSON"),
        (b'{"infer_requests": 3}', "must be a list (requests, each an object with `messages`)"),
        (b'{"infer_requests": [], "request_config": {"n": 2}}', "request_config.n is 2"),
        (b'{"infer_requests": [], "request_config": {"temprature": 1}}', "temperature"),
        (b'{"infer_requests": [], "timeout_s": -1}', "timeout_s is -1"),
    ],
)
def test_wrong_request_is_refused_by_name(server: str, body: bytes, says: str):
    reply = HTTP.post(f"{server}/infer/", content=body)
    assert reply.status_code == 422 and says in reply.json()["detail"]


def test_pushed_weights_are_served(server: str):
    client = RolloutClient(server)
    tokenizer = tiny_tokenizer()
    first, second = (tiny_model(tokenizer, seed=seed).state_dict() for seed in (0, 1))
    try:
        (push,) = client.push_weights(second, version=1)
        assert push.has_changed
        assert push.after["version"] == 1
    finally:
        (back,) = client.push_weights(first, version=2)  # the other tests use the server, too
    assert back.after["logprobs"] == pytest.approx(push.before["logprobs"], abs=1e-6)
    refuses(lambda: client.push_weights({"model.embed_tokens.weight": torch.zeros(2, 2)}, version=3), EngineError, "shape")


def test_sigterm_ends_episodes_after_their_grace(flags: list[str], tmp_path: Path):
    replies: list[object] = []
    arguments = ("serve", "--port", 0, "--grace", 1, *flags, "rollout.sampling.temperature=0")
    hanging = requests(2, mode="hang", begun=str(tmp_path))
    with served(*arguments) as (run, url):
        asking = threading.Thread(target=lambda: replies.extend(RolloutClient(url).infer(hanging)))
        asking.start()
        run.wait_until(lambda: {p.name for p in tmp_path.iterdir()} == {"u0", "u1"})
    asking.join()
    assert [r.error for r in replies] == ["the server was stopped before the episode finished"] * 2  # type: ignore[attr-defined]


async def test_random_schedulers_leave_the_same_through_http():
    model = tiny_model(tiny_tokenizer())
    for seed in range(20):
        plan, request = random_plan(seed), requests(1)
        ours = await RolloutService(plan_context(plan, scheduler=ScriptedScheduler(plan))).infer(request, CONFIG)
        service = RolloutService(plan_context(plan, scheduler=ScriptedScheduler(plan)))
        transport = httpx.ASGITransport(create_app(service, model=model))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            theirs = (await http.post("/infer/", json={"infer_requests": request, "request_config": CONFIG})).json()
        for outputs in (ours, theirs):
            for output in outputs:
                output["response"].pop("created", None)
                for choice in output["response"]["choices"]:
                    choice.pop("id", None)
        assert theirs == ours


def test_port_in_use_is_passed_over_and_a_wrong_one_refused():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with bind("127.0.0.1", port) as other:
            assert other.getsockname()[1] != port
    for port in (-1, 65536):
        with pytest.raises(ConfigError, match=f"the port is {port}"):
            bind("127.0.0.1", port)


def test_swift_arguments_configure_the_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").touch()
    written = "--model M --multi_turn_scheduler again --max_turns 3 --external_plugins my.py --use_async_engine true"
    loaded, options = read_swift([*written.split(), "--port", "9", "--api_key", "secret"])
    assert (loaded.config.rollout.scheduler, loaded.config.rollout.limits.max_turns) == ("again", 3)
    assert [Path(plugin).name for plugin in loaded.config.plugins] == ["my.py"]
    assert (options.host, options.port, options.rules().token) == ("127.0.0.1", 9, "secret")
    gym = "--model M --use_gym_env true --gym_env lake --max_turns 3 --vllm_enforce_eager true"
    rollout = read_swift(gym.split())[0].config.rollout
    assert (rollout.scheduler, rollout.scheduler_kwargs["gym_env"]) == ("gym_scheduler", "lake")
    refuses(lambda: read_swift(["--model", "M", "--max_turn", "3"]), ConfigError, "max_turns")
