"""Source, tests and documents use plain technical English: the words listed here do not occur in them."""

import re

import pytest

from tests.contracts.sentences import count, prose
from tests.contracts.tracked import PRODUCT, ROOT, sources, tracked

FILES = (
    "*.py", "*.md", "*.yaml", "*.yml", "*.toml", "*.sh", "*.c", "*.h", "*.inc", "*.html", "*.j2", "*.lua", "*.go",
    "*.tpl", "*.cfg", "Makefile", "**/Makefile", "Dockerfile", "**/Dockerfile", ".ci/run",
)  # fmt: skip

WORDS = (
    # Pronouns and idioms that hide who does what.
    "nobody", "somebody", "anybody", "whoever", "whomever", "so many", "so long as", "whose turn", "thrice",
    # Verbs of people, used of programs, files and code.
    "told", "says", "said", "stands", "heard", "deaf", "beside",
    # Names that were invented here; docs/glossary.md has the usual ones.
    "familiar", "glance", "hopeless", "rectangle", "rectangles", "entrant", "entrants", "bequeathed", "unrest",
    "teacher", "teachers",
)  # fmt: skip
"""In any case, as words or as parts of identifiers between underscores (`unwritable_said`)."""
NAMES = ("Company", "Climbed", "Entrant", "World", "Lane")
"""Identifiers, also as the first part of a longer one (`LaneState`)."""

ALLOWED = (
    ("tests/contracts/test_words.py", r".*"),
    ("tests/contracts/sentences.py", r".*"),
    ("docs/glossary.md", r".*"),
    ("LICENSE", r".*"),
    ("penstock/manifest.py", r"0[._]1"),  # the value that version 0.1 wrote
    ("tests/contracts/test_names.py", r'"Lane"'),
    ("tests/penstock/test_manifest.py", r'"teacher"'),
    ("optimizer/penstock_optimizer/guard/texts", r".*"),
    ("optimizer/penstock_optimizer/candidate/work_folder.py", r"teacher\.zip"),
    ("tests/optimizer/candidate/", r"teacher\.zip"),
    ("runtime/penstock_runtime/http/pages/playground.html", r"I waited for an hour"),
    ("tests/optimizer/export/test_minilm.py", r"A quick brown fox|the bank said"),
    ("dev/testbed/images.py", r"nobody:x:65534"),  # /etc/passwd
    ("CHANGELOG.md", r"`teacher`"),
    ("tests/golden/answers", r".*"),
)
"""Path prefix and a pattern of lines: texts of other authors, inputs of models, the lists of words themselves."""


def _across_lines(words: str) -> str:
    return words.replace(" ", r"\s+")


def pattern() -> re.Pattern[str]:
    words = "|".join(map(_across_lines, WORDS))
    return re.compile(rf"(?<![A-Za-z])(?:(?i:{words})(?![A-Za-z])|(?:{'|'.join(NAMES)})(?![a-z]))")


def test_the_pattern_finds_words_and_parts_of_identifiers() -> None:
    found = pattern()

    hits = ("is told so", "def _told(", "unwritable_said", "SAYS", "so\nmany", "Lane", "LaneId")
    misses = ("besides", "essays", "SIMD lanes", "a company", "Lanes", "worldwide")

    assert all(found.search(text) for text in hits)
    assert not any(found.search(text) for text in misses)


def test_the_listed_words_do_not_occur() -> None:
    forbidden = pattern()

    found = []
    for path in tracked(*FILES):
        name = str(path.relative_to(ROOT))
        allowed = [re.compile(lines) for prefix, lines in ALLOWED if name.startswith(prefix)]
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()
        for match in forbidden.finditer(text):
            number = text.count("\n", 0, match.start())
            if not any(one.search(lines[number]) for one in allowed):
                found.append(f"{name}:{number + 1}: {match[0]!r}: {lines[number].strip()[:100]}")

    assert found == []


MOST = 25
"""Of the patterns in 10,000 words. Libraries such as kopf and starlette have 5 to 8."""


@pytest.mark.parametrize("folders", [PRODUCT, ("dev",)], ids=["product", "dev"])
def test_docstrings_and_comments_have_few_patterns_that_must_be_decoded(folders: tuple[str, ...]) -> None:
    found = count(path.read_text(encoding="utf-8") for path in sources(*folders))

    assert found.words > 1000
    assert found.share <= MOST


def test_patterns_are_counted_in_docstrings_and_comments_alone() -> None:
    source = """'''The rate is that of a server, whose clients ask.'''\nx = 'others'  # its place\ny = 'what is'\n"""

    assert prose(source).split("\n") == ["The rate is that of a server, whose clients ask.", " its place"]
    assert count([source, source]) == (24, 8)
