"""Each namespace has an artefact store of its own: pods see no other, and read what the status of their model names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.artefact_store import Digest, StoreUri
from penstock.resources.job_summary import Summary
from penstock_operator.facts.installation import PlanSettings, StoreVolume
from penstock_operator.facts.tenants import AllowList
from penstock_runtime.store import open_store
from penstock_runtime.store.fetch import digest_of, fault
from tests.operator.endpoint.kube import BASELINE, RESULT, SETTINGS, Kube, reference, result
from tests.runtime.pod.pods import Pod
from tests.runtime.store.artefacts import names, write_artefact

Json = dict[str, Any]
SHARED = AllowList(shared_artefacts=True)
CLAIM = replace(SETTINGS, store_volume=StoreVolume(claim="artefacts"))
FOLDER = replace(SETTINGS, store_volume=StoreVolume(host_path="/srv/artefacts"))
S3 = replace(SETTINGS, store_uri="s3://models/here", store_secret="s3")
WHOLE = SETTINGS.whole_store
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount and become another user")


def job_of(kube: Kube) -> Json:
    return kube.objects["Job", kube.job]


def pod_of(value: Json) -> Json:
    pod: Json = value["spec"]["template"]["spec"]
    return pod


def variable(value: Json, name: str) -> str:
    (container,) = pod_of(value)["containers"]
    (found,) = [entry["value"] for entry in container["env"] if entry["name"] == name]
    return str(found)


def store_mount(value: Json) -> Json:
    (container,) = pod_of(value)["containers"]
    (found,) = [mount for mount in container["volumeMounts"] if mount["name"] == "store"]
    return dict(found)


@pytest.mark.parametrize("settings", [SETTINGS, FOLDER, CLAIM], ids=["address", "hostPath", "claim"])
def test_of_a_volume_pods_see_only_the_folder_of_their_namespace_and_serving_pods_cannot_write(
    settings: PlanSettings,
) -> None:
    kube = Kube(settings=settings).optimised()

    for value, writes in ((job_of(kube), True), (kube.deployment, False)):
        assert store_mount(value) == {
            "name": "store",
            "mountPath": "/var/lib/penstock/artefacts/namespaces/a",
            "subPath": "namespaces/a",
            "readOnly": not writes,
        }
        assert variable(value, "PENSTOCK_STORE_URI") == "file:///var/lib/penstock/artefacts/namespaces/a"


def test_in_an_object_store_pods_have_the_prefix_of_their_namespace() -> None:
    kube = Kube(settings=S3).optimised()

    for value in (job_of(kube), kube.deployment):
        assert variable(value, "PENSTOCK_STORE_URI") == "s3://models/here/namespaces/a"


def test_the_administrator_may_let_namespaces_share_one_store() -> None:
    kube = Kube(settings=replace(SETTINGS, allowed=SHARED)).optimised()

    for value in (job_of(kube), kube.deployment):
        assert variable(value, "PENSTOCK_STORE_URI") == str(WHOLE)
        assert "subPath" not in store_mount(value)


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        ("s3://models/here/namespaces/b/" + "c" * 64, S3),
        ("s3://models//./here/namespaces/b", S3),
        ("s3://models/here", S3),
        ("pvc://artefacts/namespaces/b/" + "c" * 64, CLAIM),
        ("pvc://artefacts", CLAIM),
        ("file:///srv/artefacts/namespaces/b", FOLDER),
        ("file:///var/lib/penstock/artefacts/" + "c" * 64, SETTINGS),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_model_cannot_be_read_from_the_artefacts_of_another_namespace(
    source: str, settings: PlanSettings, shared: bool
) -> None:
    allowed = AllowList(file_prefixes=("/srv", "/var/lib/penstock"), shared_artefacts=shared)
    kube = Kube(model=source, settings=replace(settings, allowed=allowed))
    made = kube.reconcile()

    (accepted,) = [one for one in made.status["conditions"] if one["type"] == "Accepted"]
    if shared:
        assert accepted["status"] == "True"
        return
    assert accepted["reason"] == "SourceNotAllowed"
    assert "is in the artefact store" in accepted["message"]
    assert kube.objects == {}


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        ("s3://models/elsewhere", S3),
        ("s3://models/here-too", S3),
        ("gs://models/here", S3),
        ("pvc://models/namespaces/b", CLAIM),
        ("pvc://artefacts", FOLDER),
        ("file:///srv/models", FOLDER),
        ("file:///var/lib/penstock/artefacts", CLAIM),
    ],
)
def test_a_model_elsewhere_is_allowed(source: str, settings: PlanSettings) -> None:
    allowed = AllowList(file_prefixes=("/srv", "/var/lib/penstock"))
    made = Kube(model=source, settings=replace(settings, allowed=allowed)).reconcile()

    assert [one["status"] for one in made.status["conditions"] if one["type"] == "Accepted"] == ["True"]


def status_in(kube: Kube, store: StoreUri) -> None:
    """As if the artefacts in the status had been published in another store."""
    (model,) = [value for (kind, _), value in kube.objects.items() if kind == "OptimizedModel"]
    for name in ("artefact", "baseline"):
        model["status"][name]["uri"] = store.of(Digest.parse(model["status"][name]["digest"]))


def test_an_artefact_of_a_version_without_stores_of_namespaces_is_served_and_pods_see_no_other() -> None:
    kube = Kube().optimised()
    status_in(kube, WHOLE)
    kube.reconcile()

    folder = "a" * 64
    assert kube.artefact == RESULT
    assert variable(kube.deployment, "PENSTOCK_STORE_URI") == str(WHOLE)
    assert store_mount(kube.deployment) == {
        "name": "store",
        "mountPath": f"{WHOLE.location}/{folder}",
        "subPath": folder,
        "readOnly": True,
    }
    assert len([kind for kind, _ in kube.objects if kind == "Job"]) == 1, "it is not optimised again"
    kube.edit(optimization={"mode": "Pinned", "artefact": RESULT})
    kube.reconcile()
    assert store_mount(kube.deployment)["subPath"] == folder


def test_an_artefact_in_the_store_of_a_namespace_is_served_after_namespaces_were_allowed_to_share() -> None:
    kube = Kube().optimised()
    before = kube.template_hash
    kube.settings = replace(SETTINGS, allowed=replace(SETTINGS.allowed, shared_artefacts=True))
    kube.reconcile()

    assert kube.template_hash == before


@pytest.mark.parametrize(
    "elsewhere",
    [WHOLE, WHOLE.of_namespace("b"), StoreUri.parse("file:///var/lib/penstock"), StoreUri.parse("s3://other")],
    ids=str,
)
def test_a_job_cannot_have_an_artefact_of_another_namespace_served(elsewhere: StoreUri) -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_runs()
    foreign, graph = reference(RESULT, store=elsewhere), reference(BASELINE, store=elsewhere)
    kube.job_ends(Summary(succeeded=True, artefact=foreign, baseline=graph, result=result()).to_message())
    kube.reconcile()

    (model,) = [value for (kind, _), value in kube.objects.items() if kind == "OptimizedModel"]
    assert model["status"]["failure"]["reason"] == "ResultLost"
    assert "did not publish its result in file:///var/lib/penstock/artefacts/namespaces/a" in json.dumps(model)
    assert not {"artefact", "baseline"} & set(model["status"])
    assert ("Deployment", kube.name) not in kube.objects
    kube.pass_by(60)
    kube.reconcile()
    assert len([kind for kind, _ in kube.objects if kind == "Job"]) == 2, "it is tried again"


ATTACK = """
import json, os, sys
from pathlib import Path
own, digest = Path(sys.argv[1]), sys.argv[2]
os.setgroups([65532]); os.setgid(65532); os.setuid(65532)
reached = []

def attempt(name, action):
    try:
        action()
    except OSError:
        return
    reached.append(name)

store = own.parent.parent if own.parent.name == "namespaces" else own
ways = [own / ".." / "a", own / ".." / "namespaces" / "a", store / "namespaces" / "a"]
(own / "link").symlink_to("../a")
(own / digest).symlink_to("../a/" + digest)
ways += [own / "link", own / "namespaces" / "a"]
for folder in ways:
    attempt(f"read {folder}", lambda: (folder / digest / "config.json").read_bytes())
    attempt(f"overwrite {folder}", lambda: (folder / digest / "manifest.json").write_text("{}"))
    attempt(f"delete {folder}", lambda: (folder / digest).rename(folder / "gone"))
    attempt(f"add {folder}", lambda: (folder / ("f" * 64)).mkdir())
attempt("write through a link", lambda: (own / digest / "manifest.json").write_text("{}"))
print(json.dumps(reached))
"""
"""What a job that runs foreign code can try on the volume: `own` is where the store is mounted."""

FETCH = """
import os, sys
from pathlib import Path
from penstock.artefact_store import Digest, StoreUri
from penstock_runtime.store import open_store
from penstock_runtime.store.fetch import fault
os.setgroups([65532]); os.setgid(65532); os.setuid(65532)
store, digest = open_store(StoreUri.parse(sys.argv[2])), Digest.parse(sys.argv[3])
print(repr(fault(store.fetch(digest, Path(sys.argv[4])), digest)))
print([stored.digest == digest for stored in store.entries()])
try:
    Path(store.uri.location, digest.hexadecimal, "manifest.json").write_text("{}")
except OSError as error:
    print(error.strerror)
"""


def in_pod(value: Json, node: Path, code: str, *words: object) -> str:
    """Run Python with the mounts of a pod, as a kubelet makes them, and without the volume itself; its output."""
    mount = store_mount(value)
    source, point = node / mount.get("subPath", ""), Path(mount["mountPath"])
    for folder in reversed([source, *source.parents]):
        if folder.is_relative_to(node) and not folder.exists():  # with the mode of the volume, as the kubelet does
            folder.mkdir()
            folder.chmod(0o2775)
    point.mkdir(parents=True, exist_ok=True)
    script = (
        f"mount --make-rprivate / && mount --bind {source} {point}"
        + (f" && mount -o remount,bind,ro {point}" if mount["readOnly"] else "")
        + f' && mount -t tmpfs tmpfs {node} && exec "$@"'
    )
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", code, str(point), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can reach; pytest's own is for its owner alone."""
    with tempfile.TemporaryDirectory(prefix="penstock-store-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def node(place: Path) -> Path:
    """The folder of a node, as the chart prepares it."""
    folder = place / "node"
    folder.mkdir()
    os.chown(folder, 65532, 65532)
    folder.chmod(0o2775)
    return folder


def on_node(node: Path, namespace: str) -> Kube:
    """An endpoint of a namespace, with the store in that folder."""
    settings = replace(
        SETTINGS, store_uri=f"file://{node.parent / 'mounted'}", store_volume=StoreVolume(host_path=str(node))
    )
    kube = Kube(settings=settings)
    kube.endpoint["metadata"]["namespace"] = namespace
    kube.reconcile()
    return kube


def published(node: Path, namespace: str, artefact: Path) -> Digest:
    """Publish an artefact as the jobs of a namespace do; empty: as those of versions without stores of namespaces."""
    whole = StoreUri.parse(f"file://{node}")
    digest = open_store(whole.of_namespace(namespace) if namespace else whole).publish(artefact).digest
    for path in node.rglob("*"):
        os.chown(path, 65532, 65532)
    return digest


@needs_root
@pytest.mark.parametrize("mounted", ["the folder of the namespace", "the whole volume"])
def test_a_job_of_one_namespace_cannot_reach_the_artefacts_of_another_on_a_volume(mounted: str, node: Path) -> None:
    artefact = write_artefact(node.parent / "artefact")
    digest = published(node, "a", artefact)
    job = job_of(on_node(node, "b"))
    if mounted == "the whole volume":  # as before: then the attack works
        (container,) = pod_of(job)["containers"]
        container["volumeMounts"][0] = {**store_mount(job), "mountPath": str(node.parent / "mounted"), "subPath": ""}

    reached = json.loads(in_pod(job, node, ATTACK, digest.hexadecimal))

    folder = node / "namespaces" / "a"
    if mounted == "the whole volume":
        assert {way.partition(" ")[0] for way in reached} == {"overwrite", "delete", "add", "read"}
    else:
        assert reached == []
        assert fault(folder / digest.hexadecimal, digest) == ""
        assert names(folder) == {f"{digest.hexadecimal}/{name}" for name in names(artefact)}


@needs_root
@pytest.mark.parametrize("of", ["a", ""], ids=["the store of the namespace", "a version without such stores"])
def test_a_serving_pod_reads_the_artefact_of_its_namespace_and_cannot_change_it(of: str, node: Path) -> None:
    digest = published(node, of, write_artefact(node.parent / "artefact"))
    published(node, "b" if of else "", write_artefact(node.parent / "artefact-of-others", key="b"))
    kube = on_node(node, "a")
    kube.job_succeeds(artefact=str(digest))
    kube.reconcile()
    if not of:
        status_in(kube, kube.settings.whole_store)
        kube.reconcile()
    cache = node.parent / "cache"
    cache.mkdir()
    os.chown(cache, 65532, 65532)

    uri = variable(kube.deployment, "PENSTOCK_STORE_URI")
    output = in_pod(kube.deployment, node, FETCH, uri, digest.hexadecimal, cache)

    assert output.splitlines() == ["''", "[True]", "Read-only file system"]


def test_a_pod_refuses_an_artefact_that_is_not_the_one_in_the_status_of_its_model(tmp_path: Path) -> None:
    """From the status of the OptimizedModel, through the Deployment, to the process of the pod."""
    settings = replace(SETTINGS, store_uri=f"file://{tmp_path / 'store'}")
    store = open_store(settings.store_of("a"))
    digest = store.publish(write_artefact(tmp_path / "right")).digest
    kube = Kube(settings=settings)
    kube.reconcile()
    kube.job_succeeds(artefact=str(digest))
    kube.reconcile()
    # A job of the namespace puts another artefact in its place, complete and with a manifest of its own.
    folder = Path(settings.store_of("a").location, digest.hexadecimal)
    folder.rename(tmp_path / "removed")
    write_artefact(folder, key="b")
    assert fault(folder, digest_of(folder)) == ""

    wanted = ("PENSTOCK_ARTEFACT", "PENSTOCK_STORE_URI", "PENSTOCK_TASK")
    with Pod(tmp_path / "pod", **{name: variable(kube.deployment, name) for name in wanted}) as pod:
        assert pod.ended() == 1

    assert pod.last_words["reason"] == "ArtefactDamaged"
    assert "manifest.json is not the one that was published" in pod.last_words["message"]
