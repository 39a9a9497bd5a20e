"""Small GLiNER folders, and the answers of the package gliner to them."""
