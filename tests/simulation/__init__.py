"""The toolkit in one thread, under a seeded scheduler, with virtual time, network, disk and brokers."""
