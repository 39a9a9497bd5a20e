"""The kinds of models that are optimised: encoders, decoders, models compiled for AWS Inferentia."""
