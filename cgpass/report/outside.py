"""What lies outside of all graphs: what `torch.compile` left to eager, and graph breaks that no graph ends at."""

import dataclasses
from collections.abc import Iterable, Sequence

from cgpass import torch_private
from cgpass.compile.facts.breaks import place_of, untold
from cgpass.report.collect import reasons
from cgpass.report.model import EagerFunction, Report


def with_outside(
    report: Report, left: Sequence[EagerFunction], noted: Iterable[torch_private.GraphBreak]
) -> Report:
    """A report, and what lies outside of its functions, each once.

    Args:
        report: Of functions that were compiled.
        left: Functions that were not.
        noted: Graph breaks that torch met in them.
    """
    left = (*left, *report.left_to_eager)
    told = [each.line for each in (*report.all_graph_breaks, *(e.reason for e in left))]
    found = reasons(untold(noted, told, [each.place for each in report.functions]))
    known = {(each.place, place_of(each.reason.line)) for each in left}
    rests = [each for each in found if each.rest is not None]
    return dataclasses.replace(
        report,
        left_to_eager=(
            *left,
            *(
                EagerFunction(reason=each, place=each.rest)
                for each in rests
                if (each.rest, place_of(each.line)) not in known
            ),
        ),
        graph_breaks=tuple(each for each in found if each.rest is None),
    )
