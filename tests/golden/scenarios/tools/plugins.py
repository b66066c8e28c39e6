import polyturn

PRICES = {"lamp": 40, "chair": 75}


@polyturn.tool
async def price(item: str) -> str:
    """Look up a price.

    Args:
        item: The name.
    """
    if item not in PRICES:
        raise polyturn.ToolError(f"no item {item!r}")
    return str(PRICES[item])


@polyturn.tool
def broken(number: int) -> str:
    """Fail.

    Args:
        number: Any number.
    """
    raise ValueError(f"broken at {number}")


def score(trajectory):
    return float(str(trajectory.task.ground_truth) in trajectory.turns[-1].message.text) + len(trajectory.turns) / 8
