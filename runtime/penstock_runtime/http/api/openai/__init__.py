"""OpenAI's embeddings, models, chat completions and completions."""
