"""Search over passages on this machine: an index in a folder, for the search tool and the search server.

    passages.jsonl  --build_index-->  INDEX/  --SearchIndex.open-->  hits of a query

`passages` reads and stores texts, `bm25` and `dense` score them, `index` combines both, `searcher` searches from an event
loop, and `embedders` turns texts into vectors.
"""
