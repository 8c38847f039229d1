"""Transactions, as far as registrations and events need them (EV.2.4): two-phase commit with a durable decision.

=====================  =============================================================================================
``participant``        TransactionParticipant: what takes part; Vote, TransactionState; its part in one transaction
``transaction``        Transaction: one transaction, as programs use it
``two_phases``         its state in memory and on the disk, its participants, the two phases, the callbacks for its end
``manager``            TransactionManager: creates transactions, completes those of an earlier run
``remote_participant`` participants in other processes, and the servers of those of this one
``remote``             managers in other processes
=====================  =============================================================================================
"""

from messaging.errors import CannotAbortError, CannotCommitError, CannotJoinError, UnknownTransactionError
from messaging.remoteevent.transactions.manager import TransactionInfo, TransactionManager
from messaging.remoteevent.transactions.participant import TransactionParticipant, TransactionState, Vote
from messaging.remoteevent.transactions.remote import RemoteTransaction, RemoteTransactionManager, TransactionServer
from messaging.remoteevent.transactions.remote_participant import ParticipantServer, RemoteParticipant
from messaging.remoteevent.transactions.transaction import Transaction

__all__ = [
    "CannotAbortError",
    "CannotCommitError",
    "CannotJoinError",
    "ParticipantServer",
    "RemoteParticipant",
    "RemoteTransaction",
    "RemoteTransactionManager",
    "Transaction",
    "TransactionInfo",
    "TransactionManager",
    "TransactionParticipant",
    "TransactionServer",
    "TransactionState",
    "UnknownTransactionError",
    "Vote",
]
