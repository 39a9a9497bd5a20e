"""Settings: documented defaults, and errors that name the setting."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock_operator.facts.installation import StoreVolume
from penstock_operator.settings import PREFIX, SETTINGS, Settings
from tests.examples import examples

PROMISED = {
    "lease_duration_seconds": 10.0,
    "lease_deadline_seconds": 8.0,
    "max_attempts": 5,
    "max_concurrent_optimizations": 1,
    "max_concurrent_rollouts": 1,
    "pod_user": 65_532,
    "unused_grace_seconds": 3600.0,
    "resync_seconds": 900.0,
    "workers": 8,
    "port": 9090,
    "store_uri": "file:///var/lib/penstock/artefacts",
    "log_format": "json",
    "shared_artefacts": False,
    "store_read_secret": "",
}


@pytest.mark.parametrize("name", PROMISED)
def test_promised_default(name: str) -> None:
    assert {setting.name: setting.default for setting in SETTINGS}[name] == PROMISED[name]


def test_every_setting_is_described_and_its_name_is_its_own() -> None:
    names = [setting.name for setting in SETTINGS]

    assert len(names) == len(set(names))
    assert [setting.name for setting in SETTINGS if len(setting.description) < 15] == []


def test_flags_override_variables_and_variables_override_defaults() -> None:
    settings = Settings.load({f"{PREFIX}WORKERS": "3", f"{PREFIX}PORT": "1"}, {"port": "2", "host": None})

    assert (settings.work.workers, settings.server.port, settings.server.host) == (3, 2, "0.0.0.0")


ENTRIES = st.text(st.characters(codec="utf-8", exclude_characters="\\\n"), min_size=1, max_size=8)


@settings(max_examples=examples(100))
@given(st.lists(ENTRIES.map(str.strip).filter(bool), max_size=4))
def test_entries_with_escaped_commas_are_read_as_they_were(entries: list[str]) -> None:
    (found,) = (one for one in SETTINGS if one.name == "extra_env")

    assert found.parse(",".join(one.replace(",", r"\,") for one in entries)) == tuple(entries)


def test_lists_are_split_at_commas() -> None:
    settings = Settings.load({f"{PREFIX}NAMESPACES": "a, b,", f"{PREFIX}EXTRA_ENV": "HF_ENDPOINT=http://x,A=b=c"})

    assert settings.cluster.namespaces == ("a", "b")
    assert settings.plan_settings().extra_env == (("HF_ENDPOINT", "http://x"), ("A", "b=c"))


@pytest.mark.parametrize(
    ("environment", "field", "remedy"),
    [
        ({"PENSTOCK_OPERATOR_WORKRES": "3"}, "PENSTOCK_OPERATOR_WORKRES", "Did you mean PENSTOCK_OPERATOR_WORKERS?"),
        ({"PENSTOCK_OPERATOR_XYZZY": "3"}, "PENSTOCK_OPERATOR_XYZZY", "docs/reference/operator.md lists the settings"),
        ({"PENSTOCK_OPERATOR_WORKERS": "many"}, "PENSTOCK_OPERATOR_WORKERS", "the default is 8"),
        ({"PENSTOCK_OPERATOR_PORT": "70000"}, "PENSTOCK_OPERATOR_PORT", "the default is 9090"),
        ({"PENSTOCK_OPERATOR_LOG_FORMAT": "xml"}, "PENSTOCK_OPERATOR_LOG_FORMAT", "the default is 'json'"),
    ],
)
def test_an_invalid_setting_is_named_with_a_remedy(environment: dict[str, str], field: str, remedy: str) -> None:
    with pytest.raises(SettingError) as caught:
        Settings.load(environment)

    assert caught.value.field == field
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"LEASE_DURATION_SECONDS": "7"}, "two replicas could lead"),
        ({"STORE_HOST_PATH": "/a", "STORE_CLAIM": "b"}, "both set"),
        ({"STORE_URI": "s3://b/p", "STORE_CLAIM": "b"}, "needs none"),
        ({"EXTRA_ENV": "nothing"}, "is not NAME=VALUE"),
        ({"EXPOSURE_HOSTS": "a.example.com"}, "exposure_hosts is not JSON: "),
        ({"EXPOSURE_HOSTS": '[{"hosts": ["*.example.com"]}]'}, r"exposure_hosts\[0\]\.namespaceSelector: "),
        (
            {"EXPOSURE_HOSTS": '[{"hosts": ["*"], "namespaceSelector": {}}]'},
            r"exposure_hosts\[0\]\.hosts\[0\]: .*is not a host",
        ),
        ({"ALLOWED_INGRESS_ANNOTATIONS": "a*b"}, "may only be the last character"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Settings.load({PREFIX + name: value for name, value in environment.items()})


def test_service_link_variables_of_the_kubelet_are_ignored() -> None:
    links = {
        "PENSTOCK_OPERATOR_SERVICE_HOST": "10.0.0.1",
        "PENSTOCK_OPERATOR_SERVICE_PORT_METRICS": "9090",
        "PENSTOCK_OPERATOR_PORT": "tcp://10.0.0.1:9090",
        "PENSTOCK_OPERATOR_PORT_9090_TCP_ADDR": "10.0.0.1",
    }

    assert Settings.load(links) == Settings()


@pytest.mark.parametrize(
    ("environment", "volume"),
    [
        ({}, None),
        ({"STORE_HOST_PATH": "/mnt"}, StoreVolume(host_path="/mnt")),
        ({"STORE_CLAIM": "artefacts"}, StoreVolume(claim="artefacts")),
    ],
)
def test_the_store_is_mounted_as_set(environment: dict[str, str], volume: StoreVolume | None) -> None:
    settings = Settings.load({PREFIX + name: value for name, value in environment.items()})

    assert settings.plan_settings().store_volume == volume


def test_two_processes_never_have_the_same_identity() -> None:
    assert Settings().new_identity() != Settings().new_identity()
