"""Model folders: where they come from, what is in them, and what is refused."""
