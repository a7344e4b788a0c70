"""Write docs/reference from the code; with --check only tell what is stale.

python docs/tool [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from reference import cli, config, errors

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Exit code: 1 when something is stale."""
    stale = False
    for make in (config, cli, errors):
        path = ROOT / "docs" / "reference" / f"{make.__name__}.md"
        text = make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if "--check" in sys.argv[1:]:
            print(f"stale: {path.relative_to(ROOT)}; run make docs and commit")
            stale = True
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
