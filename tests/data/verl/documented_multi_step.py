from verl.interactions.base import BaseInteraction


class MultiStepInteraction(BaseInteraction):
    def __init__(self, config):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self._instance_dict[instance_id] = {"ground_truth": ground_truth, "attempts": 0}
        return instance_id

    async def calculate_score(self, instance_id, **kwargs):
        return 0.5 * self._instance_dict[instance_id]["attempts"] - 0.4

    # documented from here
    async def generate_response(self, instance_id, messages, **kwargs):
        instance = self._instance_dict[instance_id]
        instance["attempts"] += 1

        # Evaluate current response
        reward = await self.calculate_score(instance_id)

        if reward > 0.8:
            return True, "Excellent work!", reward, {}
        elif instance["attempts"] < 3:
            return False, "Good attempt, but try to improve...", reward, {}
        else:
            return True, "Maximum attempts reached.", reward, {}
    # to here

    async def finalize_interaction(self, instance_id, **kwargs):
        del self._instance_dict[instance_id]
