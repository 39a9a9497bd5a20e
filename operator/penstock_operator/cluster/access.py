"""How the operator gets into the cluster: its service account inside one, a kubeconfig file outside."""

from __future__ import annotations

import os
from pathlib import Path

from kubernetes.aio import config
from kubernetes.aio.client import Configuration

from penstock.errors import SettingError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


async def load_configuration(kubeconfig: str = "", context: str = "") -> Configuration:
    """The configuration of the client: a named file, else the pod's service account, else `$KUBECONFIG`'s file.

    SettingError when there is none or it cannot be read.
    """
    configuration = Configuration()
    try:
        if not kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").exists():
            config.load_incluster_config(client_configuration=configuration)
        else:
            path = kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
            await config.load_kube_config(path, context=context or None, client_configuration=configuration)
    except (config.ConfigException, OSError, ValueError) as error:
        raise SettingError(
            f"no way into a cluster: {error}",
            field="KUBECONFIG",
            remedy="Run in a pod with a service account, or set KUBECONFIG to the file of a cluster",
        ) from error
    # Retries are ours (`penstock_operator.cluster.kubernetes`): the client's would hide 429s and multiply.
    configuration.retries = None
    configuration.connection_pool_maxsize = 64
    # Python 3.13 began to refuse certificates without RFC 5280's key identifiers, which not every cluster's have.
    configuration.disable_strict_ssl_verification = True
    return configuration
