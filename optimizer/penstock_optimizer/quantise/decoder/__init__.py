"""Writes decoders (`export.transformer.Decoder`) with quantised weights, for OpenVINO and for the native engine."""
