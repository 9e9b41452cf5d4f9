"""`steelyard chat`."""

from __future__ import annotations

import contextlib
import signal
import sys
from types import FrameType

from steelyard.cli.options import (
    BaseOption,
    CheckpointArgument,
    DeviceChoice,
    DeviceOption,
    DtypeChoice,
    DtypeOption,
    MaskOption,
    MaxTokensOption,
    SeedOption,
    SystemOption,
    TemperatureOption,
    TemplateOption,
    TokenizerOption,
    TopKOption,
    TopPOption,
)
from steelyard.core.console import console
from steelyard.core.errors import Interrupted, UserError

PROMPT = "> "


def chat(
    checkpoint: CheckpointArgument,
    system: SystemOption = None,
    template: TemplateOption = None,
    max_tokens: MaxTokensOption = 500,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = 50,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    tokenizer: TokenizerOption = None,
    mask: MaskOption = None,
    base: BaseOption = None,
    device: DeviceOption = DeviceChoice.auto,
    dtype: DtypeOption = DtypeChoice.auto,
) -> None:
    """Talk with a model on the terminal, through its own chat template.

    Ctrl-C ends the answer, Ctrl-D the conversation. Scripts use steelyard generate --chat.

    Example: steelyard chat HuggingFaceTB/SmolLM2-135M-Instruct --system "Answer in one sentence."
    """
    if not sys.stdin.isatty():
        raise UserError("chat needs a terminal", hint="in scripts: steelyard generate CKPT --chat --prompt TEXT")
    from steelyard.evaluate.chat import open_chat
    from steelyard.evaluate.generation import Sampling, writer

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # Editing and history of lines.
    sampling = Sampling(max_tokens, temperature, top_k, top_p, seed)
    opened = open_chat(writer(checkpoint, tokenizer, device, dtype, mask, base), checkpoint, template, system)
    signal.signal(signal.SIGINT, _interrupt)
    console.say("Ctrl-C ends an answer, Ctrl-D the conversation.")
    while True:
        try:
            text = input(PROMPT)
            if not text.strip():
                continue
            with contextlib.closing(opened.answer(text, sampling)) as pieces:
                for piece in pieces:
                    print(piece, end="", flush=True)
        except EOFError:
            print()
            return
        except Interrupted:
            pass
        print()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Every Ctrl-C is a request of its own here: one ends an answer, the next may drop a line."""
    raise Interrupted
