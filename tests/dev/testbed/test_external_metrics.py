"""The test bed's server of external metrics accepts prometheus-adapter's rules, and refuses those that it does not
implement."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from testbed.build import binary
from testbed.tools import EXTERNAL_METRICS

RULE: dict[str, Any] = {
    "seriesQuery": "lag",
    "resources": {"overrides": {"namespace": {"resource": "namespace"}}},
    "metricsQuery": "sum(<<.Series>>{<<.LabelMatchers>>})",
}


@pytest.mark.parametrize(
    ("configuration", "why"),
    [
        ({"externalRules": []}, "no externalRules"),
        ({"rules": [RULE]}, 'unknown field "rules"'),
        ({"externalRules": [{**RULE, "resources": {}}]}, "no label for the namespace"),
        ({"externalRules": [{**RULE, "seriesQuery": '{__name__=~"lag|wait"}'}]}, "only a name with matchers"),
        ({"externalRules": [{**RULE, "metricsQuery": "<<.Series"}]}, "metricsQuery of lag"),
        ({"externalRules": [{**RULE, "name": {"as": "wait"}}]}, 'unknown field "name"'),
    ],
)
def test_an_unsupported_rule_is_an_error_at_start(configuration: dict[str, Any], why: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps(configuration))

    run = subprocess.run(
        [binary(EXTERNAL_METRICS), f"--config={tmp_path / 'config.yaml'}"], capture_output=True, text=True, check=False
    )

    assert run.returncode == 1
    assert why in run.stderr.replace("\\", "")
