"""HTTP handlers of each API (Hugging Face, TEI, OpenAI, Cohere, Open Inference Protocol) over the predictor."""
