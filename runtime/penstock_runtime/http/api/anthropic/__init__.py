"""Messages of Anthropic."""
