"""The load client: what requests look like, when they arrive, and how they are sent and timed.

`workload` makes the requests, `client` sends them, `generator` runs one load in a separate process and sums it up.
"""
