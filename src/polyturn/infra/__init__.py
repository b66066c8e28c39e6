"""Access to everything outside the process: HTTP, retries, child processes, sockets, files, threads and the event loop."""
