"""Write your own interaction: a user that answers and scores each turn of the model, and ends the conversation.

`--tiny` runs on a laptop.
"""

import sys

import polyturn

PRICES = {"lamp": 40, "chair": 75}


class Customer(polyturn.BaseInteraction):
    """A customer who keeps asking until the model gives the right price."""

    async def generate_response(self, instance_id, messages, **kwargs):
        """Return whether the conversation is over, the reply, the turn's score, and further values for the record."""
        answer = messages[-1]["content"]
        if str(PRICES[kwargs["item"]]) in answer:
            return True, "Thank you!", 1.0, {}
        return False, "That cannot be right, think again.", 0.0, {"words": len(answer.split())}


TINY = {"steps": 2, "groups_per_step": 2, "group_size": 4, "max_tokens_per_turn": 32}
REAL = {"steps": 100, "groups_per_step": 16}
run = polyturn.train(
    model=polyturn.tiny("Qwen/Qwen3-0.6B") if "--tiny" in sys.argv else "Qwen/Qwen3-0.6B",
    tasks=[{"prompt": f"What does the {i} cost?", "interaction": {"name": "customer", "item": i}} for i in PRICES],
    interaction=Customer,
    max_turns=4,
    name="own_interaction",
    **(TINY if "--tiny" in sys.argv else REAL),
)
print(run)
