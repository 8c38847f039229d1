"""The core of the event services: topics, permissions, lanes and handlers."""
