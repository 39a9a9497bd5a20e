"""What the APIs share: bodies, the model, text generation, conversations."""
