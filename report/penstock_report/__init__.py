"""The HTML reports of `penstock optimize`, `bench`, `plan` and `simulate`: one page, one style sheet, charts.

    page      a document around the parts of a report
    charts    inline SVG: scales, axes, markers, latency by length

It imports the standard library only, so that a report needs no other package of Penstock.
"""
