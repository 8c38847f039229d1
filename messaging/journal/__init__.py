"""The journal: one durable, replayable, bounded log for everything that keeps messages on disk."""
