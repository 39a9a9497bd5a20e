"""Model folders: fetching them from their sources, reading and checking their files."""
