"""`penstock bench`: the published experiment on any endpoint, beside plain transformers, measured in turns.

`grid`, `judge`, `figures`, `results` and `tables` are pure; `sender` is the process that sends the requests, `baseline`
the server that we are compared with; `run_bench` does it all.
"""
