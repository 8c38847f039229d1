"""How anything runs: engine, promises, deadlines."""
