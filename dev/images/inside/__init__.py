"""What runs inside a build. Each file stands alone: it is mounted, not installed."""
