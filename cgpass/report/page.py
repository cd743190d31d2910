"""Reports as one page of HTML that needs nothing else: no network, no script."""

from pathlib import Path

import jinja2

from cgpass.report import text
from cgpass.report.model import Facts
from cgpass.telemetry.reason import many


def html(report: Facts) -> str:
    """The report as one page, for browsers in light and in dark."""
    source = Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return template.from_string(source).render(
        report=report,
        headline=text.headline(report),
        facts=[*text.facts(report)],
        findings=text.findings(report),
        functions=text.by_function(report.graphs),
        titles=[title for title, _ in text.COLUMNS],
        cells=text.cells,
        partition_facts=text.partition_facts,
        many=many,
        share=text.share,
        size=text.size,
    )
