"""The data of events: schemas, maps, conversion, and the layout on the wire."""
