"""The artefact store: folders by digest, in a volume or an object store. The optimiser publishes, the runtime fetches.

    store = open_store(StoreUri.parse("s3://models/penstock"))
    published = store.publish(folder)                      # digest, uri, bytes; atomic, the same again is a no-op
    folder = store.fetch(published.digest, cache)          # verified byte by byte, or an error
    store.collect(keep={...}, older_than_seconds=86400)    # artefacts that are not referenced any more

`penstock.artefact_store` has the layout; docs/reference/artefact-store.md describes what
each kind of store needs.
"""

from penstock_runtime.store.base import Stored
from penstock_runtime.store.store import ArtefactStore, Published, open_store

__all__ = ["ArtefactStore", "Published", "Stored", "open_store"]
