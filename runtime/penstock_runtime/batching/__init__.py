"""Batching: the queue of rows, the batch policy, and the dispatcher that runs batches on the engine's streams.

dispatcher   connects requests of an event loop with the batcher
batcher      makes batches of waiting rows, gives them to streams, collects results
queue        order of waiting rows, which rows share a batch, limits, measured throughput
collate      rows to a padded batch, outputs of a batch to rows
"""
