"""Searches in real databases with vectors of an endpoint, run by `calls.py`.

A search returns the numbers of the documents, the best first, and their scores. Qdrant, Chroma, LanceDB and SQLite run
in this process, and OpenSearch at the address in PENSTOCK_OPENSEARCH.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable
from typing import Any

DOCUMENTS = [
    "cheese is very good",
    "deep learning is a kind of machine learning",
    "what a very sunny day",
    "clara and a happy dog live in berkeley",
]
QUERY = "what is deep learning ?"
WIDTH = 16
VECTORS, SPARSE, TOKEN_VECTORS, ALL_OUTPUTS = "feature-extraction", "sparse", "token-vectors", "all-outputs"
Found = dict[str, list[Any]]


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """The answer of the endpoint."""
    import httpx

    answer = httpx.post(url + path, json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()


def qdrant() -> list[Any]:
    from qdrant_client import QdrantClient, models

    max_sim = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)

    def searched(points: list[dict[str, Any]], configs: dict[str, Any], **query: Any) -> Found:
        client = QdrantClient(":memory:")
        client.create_collection("documents", **configs)
        client.upsert("documents", [models.PointStruct(id=at, vector=one) for at, one in enumerate(points)])
        found = client.query_points("documents", limit=len(DOCUMENTS), **query).points
        return {"ids": [one.id for one in found], "scores": [one.score for one in found]}

    def of_vectors(embed: Callable[[list[str]], Any]) -> Found:
        configs = {"dense": models.VectorParams(size=WIDTH, distance=models.Distance.COSINE)}
        points = [{"dense": one} for one in embed(DOCUMENTS)]
        return searched(points, {"vectors_config": configs}, query=embed([QUERY])[0], using="dense")

    def dense(url: str) -> Found:
        return of_vectors(lambda texts: post(url, "/embed", {"inputs": texts}))

    def dense_of_openai(url: str) -> Found:
        def embed(texts: list[str]) -> Any:
            found = post(url, "/v1/embeddings", {"model": "emotion", "input": texts})
            return [one["embedding"] for one in found["data"]]

        return of_vectors(embed)

    def sparse(url: str) -> Found:
        def embed(texts: list[str]) -> Any:
            found = post(url, "/embed_sparse", {"inputs": texts, "sparse_format": "arrays"})
            return [models.SparseVector(**one) for one in found]

        points = [{"sparse": one} for one in embed(DOCUMENTS)]
        configs = {"vectors_config": {}, "sparse_vectors_config": {"sparse": models.SparseVectorParams()}}
        return searched(points, configs, query=embed([QUERY])[0], using="sparse")

    def token_vectors(url: str) -> Found:
        documents = post(url, "/embed_all", {"inputs": DOCUMENTS, "prompt_name": "document"})
        (query,) = post(url, "/embed_all", {"inputs": [QUERY], "prompt_name": "query"})
        width = len(query[0])
        config = models.VectorParams(size=width, distance=models.Distance.COSINE, multivector_config=max_sim)
        points = [{"tokens": one} for one in documents]
        return searched(points, {"vectors_config": {"tokens": config}}, query=query, using="tokens")

    def hybrid(url: str, **more: Any) -> Found:
        def embed(texts: list[str]) -> list[dict[str, Any]]:
            parameters = {"outputs": ["dense", "sparse", "multi_vector"], "sparse_format": "arrays"}
            found = post(url, "/predict", {"inputs": texts, "parameters": parameters})
            rows = zip(found["dense"], found["sparse"], found["multi_vector"], strict=True)
            return [
                {"dense": first, "sparse": models.SparseVector(**second), "tokens": third}
                for first, second, third in rows
            ]

        points, (query,) = embed(DOCUMENTS), embed([QUERY])
        cosine = models.Distance.COSINE
        vectors = {
            "dense": models.VectorParams(size=WIDTH, distance=cosine),
            "tokens": models.VectorParams(size=len(query["tokens"][0]), distance=cosine, multivector_config=max_sim),
        }
        configs = {"vectors_config": vectors, "sparse_vectors_config": {"sparse": models.SparseVectorParams()}}
        prefetch = [models.Prefetch(query=query[name], using=name, limit=3) for name in ("dense", "sparse")]
        last = more or {"query": query["tokens"], "using": "tokens"}
        return searched(points, configs, prefetch=prefetch, **last)

    fusion = models.FusionQuery(fusion=models.Fusion.RRF)
    return [
        ("qdrant-client", "dense, /embed", VECTORS, dense),
        ("qdrant-client", "dense, /v1/embeddings", VECTORS, dense_of_openai),
        ("qdrant-client", "sparse", SPARSE, sparse),
        ("qdrant-client", "multivector, max_sim", TOKEN_VECTORS, token_vectors),
        ("qdrant-client", "dense and sparse, RRF", ALL_OUTPUTS, lambda url: hybrid(url, query=fusion)),
        ("qdrant-client", "dense and sparse, then max_sim", ALL_OUTPUTS, hybrid),
    ]


def chroma() -> list[Any]:
    import chromadb
    from chromadb.utils.embedding_functions import HuggingFaceEmbeddingServer, OpenAIEmbeddingFunction

    def searched(function: Any) -> Found:
        client = chromadb.EphemeralClient(chromadb.Settings(anonymized_telemetry=False))
        collection = client.create_collection(
            "documents", embedding_function=function, configuration={"hnsw": {"space": "cosine"}}
        )
        try:
            collection.add(ids=[str(at) for at in range(len(DOCUMENTS))], documents=DOCUMENTS)
            found: Any = collection.query(query_texts=[QUERY], n_results=len(DOCUMENTS))
        finally:
            client.delete_collection("documents")
        return {"ids": [int(one) for one in found["ids"][0]], "scores": [1 - one for one in found["distances"][0]]}

    return [
        (
            "chromadb", "OpenAIEmbeddingFunction", VECTORS,
            lambda url: searched(
                OpenAIEmbeddingFunction(api_key="any", api_base=f"{url}/v1", model_name="emotion")
            ),
        ),
        (
            "chromadb", "HuggingFaceEmbeddingServer", VECTORS,
            lambda url: searched(HuggingFaceEmbeddingServer(url=f"{url}/embed")),
        ),
    ]  # fmt: skip


def lancedb() -> list[Any]:
    import lancedb as package
    import pyarrow as pa
    from lancedb.embeddings import EmbeddingFunctionConfig, get_registry

    def searched(url: str) -> Found:
        # It refuses names that OpenAI has no model of, and takes the key from the environment or a variable.
        registry = get_registry()
        registry.set_var("key", "any")
        function = registry.get("openai").create(
            name="text-embedding-3-small", base_url=f"{url}/v1", api_key="$var:key", dim=WIDTH
        )
        embedded = EmbeddingFunctionConfig(vector_column="vector", source_column="text", function=function)
        fields = {"number": pa.int64(), "text": pa.string(), "vector": pa.list_(pa.float32(), WIDTH)}
        with tempfile.TemporaryDirectory() as folder:
            table = package.connect(folder).create_table(
                "documents", schema=pa.schema(list(fields.items())), embedding_functions=[embedded]
            )
            table.add([{"number": at, "text": text} for at, text in enumerate(DOCUMENTS)])
            found = table.search(QUERY).distance_type("cosine").limit(len(DOCUMENTS)).to_list()
        return {"ids": [one["number"] for one in found], "scores": [1 - one["_distance"] for one in found]}

    return [("lancedb", "embedding function openai", VECTORS, searched)]


def sqlite_vec() -> list[Any]:
    # Not all builds of Python can load extensions into their own SQLite.
    import apsw
    import sqlite_vec as package

    def searched(url: str) -> Found:
        vectors = [struct.pack(f"{WIDTH}f", *one) for one in post(url, "/embed", {"inputs": [*DOCUMENTS, QUERY]})]
        database = apsw.Connection(":memory:")
        database.enable_load_extension(True)
        database.load_extension(package.loadable_path())
        database.execute(f"create virtual table documents using vec0(vector float[{WIDTH}] distance_metric=cosine)")
        database.executemany("insert into documents(rowid, vector) values (?, ?)", list(enumerate(vectors[:-1])))
        query = "select rowid, distance from documents where vector match ? and k = ? order by distance"
        found = list(database.execute(query, (vectors[-1], len(DOCUMENTS))))
        return {"ids": [at for at, _ in found], "scores": [1 - distance for _, distance in found]}

    return [("sqlite-vec", "vec0, cosine", VECTORS, searched)]


def opensearch() -> list[Any]:
    from opensearchpy import OpenSearch

    def searched(url: str) -> Found:
        *documents, query = post(url, "/embed_sparse", {"inputs": [*DOCUMENTS, QUERY], "sparse_format": "tokens"})
        client = OpenSearch(os.environ["PENSTOCK_OPENSEARCH"], timeout=60)
        client.indices.create(
            index="documents", body={"mappings": {"properties": {"tokens": {"type": "rank_features"}}}}
        )
        for at, tokens in enumerate(documents):
            client.index(index="documents", id=str(at), body={"tokens": tokens}, refresh=True)
        weighted = [
            {"rank_feature": {"field": f"tokens.{token}", "linear": {}, "boost": weight}}
            for token, weight in query.items()
        ]
        found = client.search(index="documents", body={"query": {"bool": {"should": weighted}}})["hits"]["hits"]
        return {"ids": [int(one["_id"]) for one in found], "scores": [one["_score"] for one in found]}

    return [("opensearch-py", "rank_features", SPARSE, searched)]


CLIENTS = (qdrant, chroma, lancedb, sqlite_vec)
OPENSEARCH = (opensearch,)
