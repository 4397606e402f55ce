"""Pages of the documentation whose tables are made from results, and whose words are not.

A table's place is marked by two comments; what is between them is replaced:

    <!-- table: dg_fair, Collapses -->
    | method | ...
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..analysis.intervals import bootstrap, markdown_table

PLACE = re.compile(r"<!-- table: (?P<study>[\w-]+), (?P<title>[^\n]+?) -->\n.*?<!-- end -->", re.DOTALL)


def refreshed(text: str, tables: Mapping[str, Mapping[str, str]]) -> str:
    """The page with its tables made anew: study → title → table. Raises ValueError for one that there is not."""

    def filled(place: re.Match[str]) -> str:
        study, title = place["study"], place["title"]
        found = [name for name in tables.get(study, {}) if name.startswith(title)]
        if len(found) != 1:
            known = "; ".join(tables.get(study, {})) or "no results"
            raise ValueError(f"the page wants the table {title!r} of {study!r}; there are: {known}")
        return f"<!-- table: {study}, {title} -->\n{tables[study][found[0]]}<!-- end -->"

    return PLACE.sub(filled, text)


def by_place(plot: Mapping[str, Any], place: str) -> str:
    """A plot's numbers (docs/data) as a table: places down, lines across, means of the runs with 95 % intervals."""
    (lines,) = plot["panels"].values()
    rows = [
        [f"{points[0]['x']:g}", *(bootstrap(point["values"]).text(2) for point in points)]
        for points in zip(*lines.values(), strict=True)
    ]
    return markdown_table([place, *lines], rows)
