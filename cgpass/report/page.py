"""Reports as one page of HTML."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cgpass.report.model import Report


def html(report: "Report") -> str:
    """The report as one page."""
    return str(report)
