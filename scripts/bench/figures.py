"""What a bench has found, as a table on the terminal and, if wanted, as a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def tell(metrics: Mapping[str, float], file: Path | None) -> None:
    """Print a line per metric; `file` gets them as JSON."""
    for name, value in metrics.items():
        print(f"{name:45s} {value:12.5g}")
    if file:
        file.write_text(json.dumps(metrics, indent=1))
