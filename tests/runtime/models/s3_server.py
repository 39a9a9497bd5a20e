"""A real S3 server for the tests: versitygw, built once from its Go module and kept in ~/.cache/penstock/bin."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

VERSION = "v1.8.0"
MODULE = "github.com/versity/versitygw/cmd/versitygw"
ACCESS_KEY, SECRET_KEY = "penstock-test", "penstock-test-secret"
START_SECONDS = 120


@dataclass(frozen=True)
class S3:
    """A running server; buckets are folders below `root`."""

    url: str
    root: Path

    def environment(self) -> dict[str, str]:
        """What AWS's own libraries read."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def allow(self, bucket: str, *rules: tuple[list[str], str, str]) -> None:
        """Set the policy of a bucket: (users, action, bucket or objects) for each permission."""
        statements = [
            {"Effect": "Allow", "Principal": {"AWS": users}, "Action": [action], "Resource": [f"arn:aws:s3:::{on}"]}
            for users, action, on in rules
        ]
        policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
        words = ["curl", "--silent", "--fail", "--aws-sigv4", "aws:amz:us-east-1:s3", "--request", "PUT"]
        words += ["--user", f"{ACCESS_KEY}:{SECRET_KEY}", "--header", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]
        subprocess.run([*words, "--data-binary", policy, f"{self.url}/{bucket}?policy="], check=True)


def versitygw() -> Path:
    """The server's binary, building it (3 CPU minutes) when it is not cached; a failed build is a failed test."""
    binary = Path.home() / ".cache" / "penstock" / "bin" / f"versitygw-{VERSION}"
    if binary.is_file():
        return binary
    if shutil.which("go") is None:
        pytest.skip(f"no Go here to build versitygw {VERSION}, the S3 server of these tests")
    binary.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=binary.parent) as folder:
        build = subprocess.run(
            ["go", "install", "-ldflags=-s", f"{MODULE}@{VERSION}"],
            env={**os.environ, "GOBIN": folder},
            capture_output=True,
            text=True,
            check=False,
        )
        if build.returncode != 0:
            pytest.fail(f"versitygw {VERSION} could not be built:\n{build.stderr[-2000:]}")
        Path(folder, "versitygw").replace(binary)
    return binary


def free_port() -> int:
    """A loopback port without a listener."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


@contextmanager
def running_s3(root: Path, port: int | None = None, *, users: dict[str, str] | None = None) -> Iterator[S3]:
    """Serve the folders in `root` as buckets on a loopback port (None: a free one) until the block ends.

    `users`: access keys and secret keys besides the server's own, which may do what bucket policies allow.
    """
    port = port or free_port()
    log = root.parent / "versitygw.log"
    options = ["--port", f"127.0.0.1:{port}"]
    if users is not None:
        accounts = root.parent / "accounts"
        accounts.mkdir()
        listed = {access: {"access": access, "secret": secret, "role": "user"} for access, secret in users.items()}
        (accounts / "users.json").write_text(json.dumps({"accessAccounts": listed}))
        options += ["--iam-dir", str(accounts)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [versitygw(), *options, "posix", str(root)],
            env={**os.environ, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for_port(port, process, log)
            yield S3(f"http://127.0.0.1:{port}", root)
        finally:
            process.terminate()
            process.wait(timeout=START_SECONDS)


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers: it has no other sign of being ready."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.fail(f"the server did not start:\n{log.read_text()[-2000:]}")
