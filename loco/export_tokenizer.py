"""The tokenizer that goes with an export: what the tokens of the run's corpora mean."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loco.config import Config, DataConfig
from loco.data.mixture import parse_mixture
from loco.tokens import BYTES, is_prepared, read_manifest
from loco.tokens.prepare import TOKENIZER
from loco.tokens.prepared import Manifest


@dataclass(frozen=True, kw_only=True)
class Known:
    """A tokenizer that is known on this machine."""

    file: Path | None
    """Its tokenizer.json; None: bytes are the tokens."""
    end_of_text: str | None = None
    """The token that ends a document; bytes end one with an empty line."""

    def end_id(self) -> int | None:
        """The number of the end-of-text token."""
        if self.file is None or self.end_of_text is None:
            return None
        described = json.loads(self.file.read_text(encoding="utf-8"))
        added = {token["content"]: token["id"] for token in described.get("added_tokens", ())}
        vocabulary = described["model"]["vocab"]
        numbers = (vocabulary if isinstance(vocabulary, dict) else {}) | added  # a list: Unigram
        found = numbers.get(self.end_of_text)
        return found if isinstance(found, int) else None

    def write(self, to: Path, *, seq_len: int) -> None:
        """tokenizer.json, and tokenizer_config.json for `AutoTokenizer`."""
        if self.file is None:
            write_json(to / TOKENIZER, _byte_tokenizer())
        else:
            shutil.copyfile(self.file, to / TOKENIZER)
        wrapped = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": seq_len,
            "clean_up_tokenization_spaces": False,
        }
        end = {} if self.end_of_text is None else {"eos_token": self.end_of_text}
        write_json(to / "tokenizer_config.json", wrapped | end)


def known_tokenizer(config: Config, *, vocab_size: int) -> Known | None:
    """That of a prepared corpus of the run that is on this machine, or bytes; None: not known.

    Text that was not prepared has bytes as tokens; but where it is not here, nobody can tell what
    `data.corpus` or a site's own `--data` is. A vocabulary of 256 then means bytes, unless the run
    states another tokenizer. DataError for a prepared corpus here whose manifest cannot be read.
    """
    stated = config.data.tokenizer_digest
    for directory, manifest in _prepared_here(config.data):
        if stated in (None, manifest.tokenizer_digest or BYTES):
            if not manifest.tokenizer_digest:
                return Known(file=None)
            end = manifest.settings.get("end_of_text")
            return Known(file=directory / TOKENIZER, end_of_text=end)
    is_bytes = stated == BYTES or (stated is None and vocab_size == 256)
    return Known(file=None) if is_bytes else None


def _prepared_here(data: DataConfig) -> list[tuple[Path, Manifest]]:
    """The prepared corpora that the config names and this machine has, parts of mixtures too."""
    names = [
        name for corpus in (data.corpus, *data.sites.values()) for _, name in parse_mixture(corpus)
    ]
    directories = [Path(name).expanduser() for name in dict.fromkeys(names) if is_prepared(name)]
    return [(directory, read_manifest(directory)) for directory in directories]


def _byte_tokenizer() -> dict[str, Any]:
    """A BPE without merges: each byte is the token of its own value."""
    alphabet = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level | {"trim_offsets": True},
        "decoder": byte_level | {"trim_offsets": True},
        "model": {"type": "BPE", "vocab": alphabet, "merges": []},
    }


def _byte_symbols() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, as `ByteLevel` expects: those that print stand
    for themselves, the others for code points from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write it indented, and characters as they are."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
