"""Everything that knows a broker. Programs name URLs, not these modules: adapters are found by entry point."""

#: tells this package from an unrelated one of the same name
__rx_messaging__ = True
