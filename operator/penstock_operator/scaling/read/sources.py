"""The Prometheus to query for an endpoint: its own, with the access of its Secret, or the installation's."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.resources.endpoint_parts.scaling import PrometheusQueries
from penstock_operator.cluster.api import SECRET, ClusterPort
from penstock_operator.cluster.errors import ClusterError, Forbidden
from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control.cache import ClusterCache
from penstock_operator.endpoint.prometheus_urls import url_problem
from penstock_operator.scaling.read.prometheus import OwnPrometheus, PrometheusAccess, PrometheusSource
from penstock_operator.scaling.read.target import ScalingTarget

SECRET_SECONDS = 60.0
"""A Secret is read again after this time: tokens are renewed."""
MAX_SECRETS = 1_000
"""Secrets that are kept, or why they cannot be used. Users choose their names."""
CONSENT_LABEL = "penstock.dev/prometheus"
"""Label (value `true`) that a Secret must have to be read: a user who may create ModelEndpoints may lack the right
to read Secrets, and must not be able to have their content sent to a URL."""
URL_ANNOTATION = "penstock.dev/prometheus-url"
"""Annotation of such a Secret: the only URL that it is sent to. The endpoint names the URL, and its author may not be
the one who may read the Secret."""


@dataclass(frozen=True)
class _SecretAccess:
    """The content of a Secret."""

    url: str
    """The URL that it is for."""
    access: PrometheusAccess


def _access_of(value: dict[str, object] | None, name: str) -> _SecretAccess | str:
    if value is None:
        return f"there is no Secret {name}"
    metadata, data = value.get("metadata"), value.get("data")
    labels = metadata.get("labels") if isinstance(metadata, dict) else None
    if not isinstance(labels, dict) or labels.get(CONSENT_LABEL) != "true":
        return f"the Secret {name} is not meant for this: give it the label {CONSENT_LABEL}: 'true'"
    try:
        access = PrometheusAccess.from_secret(data if isinstance(data, dict) else {})
        access.trust()
    except ValueError as error:
        return f"the Secret {name} cannot be used: {error}"
    annotations = metadata.get("annotations") if isinstance(metadata, dict) else None
    url = annotations.get(URL_ANNOTATION) if isinstance(annotations, dict) else None
    return _SecretAccess(url if isinstance(url, str) else "", access)


class PrometheusSources:
    """Reads Secrets, and keeps them for a minute."""

    def __init__(self, port: ClusterPort, cache: ClusterCache, default: OwnPrometheus | None) -> None:
        """`default`: the installation's Prometheus."""
        self._port = port
        self._cache = cache
        self._default = default
        self._secrets: dict[ObjectKey, tuple[float, _SecretAccess | str]] = {}

    async def find(self, target: ScalingTarget, now: float) -> PrometheusSource | str | None:
        """The Prometheus to query for this endpoint; None: scrape its pods; text: why it cannot be queried, as a
        clause."""
        asked = target.prometheus
        if asked.queries != PrometheusQueries() and (asked.url is None or asked.secret_name is None):
            # With the operator's access a user would read the metrics of all namespaces.
            return (
                "scaling.metrics.prometheus.queries need the endpoint's own access: add url and secretName, or leave "
                "the queries out"
            )
        if asked.url is None and asked.secret_name is None:
            if self._default is None or not self._default.url:
                return None
            return self._default.source()
        url = asked.url or (self._default.url if self._default is not None else "")
        if not url:
            return "scaling.metrics.prometheus has a secretName and no url"
        if problem := url_problem(url, self._cache.settings):
            return problem
        if asked.secret_name is None:
            # The operator's credentials are for its own queries only.
            return PrometheusSource(url, PrometheusAccess(), asked.queries)
        found = await self._access(ObjectKey(target.key.namespace, asked.secret_name), now)
        if isinstance(found, str):
            return found
        if found.url.rstrip("/") != url.rstrip("/"):
            return f"the Secret {asked.secret_name} is not for this URL: give it the annotation {URL_ANNOTATION}: {url}"
        return PrometheusSource(url, found.access, asked.queries)

    async def _access(self, place: ObjectKey, now: float) -> _SecretAccess | str:
        known = self._secrets.get(place)
        if known is not None and 0 <= now - known[0] < SECRET_SECONDS:
            return known[1]
        try:
            value = await self._port.get(SECRET, place.name, place.namespace)
        except Forbidden:
            found: _SecretAccess | str = (
                f"the operator may not read the Secret {place.name}: add it to prometheus.secretNames of the chart"
            )
        except ClusterError as error:
            # A Secret read earlier is better than none.
            good = known is not None and isinstance(known[1], _SecretAccess)
            found = known[1] if good and known is not None else f"the Secret {place.name} cannot be read: {error}"
        else:
            found = _access_of(value, place.name)
        if len(self._secrets) >= MAX_SECRETS and place not in self._secrets:
            self._secrets.clear()
        self._secrets[place] = (now, found)
        return found
