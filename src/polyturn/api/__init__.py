"""The public functions `polyturn.train`, `polyturn.evaluate`, `polyturn.rollout`, and the runs that they and the CLI start.

front.py                       the functions              given.py, given_rows.py, keywords.py   arguments -> configuration
training.py, warm_starting.py  a training run             run.py                                 its result
evaluating.py, rolling.py      runs without training      stepping.py, dry_run.py                `steps`, and a dry run
signals.py                     interrupts, event loops    console.py, folders.py, step_size.py   helpers of a run
"""
