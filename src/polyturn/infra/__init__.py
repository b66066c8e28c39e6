"""Access to the world outside the process, one of each: the HTTP client, the retries, the supervisor of child processes."""
