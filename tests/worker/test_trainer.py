"""Inner steps: the learning rate is a function of the step alone, and NaN is said by name.

Compared with: the closed form of warm-up and cosine. Run alone: pytest tests/worker/test_trainer.py
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import prepared
from support.runs import config_of

from loco.config import InnerConfig
from loco.errors import DataError, NonFiniteError
from loco.inner.build import lr_at
from loco.inner.groups import Group
from loco.wire.v1 import coordinator_pb2 as pb
from worker.site import Site
from worker.trainer import Trainer

INNER = InnerConfig(lr=0.4, warmup_steps=4, min_lr_fraction=0.1)


def test_warm_up_is_linear_to_the_peak() -> None:
    assert [lr_at(INNER, step, 100) for step in range(5)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.4]
    )


def test_then_a_cosine_to_the_minimum_which_stays() -> None:
    assert lr_at(INNER, 52, 100) == pytest.approx(0.4 * (0.1 + 0.9 * 0.5))
    for step in (100, 101, 10_000):
        assert lr_at(INNER, step, 100) == pytest.approx(0.04)


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(0, 200), st.integers(0, 50))
def test_it_never_leaves_its_range(step: int, total: int, warmup: int) -> None:
    """Shorter runs than the warm-up, and steps past the horizon, included."""
    inner = InnerConfig(lr=0.4, warmup_steps=warmup, min_lr_fraction=0.1)
    lr = lr_at(inner, step, total)
    assert math.isfinite(lr)
    assert 0 < lr <= 0.4
    if step >= warmup:
        assert lr >= 0.04 - 1e-12


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCO_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("pack my box with five dozen liquor jugs. " * 300)
    return path


def trainer(corpus: Path, group: Group | None = None, **inner: object) -> Trainer:
    small = {"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 32}
    config = config_of(
        model={**small, "seq_len": 16},
        data={"corpus": str(corpus), "batch": 4},
        inner={"optimizer": "sgd", "warmup_steps": 3, **inner},
        eval={"sequences": 4},
    )
    return Trainer(config, Site(torch.device("cpu"), group or Group()), "paris", str(corpus))


def plan(first_step: int, steps: int, total: int) -> pb.RoundPlan:
    return pb.RoundPlan(inner_steps=steps, first_step=first_step, total_steps=total)


def test_the_trace_of_a_site_that_comes_back_is_that_of_one_that_stayed(corpus: Path) -> None:
    """Learning rate and data: a new process that is told where the run stands goes on alike."""
    stayed = trainer(corpus, lr=0.2)
    for first in (0, 4):
        stayed.train(4, plan(first, 4, 12))
        stayed.start_count()
    came_back = trainer(corpus, lr=0.2)
    came_back.train(4, plan(0, 4, 12))
    parameters = {k: v.clone() for k, v in came_back.model.state_dict().items()}
    came_back = trainer(corpus, lr=0.2)
    came_back.model.load_state_dict(parameters)
    came_back.data_cursor = 4
    came_back.train(4, plan(4, 4, 12))
    for name, tensor in stayed.model.state_dict().items():
        assert torch.equal(tensor, came_back.model.state_dict()[name]), name


def test_the_loss_of_a_site_is_a_mean_also_after_a_rank_has_left(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks make two steps, one of them is lost, the other makes two more.

    Neither a sum over ranks, which would fall by half, nor tokens by a number of ranks.
    """
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()
    alone = trainer(corpus, lr=1e-9)
    with ThreadPoolExecutor(2) as ranks:
        pair = list(ranks.map(lambda rank: trainer(corpus, group_of(store, rank), lr=1e-9), (0, 1)))
        list(ranks.map(lambda one: one.train(2, plan(0, 2, 4)), pair))
        together = list(ranks.map(lambda one: one.measure(), pair))
    alone.train(2, plan(0, 2, 4))
    half_way = alone.measure()
    assert together[0] == together[1]
    assert together[0].train_bits_per_byte == pytest.approx(half_way.train_bits_per_byte, rel=1e-5)
    left = pair[0]
    left._site.group, left._site.num_ranks = Group(alone=True), 1
    left.optimizer.regroup(left._site.group, {})
    left.divided()
    for one in (left, alone):
        one.train(2, plan(2, 2, 4))
    whole, told = alone.measure(), left.measure()
    assert told.train_bits_per_byte == pytest.approx(whole.train_bits_per_byte, rel=0.02)
    assert (told.tokens, told.inner_steps) == (whole.tokens, whole.inner_steps) == (4 * 4 * 16, 4)


def group_of(store: dist.Store, rank: int) -> Group:
    """One of two ranks that are threads of this process."""
    gloo = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))
    both = dist.ProcessGroup(store, rank, 2)
    both._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    both._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return Group(both, rank=rank)


def test_a_loss_that_is_not_finite_names_site_and_remedy(corpus: Path) -> None:
    wild = trainer(corpus, lr=1.0)
    with torch.no_grad():
        wild.model.norm.weight[0] = float("inf")
    wild.train(2, plan(0, 2, 10))
    with pytest.raises(NonFiniteError, match=r"site 'paris'.*Lower inner\.lr") as caught:
        wild.measure()
    assert caught.value.exit_code == 5


def test_dropped_steps_give_their_data_back(corpus: Path) -> None:
    some = trainer(corpus, lr=0.1)
    some.train(3, plan(0, 3, 10))
    some.start_count()
    some.train(2, plan(3, 2, 10))
    some.drop_local_steps()
    assert (some.data_cursor, some.local_steps) == (3, 0)


def test_loss_is_in_bits_per_byte_whatever_a_token_stands_for(tmp_path: Path) -> None:
    """A model that knows nothing loses log2(vocabulary) bits a token, in training as in validation.

    `mix:` weighs the bytes of its parts as it draws their samples.
    """
    two = prepared(tmp_path / "two", vocab_size=300, token_bytes=2)
    six = prepared(tmp_path / "six", vocab_size=300, token_bytes=6)
    for train, token_bytes in ((str(two), 2.0), (f"mix:1*{two},3*{six}", 5.0)):
        config = config_of(
            model={
                "vocab_size": 300, "dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1,
                "ffn_dim": 16, "seq_len": 16,
            },
            data={"corpus": str(six), "batch": 2},
            inner={"steps": 4, "lr": 1e-9, "warmup_steps": 0},
        )  # fmt: skip
        site = Trainer(config, Site(torch.device("cpu"), Group()), "paris", train)
        site.train(4, pb.RoundPlan(inner_steps=4, total_steps=4))
        bits = math.log2(300)
        assert site.measure().train_bits_per_byte == pytest.approx(bits / token_bytes, rel=0.01)
        assert site.evaluate() == pytest.approx(bits / 6, rel=0.01)


def test_corpora_of_different_tokenizers_are_refused(corpus: Path, tmp_path: Path) -> None:
    """All have 256 tokens, so that only the tokenizers tell them apart."""
    one, two = "1" * 32, "2" * 32
    first = prepared(tmp_path / "first", tokenizer=one)
    same = prepared(tmp_path / "same", tokenizer=one)
    other = prepared(tmp_path / "other", tokenizer=two)

    def train(on: str, validation: str | Path, stated: str | None = None) -> Trainer:
        model = {"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 16}
        config = config_of(
            model={**model, "seq_len": 16},
            data={"corpus": str(validation), "batch": 2, "tokenizer_digest": stated},
        )
        return Trainer(config, Site(torch.device("cpu"), Group()), "paris", on)

    train(f"mix:1*{first},1*{same}", f"mix:1*{same},1*{first}", one)
    train(str(corpus), corpus, "bytes")
    differ = "the tokenizer of corpus '{}' is {}, that of corpus '{}' is {}: a token would be other"
    with pytest.raises(DataError, match=differ.format(first, one[:16], other, two[:16])):
        train(f"mix:1*{first},1*{other}", first)
    with pytest.raises(DataError, match=differ.format(first, one[:16], corpus, "bytes")):
        train(f"mix:1*{first},1*{corpus}", first)
    with pytest.raises(DataError, match=differ.format(first, one[:16], other, two[:16])):
        train(str(first), other)
    with pytest.raises(DataError, match=differ.format(other, two[:16], corpus, "bytes")):
        train(str(first), f"mix:1*{other},1*{corpus}")
    with pytest.raises(DataError, match=rf"of the run \(data\.tokenizer_digest\) is {one[:16]}, "):
        train(str(other), other, one)
    with pytest.raises(DataError, match=r"data\.tokenizer_digest\) is bytes, "):
        train(str(other), other, "bytes")


def test_validation_is_of_the_runs_corpus_and_missing_text_says_so(corpus: Path) -> None:
    config = config_of(data={"corpus": "/not/here"})
    with pytest.raises(DataError, match=r"validation on data\.corpus, .*: corpus '/not/here' does"):
        Trainer(config, Site(torch.device("cpu"), Group()), "paris", str(corpus))


def test_tokens_beyond_the_models_vocabulary_are_refused(tmp_path: Path) -> None:
    corpus = prepared(tmp_path / "corpus", vocab_size=300, token_bytes=1)
    config = config_of(data={"corpus": str(corpus)})
    with pytest.raises(DataError, match=r"tokens up to 299, the model knows 256"):
        Trainer(config, Site(torch.device("cpu"), Group()), "paris", str(corpus))
