"""Search over passages on this machine: an index in a folder, read by the search tool and by the search server.

    passages.jsonl  --build_index-->  INDEX/  --SearchIndex.open-->  hits of a query

`passages` reads and stores texts, `bm25` and `dense` score them, `index` puts both together, `searcher` asks from an event
loop, `embedders` turns texts into vectors.
"""
