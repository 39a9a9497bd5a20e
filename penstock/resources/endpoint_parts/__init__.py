"""The parts of a ModelEndpoint's spec that are longer than a few fields."""
