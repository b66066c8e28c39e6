"""Plumbing: finding plug-ins, HTTP, retries, child processes, sockets, files, threads and the event loop."""
