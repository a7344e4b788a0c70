"""`loco demo`: a coordinator and its sites as separate processes on this machine."""
