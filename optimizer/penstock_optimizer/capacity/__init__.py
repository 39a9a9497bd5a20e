"""Measures the capacity curve of one replica: arrival rate against p95 latency over HTTP."""
