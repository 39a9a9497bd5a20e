"""Fetches models from the hub, registries, object stores, volumes, folders and packages into a local folder."""
