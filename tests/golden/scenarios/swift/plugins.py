from swift.rewards import ORM, orms
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns


class Answer(ORM):
    def __call__(self, completions, solution, **kwargs):
        return [float(truth in said) for said, truth in zip(completions, solution, strict=True)]


class Length(ORM):
    def __call__(self, completions, **kwargs):
        return [len(said) / 16 for said in completions]


orms["golden_answer"] = Answer
orms["golden_length"] = Length


class GoldenScheduler(MultiTurnScheduler):
    """Adds a masked result to the message, then asks again."""

    def check_finished(self, infer_request, response_choice, current_turn):
        is_over = super().check_finished(infer_request, response_choice, current_turn)
        return is_over or "end" in response_choice.message.content

    def step(self, infer_request, response_choice, current_turn):
        said = response_choice.message.content
        if "=" not in said:
            asked = f"Turn {current_turn}, {infer_request.data_dict['hint']}"
            infer_request.messages.append({"role": "user", "content": asked})
            return {"infer_request": infer_request, "rollout_infos": {"asked": current_turn}}
        token_ids = list(response_choice.token_ids)
        mask = [1] * len(token_ids)
        infer_request.messages[-1]["content"] += " 4"
        result = self.tokenizer.encode(" 4", add_special_tokens=False)
        return {
            "infer_request": infer_request,
            "response_token_ids": token_ids + result,
            "response_loss_mask": mask + [0] * len(result),
            "rollout_infos": {"result": 4},
        }


multi_turns["golden_scheduler"] = GoldenScheduler
