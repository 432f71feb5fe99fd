"""Texts that are hard to tokenise, and a source of random ones.

Each entry is there for a reason its group's name gives. Random texts draw from one or two characters of every class a
pre-tokenizer tells apart, so that every boundary between classes turns up.
"""

from __future__ import annotations

import random

EMPTY_AND_TINY = [
    "",
    " ",
    "\n",
    "\t",
    "a",
    "é",
    "中",
    "😀",
    "\x00",
    "\x7f",
    "\u00a0",
    "\ufeff",
    "\u200b",
]
WORDS = [
    "Hello world",
    " leading and trailing ",
    "The quick brown fox jumps over the lazy dog. 0123456789",
    "naïve café — “quoted” … 100% sure!?",
    "x=1;y=2//z\n#include <stdio.h>\nint main(void) { return 0; }\n",
    "def f(a, b=3, *args, **kw):\n\treturn {k: v for k, v in kw.items()}\n\n\n",
    "https://example.com/a/b?c=d&e=%20#frag user@example.org",
    "SELECT * FROM t WHERE a >= 10 AND b <> 'x''y';",
    "camelCaseWord HTTPServer XMLHttpRequest iPhone McDonald's ALLCAPS lower mIxEd",
    "snake_case __dunder__ kebab-case dotted.name path/to/file\\win\\path",
]
CASES = [
    "éAb 中Ab éÉA 中AA aé Aé aÉa カAa 가Bb ÉAa",
    "aéA aAé Aéa AÉa AAa aAa aaA ǅA ʰA aʰA",
]
CONTRACTIONS = [
    "'ſand x'ſand 'ſ 'ſa",
    "'sand 'tall 'realm 'vein 'make 'llama 'dog 'Sand 'TALL x'sand",
    "I'm you're he'll she'd we've they'll it's don't",
    "I'M YOU'RE HE'LL SHE'D WE'VE THEY'LL IT'S DON'T",
    "I'm'd've 'tis 's 'S 't 're 'RE 'rE 've 'll 'Ll 'd 'D 'm 'x '",
    "it’s don’t ‘quoted’ rock'n'roll O'Neill l'homme d'accord",
    "a's b'S c'ſ d'K e' f'' g'''s",
]
SPACES = [
    *(" " * n + "x" for n in range(1, 9)),
    *("x" + " " * n for n in range(1, 9)),
    "a b  c   d    e     f",
    "\n\n\n",
    "\n \n  \n",
    "a\n\nb\n\n\nc",
    " \n",
    "\n ",
    "  \n  x",
    "x \n y \n\n z",
    "\r\n",
    "a\r\nb\r\n\r\nc",
    "\r\r\n\n\r",
    "a\rb",
    "x!\r\n\r\ny",
    "x/\r\n/y",
    "\t\t\tx",
    "\tx\t\ty",
    " \t \t x",
    "a\t\nb",
    "a\x0bb\x0cc",
    "a\x85b",
    "a \x85 b",
    "a\u00a0b\u00a0\u00a0c",
    "\u2002\u2003x",
    "a\u3000b\u3000\u3000",
    "\u3000\u3000",
    "x\u2028y\u2029z",
    "\u1680 \u205f\u202f",
    " " * 100 + "x",
    "x" + "\n" * 100,
    "\t" * 60,
    " " * 513 + "y",
    "a\u200bb\u200cc\u200dd\u2060e\ufefff",
]
DIGITS = [
    *("1234567890"[:n] for n in range(1, 8)),
    "1 12 123 1234 12345 123456 1234567 12345678",
    "3.14159 1,234,567.89 0x1F 1e-10 -5 +7 2024-01-31 12:34:56",
    "a1b22c333d4444 a 1  22   333 x12345y",
    "\u0661\u0662\u0663\u0664\u0665\u0666\u0667 १२३४ ½²³ ⅠⅡ 一二三 ①",
    "1" * 30,
    "12" * 50 + "x",
    "  12  345  6789",
]
SCRIPTS = [
    "你好，世界！这是一个测试。abc中文abc 123中123",
    "こんにちは世界、カタカナーｶﾀｶﾅ",
    "안녕하세요 세계 \u1100\u1161\u11a8 ㄱㅏ ㄅㄆ",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645، "
    "\u0643\u064a\u0641 \u062d\u0627\u0644\u0643\u061f \u0645\u0650\u0635\u0652\u0631\u064f",
    "नमस\u094dत\u0947 द\u0941न\u093fय\u093e। क\u094dष\u0947त\u094dर",
    "สว\u0e31สด\u0e35ชาวโลก ហ\u17c1ល\u17c4 မ\u103cန\u103aမ\u102c",
    "Привет, мир! Ελληνικά \u05e9\u05dc\u05d5\u05dd",
    "𠀀𪛟㐀䶿 \uf900豈 龦鿿",
    "ＡＢｃ１２！？、。「」",
]
MARKS = [
    "e\u0301 cafe\u0301 A\u030a \u0301 \u0301a a\u0301\u0302\u0303b !\u0301 1\u0301",
    "é café Å ẞ İIıi ǅ",
    "Z\u0351\u036b\u0343a\u0323\u0348l\u0324\u035a\u0354g\u0322\u0321o\u0317",
    "\u0644\u064e\u0627 \u05e9\u05c1\u05b8 \u0bbeக\u0bcd \u200dक\u094d\u200dष a\u200cb\u200dc",
]
EMOJI = [
    "😀😁 👍🏽 👨\u200d👩\u200d👧\u200d👦 🇩🇪 ❤\ufe0f 1\ufe0f\u20e3",
    "a😀b 😀\n😀",
    "🏳\ufe0f\u200d🌈 ©®™ €£¥ →⇒ ─│",
]
SYMBOLS = [
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "~foo `bar` ^baz |qux| $x +y <z> =w a~b !a ~a $a _a -a \\n \\\\",
    "!!! ??? ... --- === *** ((())) [[[]]] {{{}}} <<<>>> ~~~",
    "a!b@c#d$e%f^g&h*i(j)k",
    "!a !A ?b .c /d /e\n //f\n/g",
    "$$$\n\n!!\r\n??",
    "\x01\x02\x1b[0m\x7f\x1c\x1d",
    "\ue000\uf8ff �\uffff \U000f0000 \u0378\U0001fbff",
    "<sentinel:12> IMGIMGABCDZ IMGIMGZ IMGIMGABCDEZ",
]
SPECIAL = [
    "<s>a</s>",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|><|endoftext|>",
    "a <|user|> b",
    "<|user|>",
    "x<tool>y<tool>",
    "<|im_start|> <|im_end|>",
    "<|im_start",
    "|im_end|>",
    "<<s>>",
    "<unk>",
    "[INST] x [/INST]",
    "<|a|><|a|b|>",
    "aXYZb XY YZ",
    "   <s>   x   </s>   ",
    "\n<|user|>\n\n<tool> <tool>",
]
LONG = [
    "a" * 10_000,
    " " * 3_000,
    "\n" * 2_000,
    "ab" * 3_000,
    "1" * 3_001,
    "中" * 3_000,
    "!" * 3_000,
    "😀" * 1_000,
    "a b" * 1_500,
    "'s" * 1_000,
    "e\u0301" * 1_500,
    "A" * 3_000,
    "aA" * 1_500,
]
CORPUS: list[str] = [
    *EMPTY_AND_TINY, *WORDS, *CASES, *CONTRACTIONS, *SPACES, *DIGITS, *SCRIPTS, *MARKS, *EMOJI, *SYMBOLS, *SPECIAL,
    *LONG,
]  # fmt: skip
_ALPHABET = [
    *"aAbsStTrReElLdDmMvV", "é", "É", "ǅ", "ʰ", "中", "国", "あ", "カ", "가", "ㄅ", "ก",
    "\uf900", "\u0645", "क", "\u093f", *"0123", "\u0661", "²", "Ⅰ", *" '  \n\r\t  '", "\u00a0",
    "\u3000", "\u0085", "\u2028",
    "\x0b", "\x1c", "\x01", "\u0301", "\u200c", "\u200d", *".,!?/\\-_([{", *"$+<=>^~|`", "！", "、", "‘", "…", "€",
    "😀", "\u0378", "\ue000", "ſ",
]  # fmt: skip


def random_texts(count: int, seed: int, *, longest: int = 24) -> list[str]:
    """Returns texts of random characters, with runs."""
    chance = random.Random(seed)
    texts = []
    for _ in range(count):
        few = chance.sample(_ALPHABET, 8) if chance.random() < 0.5 else _ALPHABET
        parts = [chance.choice(few) * chance.choice((1, 1, 1, 1, 2, 3, 5)) for _ in range(chance.randint(1, longest))]
        texts.append("".join(parts))
    return texts
