"""/predict, and the routes for operation."""
