"""Certificates of a run: a private authority, bundles for those whom it knows, and revocation.

`identity` reads who a certificate stands for, `bundle` the one file that a member is handed,
`authority` the directory that makes them, `cli` is `loco certs`. ECDSA P-256 throughout.
"""
