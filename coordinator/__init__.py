"""The coordinator of a run: round machine, journal, reducer and gRPC service."""
