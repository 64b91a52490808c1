"""The selection audit as HTML: who was dropped, and whether long episodes were dropped more."""

import html
from typing import Any

MAX_ROWS = 12


def dropped_table(selection: dict[str, Any]) -> str:
    """Return the body of a card from `selection.json`, "" if it knows of no episode.

    Args:
        selection: {"rows": [...], "comparisons": [...]} as the scheduler writes it.
    """
    rows = [row for row in selection.get("rows", []) if row["num"] > 0]
    if not rows:
        return ""
    warnings = "".join(
        f'<p class="note bad">{html.escape(_warning(each))}</p>'
        for each in selection.get("comparisons", [])
        if each["is_biased"]
    )
    dropped = sorted(
        (row for row in rows if row["dropped_frac"] > 0), key=lambda row: -row["dropped_frac"]
    )
    if not dropped:
        num = sum(row["num"] for row in rows)
        return f'<p class="note">None of {num:,} episodes was dropped as stale or failed.</p>'
    head = "".join(
        f"<th>{name}</th>" for name in ("subset", "horizon", "turns", "n", "stale", "failed", "")
    )
    body = "".join(_row(row) for row in dropped[:MAX_ROWS])
    more = len(dropped) - MAX_ROWS
    note = f'<p class="note">And {more} more rows in selection.json.</p>' if more > 0 else ""
    table = f'<div class="table"><table><tr>{head}</tr>{body}</table></div>'
    return f"{warnings}{table}{note}"


def _row(row: dict[str, Any]) -> str:
    cells = (
        row["subset"],
        row["horizon"],
        row["turns"],
        f"{row['num']:,}",
        f"{row['stale']:,}",
        f"{row['failed']:,}",
        f"{row['dropped_frac']:.1%}",
    )
    return f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in cells)}</tr>"


def _warning(comparison: dict[str, Any]) -> str:
    """Return a comparison of long with short episodes in one sentence."""
    long = comparison["num_long_dropped"] / max(comparison["num_long"], 1)
    short = comparison["num_short_dropped"] / max(comparison["num_short"], 1)
    return (
        f"Long episodes of {comparison['env']} at horizon {comparison['horizon']} were dropped "
        f"more often: {long:.1%} of {comparison['num_long']:,}, short ones {short:.1%} of "
        f"{comparison['num_short']:,} (z = {comparison['z']:.1f})."
    )
