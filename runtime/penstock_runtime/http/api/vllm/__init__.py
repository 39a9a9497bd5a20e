"""/classify."""
