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
    "\u00e9",
    "\u4e2d",
    "\U0001f600",
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
CONTRACTIONS = [
    "I'm you're he'll she'd we've they'll it's don't",
    "I'M YOU'RE HE'LL SHE'D WE'VE THEY'LL IT'S DON'T",
    "I'm'd've 'tis 's 'S 't 're 'RE 'rE 've 'll 'Ll 'd 'D 'm 'x '",
    "it\u2019s don\u2019t \u2018quoted\u2019 rock'n'roll O'Neill l'homme d'accord",
    "a's b'S c'\u017f d'\u212a e' f'' g'''s",
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
    "\u0661\u0662\u0663\u0664\u0665\u0666\u0667 \u0967\u0968\u0969\u096a \u00bd\u00b2\u00b3 \u2160\u2161 \u4e00\u4e8c\u4e09 \u2460",
    "1" * 30,
    "12" * 50 + "x",
    "  12  345  6789",
]
SCRIPTS = [
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u8fd9\u662f\u4e00\u4e2a\u6d4b\u8bd5\u3002abc\u4e2d\u6587abc 123\u4e2d123",
    "\u3053\u3093\u306b\u3061\u306f\u4e16\u754c\u3001\u30ab\u30bf\u30ab\u30ca\u30fc\uff76\uff80\uff76\uff85",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4 \u1100\u1161\u11a8 \u3131\u314f \u3105\u3106",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645\u060c \u0643\u064a\u0641 \u062d\u0627\u0644\u0643\u061f \u0645\u0650\u0635\u0652\u0631\u064f",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e\u0964 \u0915\u094d\u0937\u0947\u0924\u094d\u0930",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01 \u17a0\u17c1\u179b\u17c4 \u1019\u103c\u1014\u103a\u1019\u102c",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac \u05e9\u05dc\u05d5\u05dd",
    "\U00020000\U0002a6df\u3400\u4dbf \uf900\u8c48 \u9fa6\u9fff",
    "\uff21\uff22\uff43\uff11\uff12\uff01\uff1f\u3001\u3002\u300c\u300d",
]
MARKS = [
    "e\u0301 cafe\u0301 A\u030a \u0301 \u0301a a\u0301\u0302\u0303b !\u0301 1\u0301",
    "\u00e9 caf\u00e9 \u00c5 \u1e9e \u0130I\u0131i \u01c5",
    "Z\u0351\u036b\u0343a\u0323\u0348l\u0324\u035a\u0354g\u0322\u0321o\u0317",
    "\u0644\u064e\u0627 \u05e9\u05c1\u05b8 \u0bbe\u0b95\u0bcd \u200d\u0915\u094d\u200d\u0937 a\u200cb\u200dc",
]
EMOJI = [
    "\U0001f600\U0001f601 \U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9\U0001f1ea \u2764\ufe0f 1\ufe0f\u20e3",
    "a\U0001f600b \U0001f600\n\U0001f600",
    "\U0001f3f3\ufe0f\u200d\U0001f308 \u00a9\u00ae\u2122 \u20ac\u00a3\u00a5 \u2192\u21d2 \u2500\u2502",
]
SYMBOLS = [
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "~foo `bar` ^baz |qux| $x +y <z> =w a~b !a ~a $a _a -a \\n \\\\",
    "!!! ??? ... --- === *** ((())) [[[]]] {{{}}} <<<>>> ~~~",
    "a!b@c#d$e%f^g&h*i(j)k",
    "!a !A ?b .c /d /e\n //f\n/g",
    "$$$\n\n!!\r\n??",
    "\x01\x02\x1b[0m\x7f\x1c\x1d",
    "\ue000\uf8ff \ufffd\uffff \U000f0000 \u0378\U0001fbff",
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
    "\u4e2d" * 3_000,
    "!" * 3_000,
    "\U0001f600" * 1_000,
    "a b" * 1_500,
    "'s" * 1_000,
    "e\u0301" * 1_500,
    "A" * 3_000,
    "aA" * 1_500,
]
CORPUS: list[str] = [
    *EMPTY_AND_TINY, *WORDS, *CONTRACTIONS, *SPACES, *DIGITS, *SCRIPTS, *MARKS, *EMOJI, *SYMBOLS, *SPECIAL, *LONG,
]  # fmt: skip
_ALPHABET = [
    *"aAbsStTrReElLdDmMvV", "\u00e9", "\u00c9", "\u01c5", "\u02b0", "\u4e2d", "\u56fd", "\u3042", "\u30ab", "\uac00", "\u3105", "\u0e01",
    "\uf900", "\u0645", "\u0915", "\u093f", *"0123", "\u0661", "\u00b2", "\u2160", *" '  \n\r\t  '", "\u00a0", "\u3000", "\u0085", "\u2028",
    "\x0b", "\x1c", "\x01", "\u0301", "\u200c", "\u200d", *".,!?/\\-_([{", *"$+<=>^~|`", "\uff01", "\u3001", "\u2018", "\u2026", "\u20ac",
    "\U0001f600", "\u0378", "\ue000", "\u017f",
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
