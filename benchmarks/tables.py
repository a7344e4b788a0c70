"""Numbers in README.md and docs/ that are generated: each stands between two marks.

    python -m benchmarks.tables            # rewrite them from the result files and from loco.plan
    python -m benchmarks.tables --check    # say which are stale, and exit with 1

A block begins with `<!-- numbers: NAME -->` and ends with `<!-- end -->`. The function of that name
says where its numbers come from: a file under docs/results/, or the code itself. So a number that
somebody edits by hand, or a result that changes, is found by `make test`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import convergence_search, convergence_tables, scaling
from benchmarks.recorded import demo_lines, downlink_lines, downlink_ways, overlap_lines, wan_lines

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- numbers: ([a-z0-9-]+) -->\n)(.*?)(<!-- end -->)", re.S)
BLOCKS: dict[str, Callable[[], list[str]]] = {
    **convergence_tables.BLOCKS,
    **convergence_search.BLOCKS,
    "scaling": scaling.table,
    "scaling-limits": scaling.limits,
    "scaling-measured": scaling.measured,
    "scaling-fit": scaling.fit,
    "scaling-coordinator": scaling.coordinator,
    "scaling-transport": scaling.transport,
    "demo": demo_lines,
    "wan": wan_lines,
    "overlap": overlap_lines,
    "downlink": downlink_lines,
    "downlink-ways": downlink_ways,
}


def pages() -> list[Path]:
    """README.md and all of docs/ that has a block."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if BLOCK.search(page.read_text(encoding="utf-8"))]


def renewed(text: str) -> str:
    """The text of a page with every block generated anew; KeyError names an unknown block."""
    return BLOCK.sub(lambda m: "\n".join([m[1], *BLOCKS[m[2]](), "", m[4]]), text)


def stale_blocks(text: str) -> list[str]:
    """Names of the blocks of a page that are not what would be generated."""
    pairs = zip(BLOCK.finditer(text), BLOCK.finditer(renewed(text)), strict=True)
    return [old[2] for old, new in pairs if old[3] != new[3]]


def rewrite(*, check: bool = False) -> int:
    """Renew all pages, or with `check` leave them; 1 if `check` found a stale block."""
    stale = [(page, name) for page in pages() for name in stale_blocks(page.read_text())]
    for page, name in stale:
        print(f"{page.relative_to(ROOT)}: {name} {'is stale' if check else 'rewritten'}")
    if not check:
        for page in {page for page, _ in stale}:
            page.write_text(renewed(page.read_text()))
    return int(check and bool(stale))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    return rewrite(check=parser.parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
