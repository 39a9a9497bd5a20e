"""Fetches models from the hub, object stores, volumes, folders and Python packages into a local folder."""
