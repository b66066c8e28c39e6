class Counter:
    """Is done when the number that was said is reached."""

    def __init__(self, goal=3):
        self.goal = goal
        self.count = 0

    def reset(self, *, seed):
        return f"Say {self.goal}, number {seed % 5}."

    def step(self, action):
        self.count += 1
        is_done = str(self.goal) in action
        return f"{self.count} said.", 1.0 if is_done else -0.125, is_done, {"count": self.count}

    def close(self):
        pass
