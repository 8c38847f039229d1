"""Leases: resources that are granted for a time, and renewed as long as they are needed (EV.2.1).

==================  =================================================================================================
``lease``           Lease: the handle of the holder; batches; the clock of leases, and the end of a lease over a restart
``landlord``        Landlord: grants leases, and ends them
``renewal``         LeaseRenewalManager: keeps leases alive; ``renewed``: when each of them is due
``remote``          leases of and for other processes, and finding them at a broker
==================  =================================================================================================
"""

from messaging.leases.landlord import GrantedLease, Landlord, LeaseEnd, LeaseInfo
from messaging.leases.lease import ANY, FOREVER, Grantor, Lease, LeaseMap, cancel_all, release, renew_all
from messaging.leases.lease import StoredTime as StoredTime
from messaging.leases.lease import lease_time as lease_time
from messaging.leases.remote import LEASE as LEASE
from messaging.leases.remote import LEASES as LEASES
from messaging.leases.remote import SECONDS as SECONDS
from messaging.leases.remote import LeaseDirectory as LeaseDirectory
from messaging.leases.remote import LeaseServer, RemoteGrantor, find_leases
from messaging.leases.remote import LeasingServer as LeasingServer
from messaging.leases.remote import lease_from_value as lease_from_value
from messaging.leases.remote import lease_operations as lease_operations
from messaging.leases.remote import lease_to_value as lease_to_value
from messaging.leases.remote import reference_of as reference_of
from messaging.leases.remote import remote_leases as remote_leases
from messaging.leases.remote import seconds_of as seconds_of
from messaging.leases.remote import value_of as value_of
from messaging.leases.renewal import LeaseRenewalManager
from messaging.leases.renewed import DesiredExpirationListener, LeaseListener, LeaseRenewalEvent

__all__ = [
    "ANY",
    "FOREVER",
    "DesiredExpirationListener",
    "GrantedLease",
    "Grantor",
    "Landlord",
    "Lease",
    "LeaseEnd",
    "LeaseInfo",
    "LeaseListener",
    "LeaseMap",
    "LeaseRenewalEvent",
    "LeaseRenewalManager",
    "LeaseServer",
    "RemoteGrantor",
    "cancel_all",
    "find_leases",
    "release",
    "renew_all",
]
