"""Write deploy/grafana/*.json and docs/metrics.md; with --check only tell what is stale.

python deploy/dashboards [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bandwidth import bandwidth
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from overview import overview
from service import coordinator
from sites import sites

from loco.metrics import markdown

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Exit code: 1 when something is stale."""
    wanted = {ROOT / "docs" / "metrics.md": markdown()}
    for build in (overview, bandwidth, sites, coordinator):
        path = ROOT / "deploy" / "grafana" / f"{build.__name__}.json"
        text = json.dumps(build().build(), cls=JSONEncoder, indent=2, sort_keys=True)
        wanted[path] = text + "\n"
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"stale: {path.relative_to(ROOT)}; run make dashboards and commit")
        return bool(stale)
    for path in stale:
        path.write_text(wanted[path])
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
