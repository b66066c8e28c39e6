from verl.interactions.base import BaseInteraction
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Check(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.lives = {}

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        self.lives[instance_id] = {"truth": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        is_right = parameters["answer"] == self.lives[instance_id]["truth"]
        self.lives[instance_id]["reward"] = float(is_right)
        return ToolResponse(text=f"right: {is_right}"), 0.0 if is_right else -0.05, {"is_right": is_right}

    async def calc_reward(self, instance_id, **kwargs):
        return self.lives[instance_id]["reward"]

    async def release(self, instance_id, **kwargs):
        del self.lives[instance_id]


class Golden(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        is_right = kwargs["ground_truth"] in messages[-1]["content"]
        return is_right, "Right." if is_right else "Wrong.", float(is_right), {"num": len(messages)}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth in solution_str) + extra_info["index"] / 8, "acc": 1.0}
