"""A server on the trainer's own GPU: what its sleep frees, and what it serves when it wakes. Waits for a GPU."""

import importlib.util
import sys

import pytest
import torch
from engine_servers import CLIENTS, READY_S

from polyturn.engines import serve_commands
from polyturn.engines.pool import EnginePool
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.supervisor import ServerSupervisor
from polyturn.engines.weights.folder import WeightFolder
from polyturn.engines.weights.transfer import WeightTransfer
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy
from polyturn.training.weight_probe import WeightProbe
from polyturn.training.weight_sync import WeightSync
from support.served_model import VOCAB, small_model

pytestmark = pytest.mark.engines
SHARE = 0.3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("way", ["ipc", "folder"])
@pytest.mark.parametrize("kind", CLIENTS)
async def test_sleeping_server_frees_the_gpu_and_wakes_with_new_weights(kind, way, tmp_path):
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed beside polyturn")
    model, client = small_model().to("cuda", torch.bfloat16), CLIENTS[kind]
    model.save_pretrained(tmp_path)
    spec = getattr(serve_commands, f"{kind}_command")(
        python=sys.executable,
        model=tmp_path,
        max_context=2048,
        device="cuda",
        transport=way,
        args=[client.sleep_flag, client.share_flag, str(SHARE)],
    )
    transfer = WeightTransfer(way, client.open_link) if way == "ipc" else None
    server = client(
        "", ServedModel(vocab_size=VOCAB, max_context=2048), transfer=transfer, supervisor=ServerSupervisor(spec)
    )
    engine = EnginePool([server], patience_s=READY_S, files=transfer or WeightFolder(tmp_path))
    trainer = local_policy(model, optim=OptimSettings(lr=1e-3))
    sync = WeightSync(engine, trainer, WeightProbe(vocab_size=VOCAB), sleeper=engine)
    try:
        await sync.start(0)
        for version in (1, 2):
            free, total = torch.cuda.mem_get_info()
            await engine.sleep()
            assert torch.cuda.mem_get_info()[0] - free > 0.8 * SHARE * total
            for parameter in trainer.weights().values():
                parameter.mul_(1.1)
            await sync.publish(version)
            assert torch.cuda.mem_get_info()[0] - free < 0.2 * SHARE * total, "weights and KV cache are there again"
        assert sync.noise is not None
    finally:
        await engine.close()
