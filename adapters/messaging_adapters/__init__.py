"""The adapters, one package for each kind of broker. Programs name URLs; entry points find the adapter of a URL."""
