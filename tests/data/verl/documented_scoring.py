from verl.interactions.gsm8k_interaction import Gsm8kInteraction


def custom_evaluation_function(response, ground_truth):
    return str(ground_truth) in response


class CustomInteraction(Gsm8kInteraction):
    # documented from here
    async def calculate_score(self, instance_id, **kwargs):
        response = self._instance_dict[instance_id]["response"]
        ground_truth = self._instance_dict[instance_id]["ground_truth"]

        # Custom evaluation logic
        if custom_evaluation_function(response, ground_truth):
            return 1.0
        else:
            return 0.0
    # to here
