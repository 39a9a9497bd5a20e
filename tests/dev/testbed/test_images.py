"""Images are archives as the OCI describes them."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile

from testbed.images import Image

IMAGE = Image("localhost/tool:2", {"bin/tool": b"#!/bin/true"}, {"bin/other": "tool"}, ["/bin/tool"])


def members(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {entry.name: file.read() for entry in tar if (file := tar.extractfile(entry)) is not None}


def test_same_image_is_the_same_archive() -> None:
    assert IMAGE.archive() == IMAGE.archive()


def test_every_blob_is_named_by_its_content_and_reached_from_the_index() -> None:
    files = members(IMAGE.archive())
    blobs = {name.removeprefix("blobs/sha256/"): data for name, data in files.items() if name.startswith("blobs/")}

    (described,) = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(blobs[described["digest"].removeprefix("sha256:")])

    assert all(hashlib.sha256(data).hexdigest() == name for name, data in blobs.items())
    reached = [described, manifest["config"], *manifest["layers"]]
    assert {each["digest"].removeprefix("sha256:") for each in reached} == set(blobs)
    assert all(each["size"] == len(blobs[each["digest"].removeprefix("sha256:")]) for each in reached)


def test_archive_has_the_name_of_the_image() -> None:
    (described,) = json.loads(members(IMAGE.archive())["index.json"])["manifests"]

    assert described["annotations"] == {
        "io.containerd.image.name": "localhost/tool:2",
        "org.opencontainers.image.ref.name": "2",
    }
