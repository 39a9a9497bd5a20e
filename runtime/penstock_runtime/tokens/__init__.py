"""Text to token ids: a thin layer over the `tokenizers` library that many threads may use at once.

The library's own truncation and padding are settings of the shared tokenizer object, changed by every call of the
transformers wrapper: two requests with different limits would race. Here the library only splits text into pieces,
with no special tokens and no limit; cutting, windows and special tokens are added by pure functions over lists.
Knows nothing of tasks, engines or HTTP.
"""

from penstock_runtime.tokens.pieces import Pieces, Side, Template, longest_first, windows
from penstock_runtime.tokens.tokenizer import Tokenizer

__all__ = ["Pieces", "Side", "Template", "Tokenizer", "longest_first", "windows"]
