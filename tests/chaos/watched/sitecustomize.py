"""Run by Python itself at start: a rank under test writes down each inner step that it commits."""

import os
import sys

if "LOCO_STEP_LOG" in os.environ and sys.orig_argv[1:3] == ["-m", "worker"]:
    import loco  # noqa: F401 - first: it tells gRPC, which reads its environment at import
    from tests.chaos.steps import watch

    watch(os.environ["LOCO_STEP_LOG"])
