"""The pre-tokenizers of byte-pair vocabularies, by the name a GGUF gives in `tokenizer.ggml.pre`.

Owns which names are served, how each cuts text into words (regular expressions in Oniguruma's syntax, applied one after
the other, each to the pieces its predecessor left), and the defaults that go with a name. Knows nothing of
vocabularies. Names, expressions and defaults follow llama.cpp, quirks included, because GGUF files are made and checked
with it: upper and lower case are told apart only among ASCII letters, for instance.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut into words before merges apply, with the defaults that hang on the name.

    Attributes:
        patterns: expressions applied in sequence; what an expression matches, and each gap, becomes a piece.
        ignore_merges: a word that is a token as it stands is taken whole.
        add_bos: whether a beginning-of-sequence token is added where the file does not say.
        default_bos: whether the file may leave its BOS id out and still have one.
        byte_level: tokens are spelt in GPT-2's byte alphabet; otherwise in UTF-8 with U+2581 for spaces.
        whole_newlines: a run of newlines that is a token is taken whole.
        force_bos: a BOS token is added whatever the file says.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    default_bos: bool = True
    byte_level: bool = True
    whole_newlines: bool = False
    force_bos: bool = False


_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_HAN = r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
_CJK = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_SPACES = r"\s+(?!\S)|\s+"
# A letter that is not a lower-case (upper-case) ASCII one.
_UPPER = r"[\p{L}&&[^a-z]]"
_LOWER = r"[\p{L}&&[^A-Z]]"


def _words(
    letters: str = r"\p{L}+",
    numbers: str = r"\p{N}",
    symbols: str = r"[^\s\p{L}\p{N}]+[\r\n]*",
    *,
    contraction: str = _CONTRACTION + "|",
    suffix: str = "",
    newlines: str = r"\s*[\r\n]+",
    spaces: str = _SPACES,
) -> str:
    """Returns the expression most pre-tokenizers vary: contractions, words, numbers, symbols, white space."""
    words = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{one}{suffix}" for one in letters.split("|"))
    return rf"{contraction}{words}|{numbers}| ?{symbols}|{newlines}|{spaces}"


def _cased(upper: str, lower: str) -> str:
    """Returns the two letter runs of the GPT-4o family: capitals then small letters, with either part optional."""
    return f"{upper}*{lower}+|{upper}+{lower}*"


_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_QWEN2 = _words()
_LLAMA3 = _words(numbers=r"\p{N}{1,3}")
_SLASHED = r"[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT4O = _words(_cased(_UPPER, _LOWER), r"\p{N}{1,3}", _SLASHED, contraction="", suffix=_CONTRACTION + "?")
# Every letter category counts as "letter", so this family's two runs are one.
_UNCASED = _words(
    _cased(r"[\p{L}\p{M}]", r"[\p{L}\p{M}]"), r"\p{N}{1,3}", _SLASHED, contraction="", suffix=_CONTRACTION + "?"
)
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
_SPARK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}"
)
# Runs of digits are cut in threes from the right; the piece with the first group takes the text before it along.
# Possessive quantifiers keep the search linear in the run's length.
_DIGITS_FROM_RIGHT = r"\P{N}*+(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})*+(?!\p{N}))|\P{N}*+\p{N}{3}|\P{N}++"
_NEWLINE_RUNS = r"[^\n]+|\n+"
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+"
# Wide spaces are never literal members of a class: they only ever count as white space.
_DEEPSEEK_CJK = r"[[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]&&[^\s]]+"
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}"
    r"\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}"
    r"\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}"
    r"\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}"
    r"\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}"
    r"\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}"
    r"\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}"
    r"\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}"
    r"\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}"
    r"\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}"
    r"\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+"
)
_DEEPSEEK_SYMBOLS = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}-\x{3002}]+"
_YOUTU_CJK = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+"
    r"|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+"
    rf"|[\x{{3105}}-\x{{312F}}]+|{_CJK}"
)
_AFMOE_SCRIPTS = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}"
    r"\x{2F00}-\x{2FDF}\x{0E40}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}"
    r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
_JAIS_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")) + r"|\s"

_LLAMA3_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_LLAMA3_PLAIN = PreTokenizer((_LLAMA3,))
_QWEN2_WORDS = PreTokenizer((_QWEN2,))
_GPT2_WORDS = PreTokenizer((_GPT2,))
_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", _CJK, _PUNCTUATED))
_GPT4O_WORDS = PreTokenizer((_GPT4O,))
_GLM = PreTokenizer((_LLAMA3,), ignore_merges=True, default_bos=False)
_GEMMA4 = PreTokenizer((_NEWLINE_RUNS,), byte_level=False, whole_newlines=True, force_bos=True)
_FROM_RIGHT_UNCASED = PreTokenizer((_DIGITS_FROM_RIGHT, _UNCASED))

_BY_PRETOKENIZER: tuple[tuple[PreTokenizer, str], ...] = (
    (
        PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9]{3}")),
        "default",
    ),
    (_LLAMA3_BPE, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"),
    (_LLAMA3_PLAIN, "dbrx smaug-bpe"),
    (_GLM, "glm4 glm5"),
    (PreTokenizer((_LLAMA3,), default_bos=False), "chatglm-bpe"),
    (
        _QWEN2_WORDS,
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 bailingmoe bailingmoe2 "
        "llada-moe",
    ),
    (PreTokenizer((_words(r"[\p{L}\p{M}]+", symbols=r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)), "qwen35"),
    (
        _GPT2_WORDS,
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum",
    ),
    (_DIGITS_THEN_GPT2, "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    (PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9]{3}")), "falcon"),
    (
        PreTokenizer((r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_SYMBOLS, r"\s+\z", _DEEPSEEK_CJK, r"\p{N}+")),
        "deepseek-llm",
    ),
    (
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
        "deepseek-coder",
    ),
    (_DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (PreTokenizer((r"\p{N}{1,3}", _CJK, _SPARK, r"\p{N}")), "spark2_5"),
    (
        PreTokenizer(
            (
                _YOUTU_CJK,
                _words(
                    _cased(r"[\p{L}\p{M}]", r"[\p{L}\p{M}]"),
                    r"\p{N}",
                    _SLASHED,
                    contraction="",
                    suffix=_CONTRACTION + "?",
                ),
            ),
            ignore_merges=True,
        ),
        "youtu",
    ),
    (
        PreTokenizer(
            (_words(_cased(_UPPER, _LOWER), r"\p{N}", _SLASHED, contraction=""),),
            ignore_merges=True,
            add_bos=True,
        ),
        "tekken",
    ),
    (_GPT4O_WORDS, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (_FROM_RIGHT_UNCASED, "tiny_aya cohere2moe"),
    (PreTokenizer((_DIGITS_FROM_RIGHT, _AFMOE_SCRIPTS, _PUNCTUATED)), "afmoe"),
    (
        PreTokenizer(
            (
                rf"[{_HAN}]+|"
                + _words(rf"[\p{{L}}&&[^{_HAN}]]+", r"\p{N}{1,3}", contraction="", suffix=_CONTRACTION + "?"),
            )
        ),
        "kimi-k2",
    ),
    (
        PreTokenizer(
            (
                _words(
                    r"[\p{L}\p{M}\x{200C}\x{200D}]+",
                    r"\p{N}{1,3}",
                    contraction=_CONTRACTION.replace("[sS]", r"[sS\x{17F}]") + "|",
                ),
            )
        ),
        "k2-horizon",
    ),
    (PreTokenizer((_words(symbols=r"[^\s\p{L}\p{N}\r\n]+"),)), "seed-coder"),
    (PreTokenizer((_words(contraction=""),)), "ufakzeka"),
    (PreTokenizer((_NEWLINE_RUNS, _QWEN2)), "laguna"),
    (
        PreTokenizer(
            (
                _words(
                    r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                    symbols=r"[^\s\p{L}\p{N}]+[\r\n/]?",
                    newlines=r"\s*[\r\n]",
                ),
            )
        ),
        "exaone-moe",
    ),
    (PreTokenizer((r"\p{N}{1,3}", _words(numbers=r"\p{N}+")), ignore_merges=True), "minicpm5"),
    (PreTokenizer((_words(numbers=r"\p{N}{1,3}", spaces=_JAIS_SPACES),)), "jais-2"),
    (PreTokenizer((_BLOOM,)), "bloom gpt3-finnish poro-chat"),
    (PreTokenizer((_BLOOM, r"\p{N}")), "viking"),
    (
        PreTokenizer(
            (
                r"<sentinel:[0-9]+>",
                r"IMGIMG[A-I]{1,4}Z",
                r"[\t\n]|    |  ",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
        "chameleon",
    ),
    (_GEMMA4, "gemma4"),
    (PreTokenizer((_NEWLINE_RUNS,), byte_level=False), "sarvam-moe"),
)

PRETOKENIZERS: dict[str, PreTokenizer] = {
    name: pretokenizer for pretokenizer, names in _BY_PRETOKENIZER for name in names.split()
}
