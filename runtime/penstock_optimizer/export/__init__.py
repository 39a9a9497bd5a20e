"""From a model folder to the fp32 graph that everything else is made from and judged by."""

from penstock_optimizer.export.export import export
from penstock_optimizer.export.exported import Exported
from penstock_optimizer.export.operators import Flavour

__all__ = ["Exported", "Flavour", "export"]
