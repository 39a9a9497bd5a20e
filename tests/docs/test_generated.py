"""The generated parts of the documents match the code."""

from tools import make_docs


def test_generated_parts_of_the_documents_are_fresh() -> None:
    assert make_docs.PARTS
    assert make_docs.stale() == [], "run `make docs`"
