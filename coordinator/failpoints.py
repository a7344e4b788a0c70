"""Named moments at which a test may kill this process, as a power cut would.

`LOCO_FAIL_POINT=NAME:N` kills it with SIGKILL the N-th time it passes NAME. The crash tests and the
chaos harness go through all of `NAMES`; without the variable a passage costs one comparison.
"""

from __future__ import annotations

import os
import signal

NAMES = (
    "upload.block_written",
    "upload.synced",
    "upload.renamed",
    "journal.before_append",
    "journal.after_append",
    "reduce.before_update",
    "reduce.cell_written",
    "reduce.update_renamed",
    "snapshot.buffer_written",
    "snapshot.manifest_written",
    "snapshot.old_removed",
)

_name, _, _count = os.environ.get("LOCO_FAIL_POINT", "").partition(":")
_left = int(_count or 1)


def reach(name: str) -> None:
    """Die here if this is the passage that was asked for."""
    global _left
    if name != _name:
        return
    assert name in NAMES
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
