"""Reads load metrics: pods, gateways and Prometheus, with a history of samples for each endpoint."""
