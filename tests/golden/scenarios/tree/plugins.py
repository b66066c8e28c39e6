from golden_server import happened


def is_right(text, ground_truth):
    """Judge a leaf, and let the server know that it is one."""
    happened()
    return float(text.removesuffix("</answer>").endswith(ground_truth))
