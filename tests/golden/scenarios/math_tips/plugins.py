def is_right(text, ground_truth):
    return float(text.endswith(f"<answer>{ground_truth}</answer>"))


def score(trajectory):
    return is_right(trajectory.turns[-1].message.text, trajectory.task.ground_truth) + len(trajectory.turns) / 4
