"""transformers.Trainer as the loop of a site, with a tiny model made here.

Compared with: theta of the coordinator in the trained model, the steps that it counted, and the
loss before. Run alone: pytest tests/worker/test_callback.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.joining import ROUNDS, H, digests, raw_run, run_of, tokens

import loco
from loco.config import config_from_dict
from loco.digest import chunk_hashes, theta_digest
from loco.errors import ConfigError
from loco.model import layout_of, pack

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def model() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def rows() -> list[dict[str, torch.Tensor]]:
    ids = (torch.arange(64)[:, None] + torch.arange(16)) % 64
    return [{"input_ids": row, "labels": row} for row in ids]


def test_a_trainer_trains_until_the_run_is_over(tmp_path: Path) -> None:
    loco.save_parameters(model(), tmp_path / "theta.safetensors")
    raw = raw_run() | {"model": f"file:{tmp_path / 'theta.safetensors'}"}
    with run_of(config_from_dict(raw, source="test"), tmp_path / "state") as coordinator:
        trained = model()
        callback = loco.TrainerCallback(
            coordinator.address, site="paris", tokens_per_step=4 * 2 * 16
        )
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"), max_steps=1000, per_device_train_batch_size=4,
            gradient_accumulation_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            trained, arguments, train_dataset=rows(), callbacks=[callback]
        )
        before = float(trained(**{k: v[None] for k, v in rows()[0].items()}).loss.detach())
        trainer.train()
        assert trainer.state.global_step == H * ROUNDS
        assert len(digests(coordinator)) == ROUNDS
        assert tokens(coordinator) == [4 * 2 * 16 * H] * ROUNDS
        final = pack(trained, layout_of(trained))
        assert theta_digest(chunk_hashes(final)) == coordinator.state.theta_digest
        assert float(trained(**{k: v[None] for k, v in rows()[0].items()}).loss.detach()) < before


def life(
    address: str, out: Path, *, max_steps: int, resume: bool
) -> tuple[list[int], torch.nn.Module]:
    """Train; the first token of every batch that the model was given, and the model."""
    trained, seen = model(), []
    trained.register_forward_pre_hook(
        lambda _, args, given: seen.append(int(given["input_ids"][0, 0])), with_kwargs=True
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(out), max_steps=max_steps, learning_rate=1e-2, disable_tqdm=True,
        lr_scheduler_type="inverse_sqrt", per_device_train_batch_size=4, report_to=[],
        use_cpu=True, save_strategy="steps", save_steps=2 * H,
    )  # fmt: skip
    callback = loco.TrainerCallback(address, site="paris", tokens_per_step=64)
    trainer = transformers.Trainer(trained, arguments, train_dataset=rows(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == min(max_steps, H * ROUNDS)
    return seen, trained


def test_a_trainer_that_resumes_goes_on_in_its_data_with_the_parameters_of_the_run(
    tmp_path: Path,
) -> None:
    """Two lives are given the batches of one without a break."""
    loco.save_parameters(model(), tmp_path / "theta.safetensors")
    raw = raw_run() | {"model": f"file:{tmp_path / 'theta.safetensors'}"}
    config = config_from_dict(raw, source="test")
    with run_of(config, tmp_path / "one") as coordinator:
        whole, _ = life(coordinator.address, tmp_path / "ck1", max_steps=1000, resume=False)
    assert len(set(whole)) == len(whole) == H * ROUNDS
    with run_of(config, tmp_path / "two") as coordinator:
        there = coordinator.address, tmp_path / "ck2"
        first, _ = life(*there, max_steps=2 * H, resume=False)
        assert len(digests(coordinator)) == 2
        second, trained = life(*there, max_steps=1000, resume=True)
        assert first + second == whole
        assert coordinator.state.phase == "finished"
        final = pack(trained, layout_of(trained))
        assert theta_digest(chunk_hashes(final)) == coordinator.state.theta_digest


@pytest.mark.parametrize("tokens_per_step", [0, -1])
def test_a_weight_below_one_is_refused(tokens_per_step: int) -> None:
    with pytest.raises(ConfigError, match=f"tokens_per_step is {tokens_per_step}; .* at least 1"):
        loco.TrainerCallback("127.0.0.1:1", site="paris", tokens_per_step=tokens_per_step)


def test_a_checkpoint_of_locos_is_refused_with_the_way_to_restart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resume_from_checkpoint"):
        loco.TrainerCallback(
            "127.0.0.1:1", site="paris", tokens_per_step=1, checkpoint=tmp_path / "ck"
        )
