"""Text of tokens: of a sequence as a string, and of a single token as bytes. Stop strings are found in the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

_PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
_UNPRINTABLE = sorted(set(range(256)) - _PRINTABLE)
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_UNPRINTABLE)}
"""byte for each character of a byte-level vocabulary, as in GPT-2"""
_NO_TEXT = b"\xff"  # marks a token without text; this byte never occurs in UTF-8
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Converter of token ids to text. A sequence's text omits special tokens, but `spell` returns their names."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._spelled: dict[int, bytes] = {}

    def __call__(self, token_ids: Sequence[int]) -> str:
        # `clean_up_tokenization_spaces` differs between versions of transformers, and no engine uses it
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def spell(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that a token adds after other tokens, so a leading space is kept. They may be only a
        part of a character. A token without text gives one byte that never occurs in UTF-8 (0xFF)."""
        if token_id not in self._spelled:
            self._spelled[token_id] = self._bytes_of(self.tokenizer.convert_ids_to_tokens(token_id)) or _NO_TEXT
        return self._spelled[token_id]

    def _bytes_of(self, token: str | None) -> bytes:
        if token is None:  # an id that the tokenizer does not use
            return b""
        # converted after other tokens, because a decoder may remove a leading space
        tokens, before = self._before
        text = self.tokenizer.convert_tokens_to_string([*tokens, token]).removeprefix(before)
        if _NO_CHARACTER not in text:
            return text.encode()
        if token.startswith("<0x"):  # byte fallback: <0xE2>
            return bytes.fromhex(token[3:-1])
        return bytes(_BYTE_OF[char] for char in token) if _BYTE_OF.keys() >= set(token) else text.encode()

    @cached_property
    def _before(self) -> tuple[list[str], str]:
        """Short token sequence and its text. `_bytes_of` puts this sequence before a token."""
        tokens = self.tokenizer.convert_ids_to_tokens(self.tokenizer("a", add_special_tokens=False)["input_ids"])
        return tokens, self.tokenizer.convert_tokens_to_string(tokens)
