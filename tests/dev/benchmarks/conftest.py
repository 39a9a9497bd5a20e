"""The fixtures of the tests of `penstock bench`, for the tests of the benchmarks."""

from tests.bench.conftest import StartStub, artefact, client, start_stub, tiny_endpoint, tiny_model

__all__ = ["StartStub", "artefact", "client", "start_stub", "tiny_endpoint", "tiny_model"]
