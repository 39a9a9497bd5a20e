"""Load: what requests look like and when they arrive, and the lean HTTP client that sends them.

`lengths`, `arrivals` and `summary` are pure; `generator` runs in a process of its own
(`python -m penstock_optimizer.load`), so that measuring costs the measured server nothing but cores that it does not
own. `run_load` of `process` starts it.
"""
