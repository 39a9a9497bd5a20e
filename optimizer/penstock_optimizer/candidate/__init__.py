"""Builds, checks and times one candidate recipe in a worker process."""
