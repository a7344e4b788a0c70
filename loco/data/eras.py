"""Cut the default corpus by time, so that sites really differ."""

from __future__ import annotations

from itertools import groupby

from loco.data.corpus import speeches


def eras(count: int) -> list[str]:
    """`count` corpus names like `sotu:1790-1912`, consecutive, of about equal size in bytes."""
    sizes = [
        (year, sum(path.stat().st_size for _, path in group))
        for year, group in groupby(speeches(), key=lambda speech: speech[0])
    ]
    total = sum(size for _, size in sizes)
    names: list[str] = []
    first = before = sizes[0][0]
    done = 0
    for year, size in sizes:
        if done >= total * (len(names) + 1) / count:
            names.append(f"sotu:{first}-{before}")
            first = year
        before, done = year, done + size
    return [*names, f"sotu:{first}-{before}"]
