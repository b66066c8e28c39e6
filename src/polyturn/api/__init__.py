"""The public functions `polyturn.train`, `polyturn.evaluate`, `polyturn.rollout`, and the runs that they and the CLI start.

front.py        the functions                      given.py      their arguments, as a configuration
training.py     a training run, start to end       run.py        their result
event_loop.py     inside a running event loop        console.py, folders.py, ranks.py, signals.py   helpers of a run
"""
