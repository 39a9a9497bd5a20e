"""Search files of `penstock embed` with a served endpoint: python examples/search_corpus.py OUT QUESTION [URL]."""

import json
import sys
import urllib.request
from pathlib import Path

import numpy as np
from pyarrow import dataset

output, question, url = (*sys.argv[1:], "http://localhost:8080")[:3]
space = json.loads((Path(output) / "_manifest.json").read_text())["identity"]["space"]
asked = urllib.request.Request(
    f"{url}/embed",
    data=json.dumps({"inputs": [question]}).encode(),
    # A server with another vector space refuses the request.
    headers={"content-type": "application/json", "x-expect-vector-space": space},
)
with urllib.request.urlopen(asked) as answer:
    query = np.array(json.loads(answer.read())[0], dtype=np.float32)
rows = dataset.dataset(output).to_table()
vectors = rows["vector"].combine_chunks().flatten().to_numpy().reshape(len(rows), -1)
scores = vectors @ query
print(f"space {space}, {len(rows):,} rows")
for row in np.argsort(-scores)[:5]:
    print(f"{scores[row]:.3f}  {rows['file'][row]}: {rows['text'][row].as_py()[:90]!r}")
