"""The stub servers of the tests of `penstock bench`, for the tests of the benchmarks."""

from tests.bench.conftest import StartStub, client, start_stub, tiny_model

__all__ = ["StartStub", "client", "start_stub", "tiny_model"]
