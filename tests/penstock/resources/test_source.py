"""Source URLs: valid ones are parsed, and errors suggest the right form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SpecError
from penstock.resources.core import ModelSource, Scheme

DIGEST = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("text", "scheme", "location", "revision"),
    [
        ("hf://org/name", Scheme.HF, "org/name", "main"),
        ("hf://name", Scheme.HF, "name", "main"),
        ("hf://org/name/model.Q8_0.gguf", Scheme.HF, "org/name/model.Q8_0.gguf", "main"),
        ("hf://org/name/8-bits/x.gguf@v1", Scheme.HF, "org/name/8-bits/x.gguf", "v1"),
        ("hf://org/name@v1.2", Scheme.HF, "org/name", "v1.2"),
        ("hf://org/name@refs/pr/1", Scheme.HF, "org/name", "refs/pr/1"),
        (f"hf://org/name@{'0' * 40}", Scheme.HF, "org/name", "0" * 40),
        ("s3://bucket/a/b", Scheme.S3, "bucket/a/b", None),
        ("s3://bucket/a/b/", Scheme.S3, "bucket/a/b", None),
        ("s3://bucket", Scheme.S3, "bucket", None),
        ("s3://bucket/with@at", Scheme.S3, "bucket/with@at", None),
        ("gs://bucket/a", Scheme.GS, "bucket/a", None),
        ("az://container/a", Scheme.AZ, "container/a", None),
        ("oci://ghcr.io/org/name", Scheme.OCI, "ghcr.io/org/name", "latest"),
        ("oci://localhost:5000/a/b-c:v1.2_x", Scheme.OCI, "localhost:5000/a/b-c", "v1.2_x"),
        (f"oci://docker.io/ai/x@{DIGEST}", Scheme.OCI, "docker.io/ai/x", DIGEST),
        (f"oci://registry:5000/x:v1@{DIGEST}", Scheme.OCI, "registry:5000/x", f"v1@{DIGEST}"),
        ("pvc://claim-1/a/b", Scheme.PVC, "claim-1/a/b", None),
        ("pvc://claim", Scheme.PVC, "claim", None),
        ("file:///models/x", Scheme.FILE, "/models/x", None),
        ("file:///", Scheme.FILE, "/", None),
        ("file:///with blank/ünï", Scheme.FILE, "/with blank/ünï", None),
        ("pkg://package.sub/folder", Scheme.PKG, "package.sub/folder", None),
        ("pkg://package", Scheme.PKG, "package", None),
    ],
)
def test_sources_are_parsed(text: str, scheme: Scheme, location: str, revision: str | None) -> None:
    source = ModelSource.parse(text)
    assert source == ModelSource(scheme, location, revision)
    assert ModelSource.parse(str(source)) == source


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("", "Known forms: hf://organisation/name@revision, s3://bucket/path,"),
        ("minilm", "Known forms: "),
        ("org/name", "Did you mean hf://org/name?"),
        ("org/name@v1", "Did you mean hf://org/name@v1?"),
        ("https://huggingface.co/org/name", "Did you mean hf://org/name?"),
        ("https://huggingface.co/org/name/", "Did you mean hf://org/name?"),
        ("https://huggingface.co/org/name/tree/v1", "Did you mean hf://org/name@v1?"),
        ("https://example.org/model.zip", "Known forms: "),
        ("/models/x", "Did you mean file:///models/x?"),
        ("./models/x", "Write a local folder with its absolute path: file:///absolute/path"),
        ("~/models", "Write a local folder with its absolute path"),
        ("file://models/x", "Write the absolute path behind file://, such as file:///models/x"),
        ("file:/models/x", "Did you mean file:///models/x?"),
        ("file://", "Write file:///absolute/path"),
        ("HF://org/name", "Did you mean hf://org/name?"),
        ("hf:org/name", "Did you mean hf://org/name?"),
        ("hf:/org/name", "Did you mean hf://org/name?"),
        ("huggingface://org/name", "Did you mean hf://org/name?"),
        ("gcs://bucket/x", "Did you mean gs://bucket/x?"),
        ("abfs://container/x", "Did you mean az://container/x?"),
        ("s3a://bucket/x", "Did you mean s3://bucket/x?"),
        ("pkgs://package/x", "Did you mean pkg://package/x?"),
        ("ftp://server/x", "Known forms: "),
        ("https://huggingface.co/org/name/blob/main/a/x.gguf", "Did you mean hf://org/name/a/x.gguf@main?"),
        ("hf://org/name/../x.gguf", "Write hf://organisation/name@revision"),
        ("hf://org/name//x.gguf", "Write hf://organisation/name@revision"),
        ("hf://org/name/extra", "Write hf://organisation/name@revision"),
        ("hf://org/name@", "Write hf://organisation/name@revision"),
        ("hf://org/name@../x", "Write hf://organisation/name@revision"),
        ("hf://org/näme", "Write hf://organisation/name@revision"),
        ("hf://", "Write hf://organisation/name@revision"),
        ("hf://../x", "Write hf://organisation/name@revision"),
        ("s3://bucket/../other", "Write s3://bucket/path"),
        ("s3:///path", "Write s3://bucket/path"),
        ("pvc://Claim/x", "Write pvc://claim/path"),
        ("oci://ghcr.io", "Write oci://registry/repository:tag"),
        ("oci://ai/smollm2", "Write oci://registry/repository:tag"),
        ("oci://user:password@ghcr.io/a", "Write oci://registry/repository:tag"),
        ("oci://ghcr.io/a/../b", "Write oci://registry/repository:tag"),
        ("oci://ghcr.io/a:", "Write oci://registry/repository:tag"),
        ("oci://ghcr.io/a@sha256:12", "Write oci://registry/repository:tag"),
        ("oci://169.254.169.254:80:1/a", "Write oci://registry/repository:tag"),
        ("pkg://my-package/x", "Write pkg://import_name/folder"),
        ("file:///a/../b", "Write file:///absolute/path"),
        ("s3://bucket/a\nb", "Write s3://bucket/path"),
    ],
)
def test_an_invalid_source_is_an_error_with_a_suggestion(text: str, remedy: str) -> None:
    with pytest.raises(SpecError) as caught:
        ModelSource.parse(text)
    assert caught.value.remedy.startswith(remedy)
    assert caught.value.field == "spec.model"
    assert repr(text) in caught.value.message


STARTS = [*(f"{scheme.value}://" for scheme in Scheme), "", "hf:", "https://huggingface.co/", "S3://"]
NEARLY = st.tuples(st.sampled_from(STARTS), st.text("ab/.@-_ é\n", max_size=12)).map("".join)


@given(st.one_of(st.text(max_size=30), NEARLY))
def test_any_text_is_a_source_that_reads_back_or_a_spec_error_with_a_remedy(text: str) -> None:
    try:
        source = ModelSource.parse(text)
    except SpecError as error:
        assert error.remedy  # noqa: PT017 - either outcome is right
    else:
        assert ModelSource.parse(str(source)) == source
        assert ".." not in source.location.split("/")
        assert "\n" not in str(source)
