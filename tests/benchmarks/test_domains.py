"""Text of three domains against the packages that it is of, and the losses that are told of it.

Compared with: the packages' own files, and windows cut by hand. Run alone:
pytest tests/benchmarks/test_domains.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.convergence import simulated_run
from benchmarks.domains import DOMAINS, Domain, make, text_of
from benchmarks.methods import METHODS, changed, config_of
from benchmarks.simulation import Simulation
from loco.data import bits_per_byte, evaluate, load_tokens, validation_windows
from loco.errors import ConfigError, DataError

SIZE = 20_000
SMALLEST = {
    "model.dim": 16, "model.num_layers": 1, "model.num_heads": 2, "model.num_kv_heads": 1,
    "model.ffn_dim": 24, "model.seq_len": 16, "data.batch": 2, "inner.steps": 2,
    "inner.warmup_steps": 0, "eval.sequences": 30,
}  # fmt: skip


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make(tmp_path_factory.mktemp("domains"), SIZE)


def test_each_domain_is_of_its_package_and_of_one_size(corpora: list[Path]) -> None:
    assert [path.stem for path in corpora] == ["documentation", "encyclopaedia", "speeches"]
    for path in corpora:
        text = path.read_bytes()
        assert len(text) == SIZE
        first = text.split(b"\n\n")[0]
        documents = list(DOMAINS[path.stem].documents())
        assert len(documents) > 200
        assert any(document.startswith(first) for document in documents)


def test_what_is_held_out_is_of_every_domain_alike(corpora: list[Path]) -> None:
    whole = load_tokens(str(corpora[0].parent), "validation")
    text = b"\n\n".join(path.read_bytes()[-SIZE // 10 :] for path in corpora)
    assert bytes(np.asarray(whole[np.arange(len(whole))], np.uint8)) == text


def test_the_order_of_documents_is_that_of_their_digests_and_none_comes_twice() -> None:
    package = {"package": "of-a-test", "install": "pip install of-a-test"}
    texts = [b"one", b"two", b"three", b"two"]
    there = text_of(Domain(documents=lambda: iter(texts), **package), 15)
    back = text_of(Domain(documents=lambda: iter(texts[::-1]), **package), 15)
    assert there == back
    assert sorted(there.split(b"\n\n")) == [b"one", b"three", b"two"]


def test_a_package_that_is_missing_or_too_small_is_named_with_its_command() -> None:
    package = {"package": "of-a-test", "install": "pip install of-a-test"}
    with pytest.raises(DataError, match=r"of-a-test, which is not .*: pip install of-a-test"):
        text_of(Domain(documents=lambda: iter(()), **package), 15)
    with pytest.raises(DataError, match=r"of-a-test holds 3 bytes .* 15 are needed.*pip install"):
        text_of(Domain(documents=lambda: iter([b"one"]), **package), 15)


def shape(**other: Any) -> dict[str, Any]:
    return {"model": "small", "sites": 3, "data": "eras", "rounds": 1, "seed": 0} | other


def test_the_loss_of_each_domain_is_that_of_its_own_windows(corpora: list[Path]) -> None:
    base = config_of(METHODS["kept"], **shape())
    sites = dict(zip(base.data.sites, map(str, corpora), strict=True))
    of_all = {"data.sites": sites, "data.corpus": str(corpora[0].parent)}
    config = changed(base, SMALLEST | of_all)
    told = simulated_run(config, METHODS["kept"])
    simulation = Simulation(config)
    for _ in simulation.rounds():
        pass
    model = simulation.sites[0].model
    simulation.sites[0].write(simulation.theta, simulation.layout)
    for path in corpora:
        windows = validation_windows(load_tokens(str(path), "validation"), seq_len=16, count=30)
        wanted = bits_per_byte(*evaluate(model, windows))
        assert told["val_bpb_parts"][path.stem] == pytest.approx(wanted, rel=1e-9)
    assert len(set(told["val_bpb_parts"].values())) == 3


def test_as_many_sites_as_domains() -> None:
    with pytest.raises(ConfigError, match="2 sites cannot have one domain each: use --sites 3"):
        config_of(METHODS["kept"], **shape(sites=2, data="domains"))
