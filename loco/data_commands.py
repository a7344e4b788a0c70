"""`loco data prepare` and `loco data check`: token files of any text (`loco.tokens`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@data_app.callback()
def data_group() -> None:
    """Make token files of text, and check them."""


@data_app.command()
def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help=".txt, .jsonl, .parquet files, directories of them, or hf:PATH_OR_ID@SPLIT."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory to write; give it as a corpus then.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, a tokenizer.json, or a directory that holds one.")
    ] = "bytes",
    end_of_text: Annotated[
        str | None,
        typer.Option(help="Token that ends a document; default: the tokenizer's eos_token."),
    ] = None,
    field: Annotated[
        str, typer.Option(help="Field or column of the text, in jsonl and parquet.")
    ] = "text",
    held_out: Annotated[
        float, typer.Option(help="Share of the documents held out for validation.")
    ] = 0.01,
    jobs: Annotated[int, typer.Option(help="Processes; default: one a core.")] = 0,
    shard_mb: Annotated[float, typer.Option(help="Text of one shard, MB.")] = 64.0,
) -> None:
    """Tokenise files in parallel into a corpus of memory-mapped shards.

    Started again after an interruption, it makes only what is missing.
    """
    from rich.console import Console
    from rich.progress import Progress

    from loco.cpus import usable_cpus
    from loco.errors import ConfigError
    from loco.tokens import BYTES
    from loco.tokens.prepare import Options
    from loco.tokens.prepare import prepare as run
    from loco.tokens.sources import KINDS, skipped_files

    if not 1e-3 <= shard_mb <= 4096:
        raise ConfigError(f"--shard-mb {shard_mb:g} is out of range: 0.001 to 4096")
    options = Options(
        inputs=inputs,
        out=out,
        tokenizer=tokenizer,
        end_of_text=end_of_text,
        field=field,
        held_out=held_out,
        jobs=jobs or usable_cpus(),
        item_bytes=round(shard_mb * 1e6),
    )
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenising")
        manifest = run(options, lambda done, total: bar.update(task, completed=done, total=total))
    if skipped := skipped_files(inputs):
        shown = ", ".join(map(str, skipped[:3])) + (", ..." if len(skipped) > 3 else "")
        typer.echo(
            f"skipped {len(skipped)} files that are none of {', '.join(KINDS)}: {shown}; unpack "
            "what is packed",
            err=True,
        )
    for split in ("train", "validation"):
        shards = [shard for shard in manifest.shards if shard.split == split]
        tokens, documents = (
            sum(getattr(s, f"num_{x}") for s in shards) for x in ("tokens", "documents")
        )
        typer.echo(f"{split}: {tokens:,} tokens of {documents:,} documents, {len(shards)} shards")
    typer.echo(f"vocabulary {manifest.vocab_size}: model.vocab_size must be at least that")
    digest = manifest.tokenizer_digest or BYTES
    typer.echo(f"tokenizer {digest}: data.tokenizer_digest, which every site checks")


@data_app.command()
def check(
    directory: Annotated[Path, typer.Argument(help="What loco data prepare wrote.")],
) -> None:
    """Verify every shard against its digest and its vocabulary. Exit code 1 on a fault."""
    from loco.tokens import check_prepared, read_manifest

    faults = check_prepared(directory)
    for fault in faults:
        typer.echo(f"fault: {fault}")
    typer.echo(f"{len(read_manifest(directory).shards)} shards: {len(faults)} faults")
    raise typer.Exit(1 if faults else 0)
