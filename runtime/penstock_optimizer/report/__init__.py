"""The evidence for people: one self-contained HTML file made from the manifest alone.

`scales` and `charts` draw SVG by hand: it follows the reader's light or dark theme through CSS variables, is a tenth of
the size of a plotting library's output, and stays readable on a phone. `view` words the findings, `render` fills the
template.
"""

from penstock_optimizer.report.render import render_report

__all__ = ["render_report"]
