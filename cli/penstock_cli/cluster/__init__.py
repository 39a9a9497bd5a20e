"""Commands about endpoints on a cluster."""
