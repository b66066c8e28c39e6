"""Run by SGLang's own interpreter: polyturn drives `sglang.Engine` in that process, and writes what it found as JSON."""

import asyncio
import json
import sys
from pathlib import Path

import torch

from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.engines.serve_commands import sglang_arguments
from polyturn.engines.sglang_in_process import SglangInProcess
from polyturn.engines.weight_checksums import Composition

VOCAB = 96


def ask(name, **sampling):
    return GenerateRequest(request_id=name, session_id=name, prompt_ids=range(1, 30), sampling=SamplingParams(**sampling))


def gap(model, completion):
    ids = torch.tensor([[*range(1, 30), *completion.token_ids.tolist()]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0], dim=-1)
    own = logprobs[28:-1].gather(1, ids[0, 29:, None])[:, 0]
    return float((own - torch.tensor(completion.logprobs)).abs().max())


async def main(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    arguments, env = sglang_arguments(model=folder, max_context=2048, device="cpu")
    engine = SglangInProcess(arguments, env=env, vocab_size=VOCAB, max_context=2048, model=folder)
    said = {}
    try:
        await engine.update_weights(0, weights=model.state_dict())
        said["gap"] = gap(model, await engine.generate(ask("first", max_tokens=20)))
        running = asyncio.create_task(engine.generate(ask("across", max_tokens=400)))
        await asyncio.sleep(0.3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        await engine.update_weights(1, weights=model.state_dict())
        across = await running
        said["across"] = len(across.token_ids)
        said["versions"] = sorted({version for _, version in across.policy_versions})
        after = await engine.generate(ask("after", max_tokens=20))
        said["gap_after"], said["version_after"] = gap(model, after), after.policy_versions[0][1]
        held = await engine.checksums()
        made = Composition.find(held, dict(model.named_parameters()))
        said["compared"] = [len(made.names), len(dict(model.named_parameters()))]
        long = asyncio.create_task(engine.generate(ask("long", max_tokens=1900)))
        await asyncio.sleep(0.3)
        await engine.abort("long")
        cut = await long
        said["cut"] = [len(cut.token_ids) < 1900, cut.finish_reason.value]
    finally:
        await engine.close()
    return said


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(main(Path(sys.argv[1])))), encoding="utf-8")
