"""Tasks that find parts of a text: entities, answers to questions."""
