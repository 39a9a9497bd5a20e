"""The settings of AWS Inferentia: images, and the jobs that compile models."""

from __future__ import annotations

import penstock
from penstock.settings import SettingsGroup, setting
from penstock_operator.facts.installation import NeuronSettings


class InferentiaSettings(SettingsGroup):
    """AWS Inferentia: the images, and the jobs that compile models, on nodes without devices."""

    neuron_runtime_image: str = setting(
        f"localhost/penstock-runtime-neuron:{penstock.__version__}", "Image of serving pods on inf2.", min_length=1
    )
    neuron_optimizer_image: str = setting(
        f"localhost/penstock-optimizer-neuron:{penstock.__version__}",
        "Image of jobs that compile for inf2.",
        min_length=1,
    )
    neuron_legacy_runtime_image: str = setting(
        f"localhost/penstock-runtime-neuron-legacy:{penstock.__version__}",
        "Image of serving pods on inf1, which AWS no longer supports.",
        min_length=1,
    )
    neuron_legacy_optimizer_image: str = setting(
        f"localhost/penstock-optimizer-neuron-legacy:{penstock.__version__}",
        "Image of jobs that compile for inf1.",
        min_length=1,
    )
    neuron_compile_cpus: int = setting(
        8, "CPUs of a compile job. With fewer, it takes longer.", unit="CPUs", ge=1, le=192
    )
    neuron_compile_memory: str = setting(
        "24Gi", "Memory of a compile job, unless the endpoint sets more.", unit="quantity", min_length=1
    )
    neuron_compile_seconds: float = setting(
        7200.0, "Time that a compile job may take beyond its budget before it is ended.", unit="s", gt=0
    )

    def plan_settings(self) -> NeuronSettings:
        """As plans take them."""
        return NeuronSettings(
            runtime_image=self.neuron_runtime_image,
            optimizer_image=self.neuron_optimizer_image,
            legacy_runtime_image=self.neuron_legacy_runtime_image,
            legacy_optimizer_image=self.neuron_legacy_optimizer_image,
            compile_cpus=self.neuron_compile_cpus,
            compile_memory=self.neuron_compile_memory,
            compile_seconds=self.neuron_compile_seconds,
        )
