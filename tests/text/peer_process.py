"""llama.cpp's tokenizer behind a line of JSON, in a process of its own.

Run as a script by peer.py. It calls the C functions that the `xllamacpp` package carries; they log to standard error
and may abort, which is why they do not run in the test process. Knows nothing of pytest.
"""

from __future__ import annotations

import base64
import ctypes
import importlib.util
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any


class Params(ctypes.Structure):
    """Room for `llama_model_params`, whose fields are left as the library fills them in."""

    _fields_ = [("room", ctypes.c_uint8 * 1024)]


def library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None and spec.origin is not None
    lib = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("xllamacpp*.so"))))
    lib.llama_model_default_params.restype = Params
    lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Params]
    lib.llama_model_load_from_file.restype = ctypes.c_void_p
    lib.llama_model_free.argtypes = [ctypes.c_void_p]
    lib.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    lib.llama_model_get_vocab.restype = ctypes.c_void_p
    for name in ("n_tokens", "bos", "eos", "get_add_bos", "get_add_eos"):
        getattr(lib, f"llama_vocab_{name}").argtypes = [ctypes.c_void_p]
    for name in ("is_eog", "is_control"):
        getattr(lib, f"llama_vocab_{name}").argtypes = [ctypes.c_void_p, ctypes.c_int32]
        getattr(lib, f"llama_vocab_{name}").restype = ctypes.c_bool
    for name in ("get_add_bos", "get_add_eos"):
        getattr(lib, f"llama_vocab_{name}").restype = ctypes.c_bool
    buffer, size, flag = ctypes.c_char_p, ctypes.c_int32, ctypes.c_bool
    ids = ctypes.POINTER(ctypes.c_int32)
    lib.llama_tokenize.argtypes = [ctypes.c_void_p, buffer, size, ids, size, flag, flag]
    lib.llama_detokenize.argtypes = [ctypes.c_void_p, ids, size, buffer, size, flag, flag]
    lib.llama_token_to_piece.argtypes = [ctypes.c_void_p, size, buffer, size, size, flag]
    return lib


class Peer:
    """One loaded vocabulary."""

    def __init__(self) -> None:
        self._lib = library()
        self._quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        self._lib.llama_log_set(self._quiet, None)
        self._model: int | None = None
        self._vocab: int | None = None

    def load(self, path: str) -> dict[str, Any]:
        if self._model:
            self._lib.llama_model_free(self._model)
        self._model = self._lib.llama_model_load_from_file(path.encode(), self._lib.llama_model_default_params())
        if not self._model:
            return {"error": "refused"}
        vocab = self._vocab = self._lib.llama_model_get_vocab(self._model)
        count = self._lib.llama_vocab_n_tokens(vocab)
        return {
            "size": count,
            "bos": self._lib.llama_vocab_bos(vocab),
            "eos": self._lib.llama_vocab_eos(vocab),
            "add_bos": self._lib.llama_vocab_get_add_bos(vocab),
            "add_eos": self._lib.llama_vocab_get_add_eos(vocab),
            "eog": [i for i in range(count) if self._lib.llama_vocab_is_eog(vocab, i)],
        }

    def encode(self, texts: list[str], add_special: bool, parse_special: bool) -> list[list[int]]:
        return [self._encode(text.encode(), add_special, parse_special) for text in texts]

    def _encode(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        room = len(text) + 16
        ids = (ctypes.c_int32 * room)()
        count = self._lib.llama_tokenize(self._vocab, text, len(text), ids, room, add_special, parse_special)
        assert count >= 0
        return list(ids[:count])

    def detokenize(self, sequences: list[list[int]]) -> list[str]:
        output = []
        for sequence in sequences:
            ids = (ctypes.c_int32 * max(len(sequence), 1))(*sequence)
            room = 64 * len(sequence) + 1024
            text = ctypes.create_string_buffer(room)
            length = self._lib.llama_detokenize(self._vocab, ids, len(sequence), text, room, False, True)
            assert length >= 0
            output.append(base64.b64encode(text.raw[:length]).decode())
        return output

    def classes(self) -> list[int] | None:
        """Returns the class bits of every code point, or None where the library keeps them to itself."""
        flags = getattr(self._lib, "_Z26unicode_cpt_flags_from_cptj", None)
        if flags is None:
            return None
        flags.argtypes, flags.restype = [ctypes.c_uint32], ctypes.c_uint16
        return [flags(code) for code in range(0x110000)]

    def pieces(self, special: bool) -> list[str]:
        output = []
        text = ctypes.create_string_buffer(4096)
        for id_ in range(self._lib.llama_vocab_n_tokens(self._vocab)):
            length = self._lib.llama_token_to_piece(self._vocab, id_, text, len(text), 0, special)
            assert length >= 0
            output.append(base64.b64encode(text.raw[:length]).decode())
        return output


def serve(replies: int) -> None:
    peer = Peer()
    with os.fdopen(replies, "w") as out:
        for line in sys.stdin:
            request = json.loads(line)
            reply = getattr(peer, request.pop("call"))(**request)
            out.write(json.dumps(reply) + "\n")
            out.flush()


if __name__ == "__main__":
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # Its regular expressions recurse once a character; a long run needs a deep stack.
    threading.stack_size(1 << 30)
    thread = threading.Thread(target=serve, args=(replies,))
    thread.start()
    thread.join()
