"""The front door: `polyturn.train`, `polyturn.evaluate`, `polyturn.rollout`, from Python and from the command line.

front.py        the functions                      given.py      what they are given, as a configuration
training.py     a training run, start to end       run.py        what comes back
event_loop.py     an event loop that runs already    console.py, folders.py, ranks.py, signals.py   around a run
"""
