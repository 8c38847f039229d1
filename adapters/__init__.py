"""The adapters, one package for each kind of broker. Programs name URLs; entry points find the adapter of a URL."""

#: tells this package from an unrelated one of the same name
__rx_messaging__ = True
