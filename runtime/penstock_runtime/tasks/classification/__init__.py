"""Tasks that score texts: labels of a model, labels of a request, documents for a query."""
