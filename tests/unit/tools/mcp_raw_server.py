"""An MCP server for tests without the SDK, so that it starts in no time and may break the protocol as well."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

if (marker := os.environ.get("DEAD_IF")) and Path(marker).exists():
    sys.exit("licence expired\nask the vendor")
sys.stderr.write("starting up\n")
TOOLS = (
    *("pid", "count", "hang", "freeze", "child", "noise", "large", "quit", "pattern", "listed", "flood", "refuse"),
    "misshapen",
)
NEVER_FOUND = {"type": "object", "properties": {"text": {"type": "string", "pattern": "^(a+)+$"}}}
"""A pattern that takes exponential time on the answers of the tool `pattern`."""
num_calls = num_listed = 0


def send(**message: object) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def call(name: str, arguments: dict) -> str:
    global num_calls
    if name == "freeze":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    if name == "quit":
        os._exit(3)
    if name == "child":
        return str(subprocess.Popen(["sleep", "3600"]).pid)
    if name == "noise":
        sys.stdout.write('no json\n\n{"jsonrpc": "2.0"}\n[1, 2]\n{"jsonrpc": "2.0", "id": 999, "result": {}}\n')
        sys.stderr.write("noise " * 100_000)
    if name == "flood":
        sys.stdout.write('{"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}\n' * 500 + "\n" * 5_000)
    if name == "count":
        num_calls += 1
    if name == "listed":
        return str(num_listed)
    return {"pid": str(os.getpid()), "count": str(num_calls), "large": "x" * arguments.get("size", 0)}.get(name, "done")


for line in sys.stdin:
    asked = json.loads(line)
    method, number = asked.get("method"), asked.get("id")
    if method == "initialize":
        server = {"name": "raw", "version": "1"}
        version = asked["params"]["protocolVersion"]
        send(id=number, result={"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server})
    elif method == "tools/list":
        num_listed += 1
        listed = [{"name": name, "inputSchema": {"type": "object"}, "outputSchema": NEVER_FOUND} for name in TOOLS]
        send(id=number, result={"tools": listed})
    elif method == "tools/call" and asked["params"]["name"] != "hang":
        if asked["params"]["name"] == "refuse":
            send(id=number, error={"code": -1, "message": "no " * 1_000_000})
            continue
        if asked["params"]["name"] == "misshapen":
            sys.stdout.write(asked["params"]["arguments"]["line"].replace("NUMBER", json.dumps(number)) + "\n")
            sys.stdout.flush()
            continue
        text = call(asked["params"]["name"], asked["params"].get("arguments") or {})
        result = {"content": [{"type": "text", "text": text}]}
        if asked["params"]["name"] == "pattern":
            result["structuredContent"] = {"text": "a" * 200 + "!"}
        if asked["params"]["name"] == "large":
            sys.stdout.write(json.dumps({"result": result, "jsonrpc": "2.0", "id": number}) + "\n")  # the id comes last
            sys.stdout.flush()
        else:
            send(id=number, result=result)
    elif number is not None and method != "tools/call":
        send(id=number, error={"code": -32601, "message": "Method not found"})
