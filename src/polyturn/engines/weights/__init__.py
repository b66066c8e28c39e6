"""New weights on their way to servers: transports, folders, broadcasts, checksums."""
