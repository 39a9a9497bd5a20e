"""Tasks turn requests into rows and the graph's outputs into answers, equal to transformers' pipelines."""
