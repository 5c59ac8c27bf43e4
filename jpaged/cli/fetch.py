"""`jpaged fetch`."""

from typing import Annotated

import typer


def fetch(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A known name (smollm2-135m-instruct), a Hugging Face id, or a path."),
    ],
) -> None:
    """Download a model into the cache (JPAGED_CACHE) and print its path.

    What is in the cache already is not downloaded again and needs no network.
    """
    from jpaged.fetch import fetch as fetch_model

    print(fetch_model(name))
