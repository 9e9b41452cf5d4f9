"""`steelyard hub`: upload and download models, log in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.options import JsonOption, print_result
from steelyard.core import units
from steelyard.core.errors import UserError

TokenWords = Annotated[list[str] | None, typer.Argument(hidden=True)]


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the commands to the tree."""
    group = typer.Typer(help=help_, rich_markup_mode=None, no_args_is_help=True)
    for command in (push, pull, whoami, serve):
        group.command(command.__name__)(command)
    # All further arguments are accepted, so that the error for a token on the command line does not repeat the token.
    group.command("login", context_settings={"ignore_unknown_options": True})(login)
    root.add_typer(group, name=name)


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A Hugging Face folder, a run, or a checkpoint.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="user/model on the hub, or model in your own namespace.")],
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    test_prompt: Annotated[str, typer.Option(help="A prompt to test the model before the upload.")] = (
        "Once upon a time,"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files, print the card, upload nothing.")] = False,
    card: Annotated[bool, typer.Option("--card", help="Replace an existing README.md with a new card.")] = False,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run of the model, for the card.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Test a model, and upload it with its tokenizer and a model card. A rerun uploads only missing files.

    Example: steelyard hub push hf/my-model me/my-model --private
    """
    from steelyard.evaluate import publish

    result = publish.push(folder, name, private, test_prompt, dry_run, card, run)
    lines = [result["generated"], ""]
    if dry_run:
        lines += [f"{units.size(size):>10}  {file}" for file, size in result["files"].items()]
        lines += ["", result["card"].rstrip(), "", "dry run: nothing was uploaded"]
    else:
        lines += [f"sent       {', '.join(result['sent']) or 'nothing'} ({units.size(result['bytes'])})"]
        for key in ("unchanged", "kept", "removed"):
            lines += [f"{key:<10} {', '.join(result[key])}"] if result[key] else []
        lines += [f"published  {result['name']} at {result['commit']}"]
    print_result(result, json, "\n".join(lines))


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="user/model on the hub.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The output folder.")],
    revision: Annotated[
        str | None, typer.Option(help="A branch, tag or commit.  [default: main]", show_default=False)
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Download these files instead of the default ones; repeatable."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that differ.")] = False,
    json: JsonOption = False,
) -> None:
    """Download a model: weights in one format, configuration and tokenizer. An interrupted download is resumed.

    Example: steelyard hub pull HuggingFaceTB/SmolLM2-135M models/smollm2
    """
    from steelyard.checkpoint import hub

    result = hub.pull(name, folder, revision, include or (), overwrite)
    fetched, total = len(result["fetched"]), len(result["files"])
    text = f"{folder}: {total} files, {fetched} of them downloaded now ({units.size(result['bytes'])})"
    if result["left_out"]:
        text += f"\nnot downloaded: {', '.join(result['left_out'])}"
    print_result(result, json, text)


def login(
    words: TokenWords = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the token from a file.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Save a token of the hub for later commands. It is read from a hidden prompt, a pipe or a file.

    Example: steelyard hub login --token-file token.txt
    """
    from steelyard.checkpoint import hub

    if words:
        raise UserError(
            "a token on the command line can be read by everyone on this machine",
            hint="if it was a token, revoke it; pass the new one at the prompt, by a pipe, or with --token-file",
        )
    name = hub.login(hub.read_token(token_file))
    print_result({"name": name}, json, name)


def whoami(json: JsonOption = False) -> None:
    """Print the user of the current token.

    Example: steelyard hub whoami
    """
    from steelyard.checkpoint import hub

    result = hub.whoami()
    print_result(result, json, str(result["name"]))


def serve(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the hub; models/ORG/NAME is a model.")],
    host: Annotated[
        str, typer.Option(help="The address to listen on; everyone who can reach it can download.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 selects a free one.")] = 8328,
    user: Annotated[str, typer.Option(help="The user name that whoami reports and push uses.")] = "local",
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Uploads need the token in this file.  [default: any token]", show_default=False
        ),
    ] = None,
) -> None:
    """Serve a folder as a hub, for rehearsals and for sites without a network.

    huggingface_hub, transformers and this command use it if HF_ENDPOINT names it. Files copied to DIR/models/ORG/NAME
    or DIR/datasets/ORG/NAME are served, and uploads are stored there.

    Example: steelyard hub serve my-hub
    """
    from steelyard.checkpoint import hub
    from steelyard.checkpoint.hub import local_hub

    local_hub.serve(folder, host, port, user, None if token_file is None else hub.read_token(token_file))
