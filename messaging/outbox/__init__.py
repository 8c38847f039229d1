"""Transactional outboxes: messages that are published if, and only if, a transaction of a database commits.

One package for each kind of database: :mod:`messaging.outbox.sql`.
"""
