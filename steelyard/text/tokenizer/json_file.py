"""Tokenizers of the `tokenizers` library: `tokenizer.json` of Hugging Face, GPT-2's pair, and byte-level BPEs.

The reference is the `tokenizers` library. If `gigatoken` can run the same file, it encodes many times faster. It is
used only if it gives the same ids as the reference on a text of difficult characters.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from steelyard.core import files
from steelyard.core.errors import UserError
from steelyard.text.tokenizer.tokenizer import END_NAMES, Tokenizer, read_config, template_in, write_template

if TYPE_CHECKING:
    import tokenizers

PROBE = (
    "It's the year 2024's  end;\tnaïve café — “quotes” … don't, I'LL\r\n\n   indented\u00a0text ١٢٣ ½ ² Ⅷ\n"
    "日本語のテキスト、한국어 텍스트 中文文本 かﾞ が 👩‍👩‍👧‍👦🎉 Ελλάδα עברית العربية ไทย "
    "a\u0301 \u200b\u3000\x85 \x1c<|endoftext|> "
    "x_y=3.14e-10; while(1){} http://a.b/c?d=e&f ZZZZZZZZZZZZZZZZ 00000000000000"
)


SURROGATE = re.compile("[\ud800-\udfff]")


class JsonTokenizer(Tokenizer):
    """A `tokenizers` tokenizer."""

    kind = "tokenizer.json"

    def __init__(self, inner: tokenizers.Tokenizer, source: str, config: dict[str, Any] | None = None) -> None:
        self.inner, self.source, self.config = inner, source, dict(config or {})
        inner.no_truncation()  # transformers saves the settings of its last call in the file.
        inner.no_padding()
        text = inner.to_str()
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        ids = inner.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        self.end_id = self._end_id()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.inner.encode(valid_utf8(text), add_special_tokens=False).ids
        return ids

    def framed(self, text: str) -> list[int]:
        ids: list[int] = self.inner.encode(valid_utf8(text), add_special_tokens=True).ids
        begin = self._id_of("bos_token")
        # The file defines the special tokens, but the config next to it takes precedence in `transformers`.
        if begin is not None and self.config.get("add_bos_token") is True and ids[:1] != [begin]:
            return [begin, *ids]
        return ids

    def located(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._with_special_tokens.encode(valid_utf8(text), add_special_tokens=False)
        ends = [0, *(end for _, end in encoding.offsets)]
        # Some files trim spaces from the span of a token: an empty span then starts where the previous one ended.
        spans = [(min(last, first) if first == end else first, end)
                 for last, (first, end) in zip(ends, encoding.offsets, strict=False)]  # fmt: skip
        return encoding.ids, spans

    def chat_template(self) -> str | None:
        path = Path(self.source)
        return template_in(self.config, path.parent if path.is_file() else None)

    def special(self, role: str) -> str | None:
        number = self.special_id(role)
        name: str | None = None if number is None else self.inner.id_to_token(number)
        return name

    def special_id(self, role: str) -> int | None:
        return self.end_id if role == "eos_token" else self._id_of(role)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        if self._fast is not None:
            encode = self._fast.encode
            try:
                return [encode(text) for text in texts]
            except (TypeError, UnicodeError):
                return [encode(valid_utf8(text)) for text in texts]
        encodings = self.inner.encode_batch_fast([valid_utf8(text) for text in texts], add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        text: str = self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def pieces(self, text: str) -> list[str]:
        pieces: list[str] = self.inner.encode(valid_utf8(text), add_special_tokens=False).tokens
        return pieces

    def save(self, folder: Path) -> None:
        end = None if self.end_id is None else self.inner.id_to_token(self.end_id)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **self.config}
        if end is not None:
            config.setdefault("eos_token", end)
        files.write_json(folder / "tokenizer_config.json", config)
        write_template(self, config, folder)
        # The vocabulary is written last: a folder that has it is complete.
        files.write_text(folder / "tokenizer.json", self.inner.to_str(pretty=True))

    def model_unknown_id(self) -> int | None:
        model = json.loads(self.inner.to_str())["model"]
        number: int | None = model.get("unk_id")
        return self.inner.token_to_id(model["unk_token"]) if model.get("unk_token") else number

    def _end_id(self) -> int | None:
        configured = self._id_of("eos_token")
        if configured is not None:
            return configured
        ids = (self.inner.token_to_id(name) for name in END_NAMES)
        return next((number for number in ids if number is not None), None)

    def _id_of(self, role: str) -> int | None:
        """The id of the token that has a role in the config."""
        token = self.config.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        number: int | None = self.inner.token_to_id(token) if token else None
        return number

    @cached_property
    def _with_special_tokens(self) -> tokenizers.Tokenizer:
        """The tokenizer, which also recognizes the special tokens of the config in a text, as `transformers` does."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Inner

        tokens = (self.special(role) for role in ("bos_token", "eos_token", "unk_token", "pad_token"))
        names = {name for name in tokens if name is not None}
        known = {token.content for token in self.inner.get_added_tokens_decoder().values()}
        if names <= known:
            return self.inner
        inner: tokenizers.Tokenizer = Inner.from_str(self.inner.to_str())
        inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in sorted(names - known)])
        return inner

    @cached_property
    def _fast(self) -> Any:
        """The encoder of gigatoken, if it is installed, supports this vocabulary and gives the same ids."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            import gigatoken

            fast = gigatoken.Tokenizer.from_json(self.inner.to_str())
            agrees = all(
                fast.encode(part).tolist() == self.encode(part) for part in (PROBE, *PROBE.split(" "), " ", "")
            )
        except Exception:
            # On any error the reference is used, which is only slower.
            return None
        return fast if agrees else None


def from_file(path: Path) -> JsonTokenizer:
    """Load a `tokenizer.json`, with the `tokenizer_config.json` next to it if there is one."""
    from tokenizers import Tokenizer as Inner

    try:
        inner = Inner.from_file(str(path))
    except Exception as error:
        raise UserError(f"the tokenizer cannot be read: {error}", where=str(path)) from None
    return JsonTokenizer(inner, str(path), read_config(path.with_name("tokenizer_config.json")))


def from_gpt2_pair(vocab: Path, merges: Path) -> JsonTokenizer:
    """Load GPT-2's `vocab.json` and `merges.txt`."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Inner

    try:
        inner = Inner(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:
        raise UserError(f"the vocabulary cannot be read: {error}", where=f"{vocab},{merges}") from None
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    known = inner.get_vocab()
    inner.add_special_tokens([AddedToken(name, special=True) for name in END_NAMES[:1] if name in known])
    return JsonTokenizer(inner, f"{vocab},{merges}")


def valid_utf8(text: str) -> str:
    """Text that UTF-8 can encode: a lone surrogate, which JSON allows, becomes the replacement character."""
    return text if SURROGATE.search(text) is None else SURROGATE.sub("\ufffd", text)
