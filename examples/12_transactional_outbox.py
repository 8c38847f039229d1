"""Publish a message if, and only if, a database transaction commits; handle each message once.

Needs the extra ``sql``.

python examples/12_transactional_outbox.py [URL]
"""

import queue
import sys
import tempfile
from pathlib import Path

import sqlalchemy
from sqlalchemy import Connection, text

import messaging
from messaging import Message
from messaging.outbox.sql import Relay, create_tables, enqueue, process_once


class OutOfStockError(Exception):
    pass


def order(connection: Connection, number: int, *, in_stock: bool = True) -> None:
    """Write an order and its message, in the transaction of the connection."""
    connection.execute(text("INSERT INTO orders VALUES (:number)"), {"number": number})
    builder = messaging.MessageContextBuilder().channel("examples/orders")
    # The same key: the messages of a customer stay in order. The id lets a consumer recognise a duplicate.
    enqueue(connection, builder.content(number).extension_entry("messageId", f"order-{number}"), key="customer-1")
    if not in_stock:
        raise OutOfStockError


def main(url: str, folder: Path) -> None:
    shop = sqlalchemy.create_engine(f"sqlite:///{folder}/shop.db")
    with shop.begin() as connection:
        create_tables(connection)
        connection.execute(text("CREATE TABLE orders (number INTEGER)"))
        connection.execute(text("CREATE TABLE invoices (number INTEGER)"))
    handled: queue.SimpleQueue[str] = queue.SimpleQueue()

    def invoice(message: Message) -> None:
        number = message.value(int)
        with shop.begin() as connection:  # the invoice and the memory of the message, or neither
            is_new = process_once(connection, message)
            if is_new:
                connection.execute(text("INSERT INTO invoices VALUES (:number)"), {"number": number})
        handled.put(f"order {number}: {'invoice written' if is_new else 'handled before'}")

    with messaging.connect(url) as m, Relay(shop, m) as relay:
        m.on("examples/orders", invoice, qos=1)
        for number in (1, 2, 3):
            try:
                with shop.begin() as connection:
                    order(connection, number, in_stock=number != 2)
            except OutOfStockError:
                print(f"order {number}: rolled back, so no message")
        relay.wake()  # SQLite does not wake it; PostgreSQL does
        print(handled.get(timeout=20))
        print(handled.get(timeout=20))
        # What a relay does that died after it had published: the same message again, with the same id.
        m.publish("examples/orders", 3, qos=1, message_id="order-3").result(timeout=20)
        print(handled.get(timeout=20))
    with shop.begin() as connection:
        print("invoices:", connection.execute(text("SELECT number FROM invoices ORDER BY number")).scalars().all())
    shop.dispose()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(sys.argv[1] if len(sys.argv) > 1 else "memory://examples", Path(name))
