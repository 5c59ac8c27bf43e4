"""The `jpaged` command.

    jpaged generate   continue prompts, all at once
    jpaged chat       talk with a model
    jpaged serve      serve a model by OpenAI's API
    jpaged fetch      download a model and print where it is
    jpaged info       what a model is, what a page costs, how many pages fit here
    jpaged plan       how many sequences would fit into a memory, and what would be wasted

Modules that need jax are imported when a command runs, so `jpaged --help` is quick.
"""

from jpaged.cli.app import app, main

__all__ = ["app", "main"]
