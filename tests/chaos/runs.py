"""The runs that the chaos harness disturbs: tiny models, so that a round is mostly protocol."""

from __future__ import annotations

from .processes import Raw

ENDLESS = 1_000_000  # rounds: the harness ends the run with a drain


def exact_run(seed: int, rounds: int = ENDLESS) -> Raw:
    """Every site is in every round, whatever happens: the run must equal an undisturbed one.

    No site makes inner steps while it waits (`max_local_steps`), nobody is given up
    (`dead_after_seconds`), no round closes early (`grace_seconds`). Of seeds 0 of each
    four one of both inner steps is made while the exchange goes on, of seeds 2 both, the second one
    from a guess of the update. Of seeds 2 and 3 of each four, three fragments take turns with one
    of the embedding's own; of the upper four of each eight the replica keeps what was not sent.
    """
    outer: Raw = {"delay_steps": 0 if seed % 2 else 1 + seed % 4 // 2}
    if seed % 4 >= 2:
        table = {"tensors": ["embed_tokens.weight"], "k": 128, "bits": 1}
        outer |= {"fragments": 3, "own_fragments": {"table": table}}
    if seed % 8 >= 4:
        outer |= {"unsent": "replica", "beta": 0.0}
    return {
        "run": {"name": "exact", "seed": seed, "rounds": rounds},
        "model": _model(dim=32, num_layers=1),
        "data": {"batch": 4},
        "inner": {"steps": 2, "max_local_steps": 2, "warmup_steps": 0},
        "outer": outer,
        "codec": {"k": 256, "k_sites": 1},
        "quorum": {
            "min_sites": 2,
            "grace_seconds": 3600.0,
            "dead_after_seconds": 3600.0,
            "heartbeat_seconds": 0.5,
        },
        "state": {"snapshot_every_rounds": 2, "keep_updates": 10},
        "eval": {"every_rounds": 0},
    }


def quorum_run(seed: int, rounds: int = ENDLESS) -> Raw:
    """Rounds close without a site that is away, which goes on by itself and comes back.

    Dense contributions of four blocks, so that transfers can break in the middle.
    """
    raw = exact_run(seed, rounds)
    raw["run"]["name"] = "quorum"
    raw["model"] = _model(dim=96, num_layers=2)
    raw["inner"] |= {"max_local_steps": 20}
    raw["codec"] = {"bits": 32}
    raw["outer"] = {"aggregation": "mean"}
    raw["quorum"] |= {"grace_seconds": 1.0, "dead_after_seconds": 4.0}
    return raw


def torchft_run(seed: int, rounds: int = ENDLESS) -> Raw:
    """One site's ranks come and go; every round must still be everyone's.

    SCAPE, so that each rank has something alone that a death could lose; dense contributions of
    several blocks, so that a leader can die in the middle of one.
    """
    raw = exact_run(seed, rounds)
    raw["run"]["name"] = "torchft"
    raw["model"] = _model(dim=64, num_layers=2)
    raw["data"] = {"batch": 6}
    raw["inner"] |= {"sync": "scape", "density": 0.2, "steps": 6, "max_local_steps": 6}
    raw["codec"] = {"bits": 32}
    raw["outer"] = {"aggregation": "mean"}
    return raw


def _model(*, dim: int, num_layers: int) -> dict[str, int]:
    return {
        "dim": dim,
        "num_layers": num_layers,
        "num_heads": 2,
        "num_kv_heads": 1,
        "ffn_dim": 2 * dim,
        "seq_len": 32,
    }
