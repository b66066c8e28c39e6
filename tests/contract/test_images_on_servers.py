"""Images travel to the real servers: what they sample from is what the trainer sees, and a whole run trains that way."""

import asyncio

import numpy as np
import pytest
from engine_servers import CLIENTS, interpreter, launch_spec, needs_server, on_servers
from PIL import Image

from polyturn.cli.main import main
from polyturn.core.errors import EngineError
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.core.media import Media, to_source
from polyturn.core.messages import Message
from polyturn.engines.launcher import Server
from polyturn.engines.request_limits import ServedModel
from polyturn.store.stored_run import open_store
from polyturn.tokens.codec import Codec
from polyturn.tokens.multimodal import MediaProcessor
from support.refusals import refuses_later
from support.runs import call_command, trained_steps
from support.vision import tiny_processor, tiny_vision_model, trainer_logprobs, vision_tokenizer
from support.vision_run import write_vision_run

pytestmark = pytest.mark.engines
HIDDEN = 64
"""vLLM's attention on a CPU knows no narrower heads than 32."""


def picture(seed: int) -> Media:
    pixels = np.random.default_rng(seed).integers(0, 255, (56, 84, 3)).astype(np.uint8)
    return Media(kind="image", source=to_source("image", Image.fromarray(pixels)))


@pytest.mark.parametrize("kind", on_servers(slow="vllm"))
def test_logprobs_behind_images_are_the_trainers(kind, tmp_path):
    needs_server(kind)
    tokenizer = vision_tokenizer()
    model = tiny_vision_model(tokenizer, hidden=HIDDEN)
    model.save_pretrained(tmp_path)
    tiny_processor(tokenizer).save_pretrained(tmp_path)
    codec = Codec(tokenizer)
    media = MediaProcessor(tiny_processor(tokenizer, videos=False), codec)
    shown = (picture(1), picture(2))
    message = Message(
        role="user",
        content=(*({"type": "image", "image": m.source} for m in shown), {"type": "text", "text": "Which is larger?"}),
    )
    ids = media.expand(codec.encode(codec.template.render([message], add_generation_prompt=True)), [message])

    async def ask() -> None:
        server = await Server.start(launch_spec(kind, tmp_path, max_context=512, sees=True))
        engine = CLIENTS[kind](server.url, ServedModel(vocab_size=len(tokenizer), media=media))
        try:
            sampling = SamplingParams(max_tokens=24, temperature=0.7, banned_token_ids=media.token_ids)
            for number in range(4):
                request = GenerateRequest(
                    request_id=f"r{number}", session_id="s", prompt_ids=ids, sampling=sampling, media=shown
                )
                done = await engine.generate(request)
                assert not np.isin(done.token_ids, media.token_ids).any()
                expected = trainer_logprobs(model, media, ids, shown, done, temperature=0.7)
                assert np.abs(done.logprobs - expected).max() < 1e-4
            other = GenerateRequest(request_id="o", session_id="s", prompt_ids=ids[:8], sampling=sampling, media=shown)
            await refuses_later(lambda: engine.generate(other), EngineError, "do not contain the")
        finally:
            await engine.close()
            await server.stop()

    asyncio.run(ask())


@pytest.mark.slow
@pytest.mark.parametrize("kind", on_servers())
def test_vision_model_trains_on_a_server(kind, tmp_path, monkeypatch):
    needs_server(kind)
    monkeypatch.chdir(tmp_path)
    config = write_vision_run(tmp_path, hidden=HIDDEN)
    called = call_command(
        *(main, "train", config, f"engine.kind={kind}", "engine.num_slots=null"),
        *(f"engine.launch.python={interpreter(kind)}", "train.steps=1"),
    )
    assert called.code == 0, called.err
    assert "the weights arrive" in called.err + called.out
    (step,) = trained_steps(tmp_path / "runs" / "seeing")
    assert step["policy/rollout_difference"] < 1e-4 and step["loss/grad_norm"] > 0
    kinds = [[m.kind for m in t.segments[0].media] for t in open_store(tmp_path / "runs" / "seeing").trajectories()]
    # The first turn may end without a call of the tool, which returns the second image: the model's weights are random.
    assert len(kinds) == 6 and all(set(each) == {"image"} for each in kinds) and ["image", "image"] in kinds
