"""Engines run graphs. They are siblings that never import each other;
each heavy library is imported in one of them only."""
