"""The exchange of one rank against the equations of SparseLoCo, and bit by bit where that is meant.

pytest tests/worker/test_exchange.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.contributing import contribute
from support.runs import config_of
from torch import nn

from loco import codec
from loco.errors import NonFiniteError
from loco.inner.groups import Group
from loco.layout import CHUNK
from loco.model import layout_of, pack
from loco.outer import apply_update
from worker.elastic.outer import ReplicatedExchange
from worker.exchange import Exchange
from worker.site import Site

K, BETA = 32, 0.95


class Odd(nn.Module):
    """Shapes that are not round: a scalar, a prime length, several chunks, a tie, frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Parameter(torch.randn(61, 77, generator=generator))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.bias = nn.Parameter(torch.randn(4099, generator=generator))
        self.head = self.embed
        self.frozen = nn.Parameter(torch.ones(10), requires_grad=False)


@pytest.fixture
def model() -> Odd:
    return Odd()


KEPT = {"unsent": "replica", "beta": 0.0}


def exchange_of(
    model: nn.Module, *, outer: dict[str, Any] | None = None, **codec_changes: int
) -> Exchange:
    config = config_of(codec={"k": K, **codec_changes}, outer=outer or {"beta": BETA})
    exchange = Exchange(config, Site(torch.device("cpu"), Group()), model, layout_of(model))
    exchange.load(pack(model, layout_of(model)).tobytes(), 0)
    return exchange


def train(model: nn.Module, seed: int) -> None:
    """Stands for H inner steps."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p -= 0.01 * torch.randn(p.shape, generator=generator)


def decoded(body: bytes, num_elements: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return codec.decode(body, num_elements).dense().numpy()


def test_the_layout_counts_ties_once_and_leaves_frozen_ones_out(model: Odd) -> None:
    assert [p.name for p in layout_of(model).parameters] == ["embed", "scale", "bias"]
    assert layout_of(model).num_chunks == 2 + 1 + 2


def test_error_feedback_over_three_rounds(model: Odd) -> None:
    """a = beta e + theta - params; e = a - v where v was included, e = a where it was not."""
    exchange, layout = exchange_of(model), layout_of(model)
    theta = pack(model, layout).copy()
    ef = np.zeros_like(theta)
    for round_, included in enumerate([True, False, True]):
        train(model, round_)
        params = pack(model, layout)
        a = np.float32(BETA) * ef + (theta - params)
        v = decoded(contribute(exchange, K), layout.num_elements)
        wanted = codec.encode(a, k=K, bits=2)
        np.testing.assert_array_equal(v, wanted.dense().numpy())
        exchange.settle(included=included)
        ef = a - v if included else a
        np.testing.assert_array_equal(exchange.state(exchange.rows).error_feedback.numpy(), ef)
        update = codec.encode(a, k=K, bits=2).payload
        exchange.apply(exchange.stage(update))
        apply_update(theta, update)
        exchange.write_parameters()
        np.testing.assert_array_equal(pack(model, layout), theta)
    assert exchange.round == 3


def test_the_replica_keeps_what_is_unsent_over_three_rounds(model: Odd) -> None:
    """It moves by the update less its own contribution, and by the update alone if refused."""
    exchange, layout = exchange_of(model, outer=KEPT), layout_of(model)
    theta = pack(model, layout).copy()
    for round_, included in enumerate([True, False, True]):
        train(model, round_)
        params = pack(model, layout)
        a = theta - params  # holds what earlier rounds did not send
        v = decoded(contribute(exchange, K), layout.num_elements)
        np.testing.assert_array_equal(v, codec.encode(a, k=K, bits=2).dense().numpy())
        exchange.settle(included=included)
        ef = a - v if included else a
        update = codec.encode(0.5 * a, k=2 * K, bits=2).payload
        exchange.apply(exchange.stage(update))
        apply_update(theta, update)
        exchange.write_parameters()
        np.testing.assert_array_equal(pack(model, layout), theta - ef)
        np.testing.assert_array_equal(exchange.state(exchange.rows).theta.numpy(), theta)


def test_two_updates_in_a_row_leave_unsent_values_and_progress_in_the_replica(model: Odd) -> None:
    """A site that was away catches up: params change by the updates, and by nothing else."""
    exchange, layout = exchange_of(model, outer=KEPT), layout_of(model)
    train(model, 0)
    contribute(exchange, K)
    train(model, 1)
    before = pack(model, layout)
    exchange.settle(included=False)
    theta = exchange.state(exchange.rows).theta.numpy().copy()
    moved = theta.copy()
    for seed in (2, 3):
        generator = np.random.default_rng(seed)
        step = generator.standard_normal(layout.num_elements).astype(np.float32)
        step[before == 0] = 0  # padding
        update = codec.encode(step, k=K, bits=2).payload
        exchange.apply(exchange.stage(update))
        apply_update(moved, update)
        exchange.write_parameters(keep_progress=True)
    np.testing.assert_allclose(pack(model, layout), before + (moved - theta), rtol=0, atol=2e-6)


class Sizes(nn.Module):
    """No element, one, a prime number of them, four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for i, shape in enumerate([(0,), (1,), (3, 0, 7), (), (4099,), (2, 3, 5, 7), (0,)]):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape, generator=generator)))


@pytest.mark.parametrize("bits", [1, 2, 32])
def test_tensors_of_any_size_make_whole_rounds(bits: int) -> None:
    """What is sent is applied, and the state goes to another life: no size is a special case."""
    model = Sizes()
    exchange, layout = exchange_of(model, bits=bits, k=5), layout_of(model)
    before = pack(model, layout)
    train(model, 0)
    delta = before - pack(model, layout)
    body = contribute(exchange, 5)
    exchange.settle(included=True)
    exchange.apply(exchange.stage(body))
    exchange.write_parameters()
    sent = decoded(body, layout.num_elements)
    assert np.count_nonzero(sent) == (np.count_nonzero(delta) if bits == 32 else 1 + 1 + 5 + 3 + 5)
    np.testing.assert_array_equal(pack(model, layout), before - sent)
    state = exchange.state(exchange.rows)
    np.testing.assert_array_equal(state.error_feedback.numpy(), delta - sent)
    other = exchange_of(Sizes(), bits=bits, k=5)
    other.restore(state, exchange.round)
    assert other.digest() == exchange.digest()


def test_what_a_refused_contribution_held_is_in_the_next_one(model: Odd) -> None:
    exchange, layout = exchange_of(model, bits=32), layout_of(model)
    theta = pack(model, layout)
    train(model, 0)
    first = theta - pack(model, layout)
    contribute(exchange, K)
    exchange.settle(included=False)
    exchange.write_parameters()
    train(model, 1)
    second = theta - pack(model, layout)
    sent = decoded(contribute(exchange, K), layout.num_elements)
    np.testing.assert_array_equal(sent, np.float32(BETA) * first + second)


def test_inner_steps_made_while_the_update_was_away_are_kept(model: Odd) -> None:
    """theta_r <- theta_new + (theta_r - theta_r at the exchange)."""
    exchange, layout = exchange_of(model), layout_of(model)
    train(model, 0)
    body = contribute(exchange, K)
    at_exchange = pack(model, layout)
    train(model, 1)
    progress = pack(model, layout) - at_exchange
    exchange.settle(included=True)
    exchange.apply(exchange.stage(body))
    exchange.write_parameters(keep_progress=True)
    theta_new = exchange.state(exchange.rows).theta.numpy()
    np.testing.assert_allclose(pack(model, layout), theta_new + progress, rtol=0, atol=1e-7)
    # ... and the next pseudo-gradient, measured from theta_new, carries them.
    sent = decoded(contribute(exchange, CHUNK), layout.num_elements)
    assert np.corrcoef(sent, -progress)[0, 1] > 0.5


@pytest.mark.parametrize("steps_before", [False, True])
@pytest.mark.parametrize("included", [False, True])
def test_a_site_goes_on_from_its_guess_of_the_update(
    model: Odd, steps_before: bool, included: bool
) -> None:
    """guess = theta - own_step v; theta_r keeps its progress from there where the update agrees.

    Also where inner steps were made before, and where the update does without this site.
    """
    exchange, layout = exchange_of(model), layout_of(model)
    theta, own_step = pack(model, layout), np.float32(0.3)
    train(model, 0)
    captured = exchange.read()
    at_exchange = captured.copy()
    exchange.capture(captured)
    if steps_before:
        train(model, 1)
    before = pack(model, layout) - at_exchange
    staged = exchange.encode(K, own_step=float(own_step))
    staged.keep()
    exchange.anticipate()
    guess = theta - own_step * decoded(staged.shards[0], layout.num_elements)
    np.testing.assert_allclose(pack(model, layout), guess + before, rtol=0, atol=1e-6)
    if not steps_before:
        np.testing.assert_array_equal(pack(model, layout), guess)
    train(model, 2)
    at_update = pack(model, layout)
    others = np.flatnonzero(at_exchange)[::50]
    update = theta - guess
    update[others] += np.float32(0.01)
    payload = codec.encode(update, k=CHUNK).payload
    exchange.settle(included=included)
    exchange.apply(exchange.stage(payload))
    theta_new = exchange.state(exchange.rows).theta.numpy().copy()
    exchange.write_parameters(keep_progress=True)
    wanted = np.where(theta_new == guess, at_update, theta_new)
    np.testing.assert_array_equal(pack(model, layout), wanted)
    moved = (theta_new != guess).mean()
    assert 0.01 < moved < 0.5
    # ... and once theta is everyone's again, further updates keep all progress.
    theta = theta_new.copy()
    train(model, 3)
    progress = pack(model, layout) - theta_new
    exchange.apply(exchange.stage(payload))
    apply_update(theta, payload)
    exchange.write_parameters(keep_progress=True)
    np.testing.assert_allclose(pack(model, layout), theta + progress, rtol=0, atol=1e-6)


def test_a_parameter_that_is_not_finite_is_named_and_nothing_changes(model: Odd) -> None:
    exchange = exchange_of(model)
    train(model, 0)
    contribute(exchange, K)
    exchange.settle(included=True)
    before = exchange.state(exchange.rows).error_feedback.clone()
    with torch.no_grad():
        model.bias[4000] = float("nan")
    with pytest.raises(NonFiniteError, match="bias"):
        contribute(exchange, K)
    assert torch.equal(exchange.state(exchange.rows).error_feedback, before)


def test_a_snapshot_empties_the_error_feedback(model: Odd) -> None:
    exchange, layout = exchange_of(model), layout_of(model)
    train(model, 0)
    contribute(exchange, K)
    exchange.settle(included=False)
    assert exchange.state(exchange.rows).error_feedback.count_nonzero() > 0
    exchange.load(pack(model, layout).tobytes(), 7)
    assert exchange.state(exchange.rows).error_feedback.count_nonzero() == 0
    assert exchange.round == 7


def test_a_rank_that_is_healed_while_it_waits_knows_what_it_guessed() -> None:
    """It takes the update as the one that healed it does."""
    models = [Odd(), Odd()]
    exchanges = [exchange_of(model) for model in models]
    layout = layout_of(models[0])
    train(models[0], 0)
    exchanges[0].capture(exchanges[0].read())
    staged = exchanges[0].encode(K, own_step=1.0)
    staged.keep()
    exchanges[0].anticipate()
    train(models[0], 1)
    models[1].load_state_dict(models[0].state_dict())
    exchanges[1].take(*exchanges[0].give())
    update = codec.encode(pack(Odd(), layout), k=K).payload
    for exchange in exchanges:
        exchange.settle(included=True)
        exchange.apply(exchange.stage(update))
        exchange.write_parameters(keep_progress=True)
    np.testing.assert_array_equal(pack(models[0], layout), pack(models[1], layout))


class Healed(ReplicatedExchange):
    """Becomes what another rank gives in the middle of an encoding, which goes on to its end."""

    gift: tuple[dict[str, Any], dict[str, torch.Tensor]]

    def _encode_rows(self, *arguments: Any) -> list[Any]:
        self.take(*self.gift)
        return super()._encode_rows(*arguments)


def test_an_encoding_that_is_left_behind_does_not_change_what_a_healed_rank_took(
    model: Odd,
) -> None:
    layout = layout_of(model)
    config = config_of(codec={"k": K}, outer={"beta": BETA})
    rank = Healed(config, Site(torch.device("cpu"), Group()), model, layout)
    rank.load(pack(model, layout).tobytes(), 0)
    other = exchange_of(Odd())
    other.capture(other.read() + np.float32(1))
    other.encode(K, own_step=1.0).keep()
    other.anticipate()
    about, tensors = other.give()
    taken = tensors["anchor"].numpy().copy()
    rank.gift = (about, {name: tensor.clone() for name, tensor in tensors.items()})
    rank.capture(rank.read() - np.float32(1))
    rank.encode(K, own_step=0.5)
    np.testing.assert_array_equal(rank.give()[1]["anchor"].numpy(), taken)


def test_a_rank_that_took_an_open_contribution_gives_it_on(model: Odd) -> None:
    """A rank heals another right after it was healed itself: nothing differs."""
    first = exchange_of(model)
    train(model, 0)
    contribute(first, K)
    about, tensors = first.give()
    second = exchange_of(model)
    second.take(about, tensors)
    again, same = second.give()
    assert again == about
    assert all(torch.equal(same[name], tensor) for name, tensor in tensors.items())
    rows = first.rows
    for exchange in (first, second):
        exchange.settle(included=False)
    assert torch.equal(second.state(rows).error_feedback, first.state(rows).error_feedback)
