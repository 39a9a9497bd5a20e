"""The pages that a browser is given, each whole in itself."""
