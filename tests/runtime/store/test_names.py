"""Addresses of stores and names of artefacts."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.artefact_store import Digest, StoreUri
from penstock.errors import ArtefactError, SettingError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("file:///var/lib/penstock/artefacts", "file:///var/lib/penstock/artefacts"),
        ("file:///var//lib/penstock/", "file:///var/lib/penstock"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        (" gs://my_bucket/x ", "gs://my_bucket/x"),
        ("az://container/x", "az://container/x"),
    ],
)
def test_an_address_is_written_in_one_way(text: str, expected: str) -> None:
    assert str(StoreUri.parse(text)) == expected
    assert StoreUri.parse(expected) == StoreUri.parse(text)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("/var/lib/penstock", "Did you mean file:///var/lib/penstock"),
        ("http://host/x", "Known forms: file:///absolute/path, s3://bucket/prefix"),
        ("file://relative/x", "Write file:///absolute/path"),
        ("s3:///x", "Write s3://bucket/prefix"),
        ("s3://key:secret@bucket/x", "credentials belong into the environment"),
        ("s3://bucket/../other", "Write s3://bucket/prefix"),
        ("", "Known forms"),
    ],
)
def test_an_invalid_address_is_an_error_with_a_remedy(text: str, remedy: str) -> None:
    with pytest.raises(SettingError, match="PENSTOCK_STORE_URI") as caught:
        StoreUri.parse(text)

    assert remedy in str(caught.value)


@pytest.mark.parametrize("text", ["file:///srv/artefacts", "s3://bucket", "az://container/x"])
def test_the_store_of_a_namespace_is_in_a_folder_of_the_store(text: str) -> None:
    own = StoreUri.parse(text).of_namespace("team-a")

    assert str(own) == f"{text}/namespaces/team-a"
    assert StoreUri.parse(str(own)) == own


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a/../b", "Team", "a.b", "-a", "a-", "a" * 64, "a\n"])
def test_a_name_that_no_namespace_can_have_leads_to_no_store(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a namespace"):
        StoreUri.parse("file:///srv/artefacts").of_namespace(name)


@given(st.binary())
def test_a_written_digest_is_parsed_back(content: bytes) -> None:
    digest = Digest.of(content)

    assert Digest.parse(str(digest)) == digest == Digest.parse(digest.hexadecimal)
    assert str(digest) == f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.mark.parametrize(
    "text", ["", "sha256:", "sha256:" + "g" * 64, "sha256:" + "a" * 63, "../" + "a" * 64, "A" * 64]
)
def test_an_invalid_digest_is_refused(text: str) -> None:
    with pytest.raises(ArtefactError, match="is no digest"):
        Digest.parse(text)
