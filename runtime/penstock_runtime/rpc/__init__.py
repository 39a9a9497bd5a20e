"""The Open Inference Protocol v2 over gRPC. The extra `grpc` installs its imports."""
