"""Texts for the tests: some to train small tokenizers on, some that are hard on purpose."""

from __future__ import annotations

PEOPLE = ("Sarah Jessica Parker", "Ada Lovelace", "Zoë Müller", "Nguyễn Văn An", "Jean-Baptiste", "李明", "O'Neill")
PLACES = ("New York", "Berkeley", "Montréal", "São Paulo", "東京", "the Netherlands", "Łódź")
ACTS = ("lives in", "works at a bank in", "wrote a letter from", "doesn't like", "has never been to", "moved to")
MORE = (
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Tokenization splits unbelievably long words into subword pieces!",
    "What is the capital of France? Paris is the capital of France.",
    "I like you. I love you. You aren't sure; we're happy, they've left, I'm here.",
    "Deep learning is a kind of machine learning with many layers.",
    "Prices rise by 3.5 % in 2024 (see https://example.org/a?b=c&d=1).",
    "Αυτό είναι ένα παράδειγμα. Это пример. هذا مثال بسيط. זו דוגמה קצרה.",
    "日本語の文章です。中文也可以。한국어 문장입니다.",
    "This example is sports. This example is economy. This example is urgent.",
    "😀 emoji 🎉 and 👩‍👩‍👧 families, café naïve coöperate.",
)

TRAINING = [*MORE * 4, *(f"{person} {act} {place}." for person in PEOPLE for act in ACTS for place in PLACES)]
"""What the tokenizers of the tests are trained on."""

HARD: dict[str, str] = {
    "plain": "My name is Sarah Jessica Parker but you can call me Jessica",
    "one letter": "a",
    "one space": " ",
    "white space": "\t\n  \r\n ",
    "spaces around": "   New York   is   big   ",
    "tabs and newlines": "Ada\tLovelace\nlives in\r\nLondon\n\n\nand writes.",
    "punctuation": "!!! ... ?! (\"quoted\") -- don't, won't; re-enter.",
    "emoji": "I 😀 love 🎉🎉 New York 👩‍👩‍👧 and 🇫🇷!",
    "combining": "Cafe\u0301 Zoe\u0308 and I\u0307stanbul a\u0301\u0323b",
    "cjk": "東京は日本の首都です。李明 lives in 東京.",
    "right to left": "هذا مثال بسيط from Berkeley זו דוגמה",
    "unknown letters": "ꙮ runes ᚠᚢᚦ and 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀 in New York",
    "many pieces": "Pneumonoultramicroscopicsilicovolcanoconiosis is unbelievablyextraordinarily long",
    "repeated": "New York New York New York, Ada Ada Ada; New York.",
    "one long word": "x" * 150 + " ends",
    "control": "null\x00 bell\x07 zero\u200bwidth non\u00a0breaking\ufeff soft\u00adhyphen",
    "typed specials": "a [SEP] b [CLS] c </s> d <s> e [UNK] f <unk> [PAD] <pad> g",
    "case": "STRASSE straße ΣΊΣΥΦΟΣ ὈΔΥΣΣΕΎΣ ǅ",
}

LONG = " ".join(f"{person} {act} {place}." for person in PEOPLE for act in ACTS for place in PLACES[:1])
"""Many windows of the small models here: entities stand on their borders."""
