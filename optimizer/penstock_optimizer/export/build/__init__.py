"""Writes ONNX graphs of encoders, without torch.

encoder           the graph of an encoder and its head, from its values (`export.transformer`)
operators         the blocks of a layer, in two flavours: fused for ONNX Runtime, plain for OpenVINO
attention_range   which tokens a token attends to
distance_scores   scores that depend on the distances between tokens (DeBERTa)
sparse            weights of the vocabulary (SPLADE)
graph             nodes and constants of a file
"""
