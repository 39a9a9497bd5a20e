"""The S3 server of the runtime's tests."""

from tests.runtime.conftest import s3, s3_server

__all__ = ["s3", "s3_server"]
