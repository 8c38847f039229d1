"""The core that all event services share: topics, handlers found in the registry, delivery in order, permissions.

==================  ================================================================================================
``topics``          the grammar of topics and topic filters, and the trie that finds what a topic matches
``permission``      who may publish to a topic, and who may receive from it
``lanes``           delivery, asynchronous and in order: one lane for each handler
``pool``            the threads that deliver, few for all lanes
``handler``         one handler: what it asks for, its lane, how often it failed, whether it is blocked
``dispatcher``      all handlers of one bus: they come, change and go with their registrations
``service``         opening and closing
==================  ================================================================================================

Its two faces are ``messaging.typedevent`` and ``messaging.eventadmin``.
"""
