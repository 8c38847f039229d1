"""The core, module by module: on ``memory://``, and on a broker that does what a test tells it to."""
