"""What an optimisation job's pod is told."""

from __future__ import annotations

from pathlib import Path

from penstock.settings import setting
from penstock_runtime.pod.termination import DEFAULT_LOG
from penstock_runtime.variables import Variables


class JobVariables(Variables):
    """An optimisation job."""

    spec: str = setting(
        "", "The spec of the OptimizedModel: JSON itself, or the path of a file that holds it. Must be given."
    )
    store_uri: str = setting(
        "",
        "The artefact store to publish into: `file:///path`, `s3://bucket/prefix`, `gs://`, `az://` "
        "(docs/reference/artefact-store.md). Credentials come by the variables of the store's own library. "
        "Must be given.",
    )
    work: Path = setting(
        Path("/var/lib/penstock/work"),
        "Folder for the model and for what is made of it. A job that finds it as an interrupted one left it goes on "
        "from there.",
    )
    texts: Path | None = setting(
        None,
        "File with the texts of spec.workload.textsFrom, one a line: the value of the ConfigMap's key, mounted.",
    )
    termination_log: Path = setting(
        DEFAULT_LOG, "File that the result or the failure is written to as JSON of at most 4,096 bytes."
    )
