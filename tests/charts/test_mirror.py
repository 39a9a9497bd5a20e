"""The script for installations without a network: it copies the chart's images into a registry, in a network namespace
that has nothing but the loopback interface."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.charts.helm import CHART, ONE_NODE, Helm

SCRIPT = CHART.parent / "mirror-images.sh"
REGISTRY = "127.0.0.1:5000"
CLOSED = f"""
set -eu
ip link set lo up
! timeout 5 sh -c 'exec 3<>/dev/tcp/192.0.2.1/80' 2>/dev/null
docker-registry serve registry.yml >registry.log 2>&1 &
registry=$!
trap 'kill $registry' EXIT
for _ in $(seq 600); do curl --silent --fail http://{REGISTRY}/v2/ >/dev/null && break; sleep 0.1; done
"""


def blob(layout: Path, content: bytes) -> dict[str, object]:
    """Add a blob to an OCI layout; its descriptor without a media type."""
    digest = hashlib.sha256(content).hexdigest()
    (layout / "blobs/sha256").mkdir(parents=True, exist_ok=True)
    (layout / "blobs/sha256" / digest).write_bytes(content)
    return {"digest": f"sha256:{digest}", "size": len(content)}


def image(folder: Path, name: str) -> str:
    """An OCI archive as `make images` writes it, with one small layer; returns the digest of its manifest."""
    layout = folder / "layout"
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w") as tar:
        member = tarfile.TarInfo("name")
        member.size = len(name)
        tar.addfile(member, io.BytesIO(name.encode()))
    kind = "application/vnd.oci.image."
    layer = blob(layout, inner.getvalue())
    configuration = {
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}manifest.v1+json",
        "config": {"mediaType": f"{kind}config.v1+json", **blob(layout, json.dumps(configuration).encode())},
        "layers": [{"mediaType": f"{kind}layer.v1.tar", **layer}],
    }
    described = {"mediaType": f"{kind}manifest.v1+json", **blob(layout, json.dumps(manifest).encode())}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    with tarfile.open(folder / f"{name}-0123456789abcdef.oci.tar", "w") as tar:
        for path in sorted(layout.iterdir()):
            tar.add(path, path.name)
    shutil.rmtree(layout)
    return str(described["digest"])


def names() -> list[str]:
    return (CHART / "images.txt").read_text().split()


def test_the_list_has_every_image_that_a_rendered_chart_names(helm: Path, tmp_path: Path) -> None:
    text = Helm(helm).run("template", "penstock", str(CHART), values={"store": ONE_NODE}).stdout
    found = set(re.findall(r"localhost/penstock-[a-z]+:[\w.]+", text))

    listed = subprocess.run([SCRIPT, "list", CHART], capture_output=True, text=True, check=True).stdout.split()

    assert found == set(listed) == set(names())
    assert len(listed) == 4
    subprocess.run([helm, "package", CHART, "--destination", tmp_path], check=True, capture_output=True)
    (package,) = tmp_path.glob("*.tgz")
    packed = subprocess.run([SCRIPT, "list", package], capture_output=True, text=True, check=True)
    assert packed.stdout.split() == listed


@pytest.mark.parametrize("words", [(), ("push", "x"), ("send", "a", "b"), ("save", "a")])
def test_wrong_words_print_how_to_use_it(words: tuple[str, ...]) -> None:
    run = subprocess.run([SCRIPT, *words], capture_output=True, text=True, check=False)

    assert run.returncode != 0
    assert "mirror-images.sh push" in run.stderr or "has no images.txt" in run.stderr


def test_without_a_network_all_images_reach_the_registry_with_their_digests(helm: Path, tmp_path: Path) -> None:
    for tool in ("skopeo", "docker-registry", "unshare", "ip", "curl"):
        if os.geteuid() != 0 or shutil.which(tool) is None:
            pytest.skip(f"it needs root and {tool}: dev/tools/install-system.sh")
    folder = tmp_path / "saved"
    folder.mkdir()
    digests = {name: image(folder, name.split("/")[-1].split(":")[0]) for name in names()}
    settings = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}},
        "http": {"addr": REGISTRY},
    }
    (tmp_path / "registry.yml").write_text(yaml.safe_dump(settings))
    values = {"images": {"registry": f"{REGISTRY}/penstock"}, "store": ONE_NODE}
    rendered = Helm(helm).run("template", "penstock", str(CHART), values=values).stdout
    wanted = sorted(set(re.findall(rf"{REGISTRY}/penstock/penstock-[a-z]+:[\w.]+", rendered)))
    looks = "\n".join(
        f"skopeo inspect --tls-verify=false --format '{{{{.Digest}}}}' docker://{name}" for name in wanted
    )
    push = f"SKOPEO_FLAGS=--dest-tls-verify=false {SCRIPT} push {CHART} {folder} {REGISTRY}/penstock >&2"

    run = subprocess.run(
        ["unshare", "--net", "bash", "-c", f"{CLOSED}\n{push}\n{looks}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert run.returncode == 0, run.stderr
    by_name = {f"{REGISTRY}/penstock/{name.split('/')[-1]}": digest for name, digest in digests.items()}
    assert run.stdout.split() == [by_name[name] for name in wanted]
    push_words = (SCRIPT, "push", CHART, tmp_path, REGISTRY)
    missing = subprocess.run(push_words, capture_output=True, text=True, check=False)
    assert missing.returncode == 1
    assert "has no image penstock-operator" in missing.stderr
