"""Simulates what autoscalers do with load over time: replicas as queues, and the policies that scale them.

    traces    load over time, built in or from a CSV file
    fleet     replicas as queues, fitted to the endpoint's capacity curve, and every request through them
    scraper   what Prometheus would know of it
    policies  ours, and rivals
    compare   one run of a policy, and all policies at equal replica-hours
    report    the comparison as a page and as figures

Nothing in the operator imports it; the command line does.
"""
