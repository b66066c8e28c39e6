"""An MCP server on standard input and output that writes the bytes of each request's argument. It does not use the SDK.

tools/call {"say": "eyJqc29u…", "is_whole": true}    writes those bytes, with the request's id for @ID@, then a right answer
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any


def send(**message: Any) -> None:
    """Write a message."""
    sys.stdout.buffer.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    sys.stdout.buffer.flush()


for line in sys.stdin:
    request = json.loads(line)
    method, number = request.get("method"), request.get("id")
    if method == "initialize":
        version = request["params"]["protocolVersion"]
        server = {"name": "hostile", "version": "1"}
        send(id=number, result={"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server})
    elif method == "tools/call":
        arguments = request["params"].get("arguments") or {}
        sys.stdout.buffer.write(base64.b64decode(arguments["say"]).replace(b"@ID@", str(number).encode()) + b"\n")
        sys.stdout.buffer.flush()
        if arguments.get("is_whole"):
            send(id=number, result={"content": [{"type": "text", "text": "done"}]})
    elif method == "tools/list":
        send(id=number, result={"tools": [{"name": "ask", "inputSchema": {"type": "object"}}]})
    elif number is not None:
        send(id=number, error={"code": -32601, "message": "Method not found"})
