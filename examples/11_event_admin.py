"""Post and send events (OSGi RFC 97), receive logs and services as events, and bridge to typed events.

python examples/11_event_admin.py
"""

import logging

from messaging.eventadmin import Event, EventAdmin, EventBridge, EventConstants, EventHandler, LogEvents, ServiceEvents
from messaging.services import ServiceRegistry
from messaging.typedevent import TypedEventBus


class Alarm(EventHandler):
    def handle_event(self, event: Event) -> None:
        print(f"alarm: {event.topic} in the {event.get_property('room')}")


def log_entry(event: Event) -> None:
    print(f"log: {event.get_property(EventConstants.MESSAGE)} ({event.get_property(EventConstants.EXCEPTION_CLASS)})")


def service_event(event: Event) -> None:
    print(f"services: {event.topic.rpartition('/')[2]}")


def main() -> None:
    services = ServiceRegistry()
    logger = logging.getLogger("examples.boiler")
    logger.propagate = False
    with EventAdmin(services) as admin, TypedEventBus(services) as bus:
        topics = EventConstants.EVENT_TOPIC
        services.register(EventHandler, Alarm(), {topics: "home/alarm/*", EventConstants.EVENT_FILTER: "(level>=3)"})
        services.register(EventHandler, log_entry, {topics: "org/osgi/service/log/LogEntry"})
        services.register(EventHandler, service_event, {topics: "org/osgi/framework/ServiceEvent/*"})

        # send_event() returns after all handlers; post_event() returns at once.
        admin.send_event(Event("home/alarm/SMOKE", {"room": "kitchen", "level": 5}))
        admin.post_event(Event("home/alarm/WINDOW", {"room": "attic", "level": 1}))  # below the level of the filter
        admin.flush().result(timeout=20)

        with LogEvents(admin, logger), ServiceEvents(admin):
            try:
                raise ValueError("the pressure is negative")
            except ValueError:
                logger.exception("cannot heat")
            admin.flush().result(timeout=20)  # log entries are posted
            services.register("examples.Thermostat", object()).unregister()  # service events are sent

        # The bridge forwards in both directions, and never returns an event to its origin.
        with EventBridge(admin, bus, "home/*"):
            bus.on("home/*", handler=lambda topic, event: print(f"on the bus: {topic} {event}"))
            admin.post_event(Event("home/door/OPEN", {"room": "hall"}))
            admin.flush().result(timeout=20)
            bus.flush().result(timeout=20)
            bus.deliver_untyped("home/alarm/WATER", {"room": "cellar", "level": 4})
            bus.flush().result(timeout=20)
            admin.flush().result(timeout=20)


if __name__ == "__main__":
    main()
