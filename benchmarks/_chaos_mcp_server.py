"""An MCP server over standard input and output that starts quickly: only the standard library, one thread per call.

Its only tool takes some seconds, and can end the whole server in the middle of a call.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

LOCK = threading.Lock()
TOOL = {
    "name": "work",
    "description": "Take time.",
    "inputSchema": {
        "type": "object",
        "properties": {"seconds": {"type": "number"}, "drop": {"type": "boolean"}},
        "required": ["seconds", "drop"],
    },
}


def send(message: dict[str, Any]) -> None:
    with LOCK:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()


def work(number: Any, arguments: dict[str, Any]) -> None:
    time.sleep(arguments["seconds"])
    if arguments["drop"]:
        os._exit(1)
    send({"id": number, "result": {"content": [{"type": "text", "text": "fine"}], "isError": False}})


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        method, number = message.get("method"), message.get("id")
        if number is None:
            continue
        if method == "initialize":
            version = message["params"]["protocolVersion"]
            server = {"name": "chaos", "version": "1"}
            send({"id": number, "result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}})
        elif method == "tools/list":
            send({"id": number, "result": {"tools": [TOOL]}})
        elif method == "tools/call":
            threading.Thread(target=work, args=(number, message["params"]["arguments"]), daemon=True).start()
        elif method == "ping":
            send({"id": number, "result": {}})
        else:
            send({"id": number, "error": {"code": -32601, "message": f"there is no {method}"}})


if __name__ == "__main__":
    main()
