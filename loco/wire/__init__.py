"""The wire between sites and the coordinator: generated code (v1) and what both ends share."""
