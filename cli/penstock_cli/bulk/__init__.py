"""Bulk work on one machine: a corpus from files to files."""
