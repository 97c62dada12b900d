"""`lucidrl merge`: its arguments. The work is in `lucidrl.recipes.merge`, which is imported at use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def merge_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="Run folder with policy.lora (its newest checkpoint), RUN@best, or an adapter folder."
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the merged model.")],
    base: Annotated[
        str | None,
        typer.Option(help="Model that the adapter was trained on, if it has moved since.", show_default=False),
    ] = None,
) -> None:
    """Merge a LoRA adapter into its base, as a Hugging Face model folder.

    Examples:

        lucidrl merge runs/grpo/exp_001 merged
        lucidrl merge runs/grpo/exp_001@best merged
        lucidrl merge adapter merged --base models/SmolLM2-135M-Instruct

    The folder has weights, config and tokenizer, in the precision of the run; it needs neither the adapter nor its
    base. Prints the merge gap: how much rounding the merged weights changes log-probabilities of a fixed text.
    """
    from lucidrl.recipes.merge import merge

    merged = merge(source, output, base)
    typer.echo(f"{output}: {merged.source} merged into {merged.base}, {merged.precision}")
    typer.echo(f"merge gap: {merged.gap:.2g} nats per token")
