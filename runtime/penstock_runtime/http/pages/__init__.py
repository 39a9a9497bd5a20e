"""HTML pages of the server: playground and API reference."""
