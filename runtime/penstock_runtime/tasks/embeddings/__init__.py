"""Tasks that give vectors: of texts, of tokens, of words of the vocabulary; and the similarity of texts."""
