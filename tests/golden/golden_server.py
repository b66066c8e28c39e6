"""An SGLang server that says what a script says, with the logprobs that the model it was given has for it.

    with ScriptedServer(folder / "model", ["<tool_call>…</tool_call>", "#### 4"]) as server:
        …                                          engine: {kind: sglang, urls: [server.url]}
    server.asked                                   what it was asked, in the order in which it answered

It stands outside of polyturn, behind SGLang's own routes, so that nothing in polyturn has to stay where it is for a fixture
to be recorded again. Weights that are sent to it are really loaded, so the proof at the start of training holds.
A request without stop tokens is one of that proof's: it gets tokens that follow from its prompt, and is not recorded.

Where requests come side by side, an entry of the script says how many must be waiting before it is given to one of them
(`of: 3`), and of those it goes to the one with the least prompt, then the least seed. Where the answer before it draws no
further request, it says how often a plug-in of the scenario must have called `happened` (`after: 2`). So the order is one of
events, not of time.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

Said = str | Mapping[str, Any]
"""A completion's text; or {text: …}, with `is_cut: true` if it does not end its turn, `of: N` and `after: N`; or
{hold: true}, for one that never comes."""
QUIET = {"/health_generate", "/pause_generation", "/continue_generation", "/flush_cache", "/abort_request"}
"""Routes that have nothing to do here."""
_NUM_BYTES = 256
_IMAGE_TOKENS = 4
"""What a picture of 56 x 56 pixels is to the model of `golden_model.py`."""
_serving: list[ScriptedServer] = []


def happened() -> None:
    """Tell the server that something is over of which it sees nothing; called by plug-ins of scenarios."""
    for server in _serving:
        server.happened()


class ScriptedServer:
    """Serves on a port of this machine until it is closed."""

    def __init__(self, model: Path, says: Sequence[Said], *, is_vision: bool = False) -> None:
        import transformers

        self.asked: list[dict[str, Any]] = []
        self.is_holding = threading.Event()
        """Set once a request has come that is never answered."""
        self._says = list(says)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self._model: Any = None if is_vision else transformers.AutoModelForCausalLM.from_pretrained(model).eval()
        self._version = "default"
        self._changes = threading.Condition()
        self._waiting: list[dict[str, Any]] = []
        self._num_happened = 0
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        _serving.append(self)
        return self

    def __exit__(self, *problem: object) -> None:
        _serving.remove(self)
        self._http.shutdown()
        self._http.server_close()

    @property
    def num_left(self) -> int:
        """Number of completions in the script that no request has asked for."""
        return len(self._says)

    def happened(self) -> None:
        """Count what entries of the script wait for."""
        with self._changes:
            self._num_happened += 1
            self._changes.notify_all()

    def forget(self) -> None:
        """Let go of the requests of a process that is dead."""
        with self._changes:
            self._waiting.clear()
            self._changes.notify_all()

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON of one call; None where the server has no such route."""
        if path == "/server_info":
            return {"version": "0.5.21", "enable_deterministic_inference": True, "context_length": 4096, "tp_size": 1}
        if path == "/model_info":
            return {"weight_version": self._version}
        if path == "/update_weights_from_disk":
            return self._load(body)
        if path == "/update_weight_version":
            with self._changes:
                self._version = body["new_version"]
            return {"success": True, "message": ""}
        if path == "/generate":
            return self._spoken(body) if body["sampling_params"]["stop_token_ids"] else self._probed(body)
        return {} if path.partition("?")[0] in QUIET else None

    def _load(self, body: dict[str, Any]) -> Any:
        from safetensors.torch import load_file

        with self._changes:
            self._model.load_state_dict(load_file(Path(body["model_path"]) / "model.safetensors"), strict=False)
        return {"success": True, "message": ""}

    def _probed(self, body: dict[str, Any]) -> Any:
        draw = random.Random(repr(body["input_ids"]))
        ids = [draw.randrange(_NUM_BYTES) for _ in range(body["sampling_params"]["max_new_tokens"])]
        with self._changes:
            return self._completion(body, ids, is_cut=True)

    def _spoken(self, body: dict[str, Any]) -> Any:
        """Return the script's next completion, once it is this request's turn."""
        with self._changes:
            self._waiting.append(body)
            self._changes.notify_all()
            self._changes.wait_for(lambda: self._is_next(body))
            if body not in self._waiting:
                return {}
            self._waiting.remove(body)
            said = self._says.pop(0) if self._says else "Nothing is left in the script."
            said = {"text": said} if isinstance(said, str) else said
            self.asked.append(body)
            if said.get("hold"):
                self.is_holding.set()
                self._changes.wait()
                return {}
            ids = self._tokenizer.encode(said["text"], add_special_tokens=False)
            ids = ids if said.get("is_cut") else [*ids, self._tokenizer.eos_token_id]
            most = body["sampling_params"]["max_new_tokens"]
            reply = self._completion(body, ids[:most], is_cut=len(ids) > most or bool(said.get("is_cut")))
            self._changes.notify_all()
            return reply

    def _is_next(self, body: dict[str, Any]) -> bool:
        if body not in self._waiting:  # it was forgotten
            return True
        said = self._says[0] if self._says and not isinstance(self._says[0], str) else {}
        if len(self._waiting) < said.get("of", 1) or self._num_happened < said.get("after", 0):
            return False
        return body is min(self._waiting, key=lambda b: (b["input_ids"], b["sampling_params"].get("sampling_seed", 0)))

    def _completion(self, body: dict[str, Any], ids: list[int], *, is_cut: bool) -> Any:
        pictures = len(body.get("image_data") or ())
        logprobs = self._logprobs(body["input_ids"], ids, temperature=body["sampling_params"]["temperature"] or 1.0)
        return {
            "output_ids": ids,
            "meta_info": {
                "prompt_tokens": len(body["input_ids"]) + pictures * (_IMAGE_TOKENS - 1),
                "finish_reason": {"type": "length" if is_cut else "stop"},
                "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, ids, strict=True)],
                "weight_versions": [{"start": 0, "version": self._version}],
            },
        }

    def _logprobs(self, prompt: Sequence[int], ids: Sequence[int], *, temperature: float) -> list[float]:
        """Return the model's log-probabilities; of a model that sees, numbers that a float32 holds exactly."""
        import torch

        if self._model is None:
            return [-0.25 - (token % 16) / 8 for token in ids]
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits.float() / temperature, -1)
            return logprobs[torch.arange(len(ids)), torch.tensor(ids)].tolist()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._reply({})

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                self._reply(json.loads(self.rfile.read(length) or "{}"))

            def _reply(self, body: dict[str, Any]) -> None:
                found = server.answer(self.path, body)
                data = json.dumps(found).encode()
                with contextlib.suppress(ConnectionError):  # of a process that is dead
                    self.send_response(404 if found is None else 200)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        return Handler
