"""The rollout server and its client: episodes run next to the engine, and the trainer requests them over HTTP.

    RolloutClient("http://127.0.0.1:8000").infer([{"messages": […], "uuid": "a"}])  ->  one reply for each request, in order
    POST /infer/  ->  app  ->  RolloutService  ->  run_episode, the loop that training runs too

The service contains no HTTP code and the app no episode code, so each can be tested alone.
"""

from polyturn.serving.client import InferReply, RolloutClient, WeightPush
from polyturn.serving.rollout_service import RolloutService

__all__ = ["InferReply", "RolloutClient", "RolloutService", "WeightPush"]
