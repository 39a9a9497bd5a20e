"""Reads a quantised ONNX graph as the steps of the native engine: `steps.native_graph`."""
