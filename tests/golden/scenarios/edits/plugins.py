import polyturn


class Edits(polyturn.MultiTurnScheduler):
    """Makes the edits that a row lists, one behind each turn."""

    stateless = True

    async def step(self, episode, turn):
        plan = episode.task.extra["plan"]
        edit = plan[turn.index] if turn.index < len(plan) else None
        turn.scores["edit"] = turn.index / 4
        turn.info["edit"] = edit
        if edit == "go_on":
            return episode.go_on(" Look again.", keep=turn.text.split("?")[0])
        if edit == "go_on_with_all":
            return episode.go_on()
        if edit == "forget":
            episode.rewrite([*episode.task.prompt, episode.messages[-1]])
            return "What is the answer?"
        if edit == "replace":
            return episode.rewrite([{"role": "user", "content": "What is wrong?"}])
        if edit == "change":
            said = episode.messages[-1].text.replace("wrong", "right")
            return episode.rewrite([*episode.messages[:-1], {"role": "assistant", "content": said}], goes_on=True)
        if edit == "weigh":
            episode.weigh(turn, [i % 2 for i in range(turn.num_tokens)])
            return [{"role": "user", "content": "Again."}, {"role": "user", "content": "Think!"}]
        if edit == "done":
            return polyturn.Reply(
                messages=(polyturn.Message(role="user", content="Enough."),), is_done=True, info={"ended": True}
            )
        return None


def score(trajectory):
    return len(trajectory.turns) + len(trajectory.segments) / 4 + len(trajectory.turns[-1].message.text) / 64
