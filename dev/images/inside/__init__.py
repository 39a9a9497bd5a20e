"""Scripts that run inside a build. Each is self-contained: it is mounted, not installed."""
