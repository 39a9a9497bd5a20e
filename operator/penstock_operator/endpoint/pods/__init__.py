"""Pods of jobs and runtimes: their common template, network and credentials, where they fit, and their reports."""
