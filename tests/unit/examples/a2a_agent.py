"""An A2A agent for tests, built with its SDK and served from a thread."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from a2a.helpers.proto_helpers import new_data_part, new_task, new_text_message, new_text_part
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.request_handlers import DefaultRequestHandlerV2
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import AgentCapabilities, AgentCard, AgentInterface, AgentSkill, Part, TaskState
from starlette.applications import Starlette

from polyturn.serving.auth import ServerRules, guarded
from polyturn.tools.schema import OpenAIFunctionToolSchema

DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
CONVERT = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "convert",
            "description": "Convert an amount of money.",
            "parameters": {
                "type": "object",
                "properties": {
                    "amount": {"type": "number", "default": 1},
                    "to": {"type": "string", "enum": ["EUR", "JPY"]},
                },
                "required": ["to"],
            },
        },
    }
)


class Agent(AgentExecutor):
    """Answers according to the message; see `execute`."""

    def __init__(self) -> None:
        self.turns: dict[str, int] = {}
        self.cancelled: list[str] = []

    async def execute(self, context: RequestContext, event_queue: Any) -> None:
        said = context.get_user_input()
        where, number = str(context.context_id), str(context.task_id)
        turn = self.turns[where] = self.turns.get(where, 0) + 1
        data = next((p.data for p in context.message.parts if p.HasField("data")), None) if context.message else None
        if data is not None:
            said = f"convert to {data.struct_value.fields['to'].string_value}"
        if said.startswith("talk"):
            reply = new_text_message(f"turn {turn}: {said}", context_id=where)
            reply.metadata.update({"score": 0.25 * turn, "done": turn == 3})
            await event_queue.enqueue_event(reply)
            return
        if said.startswith("crash"):
            raise ValueError("out of fuel")
        if context.current_task is None:
            task = new_task(number, where, TaskState.TASK_STATE_SUBMITTED)
            await event_queue.enqueue_event(task)
        updater = TaskUpdater(event_queue, number, where)
        await updater.start_work()
        if said.startswith("hang"):
            await asyncio.sleep(3600)
        if said.startswith("book") and "to" not in said:
            await updater.requires_input(updater.new_agent_message([new_text_part("Where to?")]))
        elif said.startswith("forbidden"):
            await updater.reject(updater.new_agent_message([new_text_part("I may not.")]))
        else:
            await updater.add_artifact([new_text_part(f"done: {said}")], artifact_id="a")
            await updater.add_artifact([new_data_part({"turn": turn})], artifact_id="a", append=True)
            if "paint" in said or "Rome" in said:
                await updater.add_artifact([Part(raw=base64.b64decode(DOT), media_type="image/png")], artifact_id="b")
            await updater.complete()

    async def cancel(self, context: RequestContext, event_queue: Any) -> None:
        self.cancelled.append(str(context.task_id))
        await TaskUpdater(event_queue, str(context.task_id), str(context.context_id)).cancel()


@contextlib.contextmanager
def served(*, streaming: bool = True, token: str | None = None) -> Iterator[tuple[str, Agent]]:
    """Serve an agent; yields its address and itself."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    bound.listen()  # clients that connect early wait
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    ask = AgentSkill(id="ask it", name="Ask", description="Ask anything.", tags=["t"], examples=["book a flight"])
    card = AgentCard(
        name="traveller",
        description="Travels.",
        version="1",
        supported_interfaces=[AgentInterface(url=f"{url}/rpc", protocol_binding="JSONRPC", protocol_version="1.0")],
        capabilities=AgentCapabilities(streaming=streaming),
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        skills=[ask, CONVERT.to_a2a_skill()],
    )
    agent = Agent()
    handler = DefaultRequestHandlerV2(agent, InMemoryTaskStore(), card)
    app = Starlette(routes=[*create_agent_card_routes(card), *create_jsonrpc_routes(handler, "/rpc")])

    guarded(app, ServerRules(token=token))  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])), daemon=True)
    thread.start()
    try:
        yield url, agent
    finally:
        server.should_exit = True
        thread.join(5)
