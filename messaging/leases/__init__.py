"""Leases: resources that are granted for a time, and renewed as long as they are needed (EV.2.1).

==================  =================================================================================================
``lease``           Lease: the handle of the holder
``landlord``        Landlord: grants leases, and ends them; ``granted``: the leases as it keeps them
``batch``           several leases renewed or cancelled together
``renewal``         LeaseRenewalManager: keeps leases alive; ``renewed``, ``schedule``: when each of them is due
``renewal_events``  what its listeners are told
``remote``          leases of landlords in other processes; ``serving`` makes those of this process available
``directory``       finding the leases at a broker
``stored_time``     the end of a lease over a restart
``clock``           the clock of leases
==================  =================================================================================================

May import: ``dispatch``, ``execution``, ``errors``, ``environment``, ``model``.
"""

from messaging.leases.batch import LeaseMap as LeaseMap
from messaging.leases.batch import cancel_all as cancel_all
from messaging.leases.batch import renew_all as renew_all
from messaging.leases.clock import lease_time as lease_time
from messaging.leases.directory import LeaseDirectory as LeaseDirectory
from messaging.leases.directory import find_leases as find_leases
from messaging.leases.granted import GrantedLease as GrantedLease
from messaging.leases.granted import LeaseEnd as LeaseEnd
from messaging.leases.granted import LeaseInfo as LeaseInfo
from messaging.leases.landlord import Landlord as Landlord
from messaging.leases.lease import ANY as ANY
from messaging.leases.lease import FOREVER as FOREVER
from messaging.leases.lease import Grantor as Grantor
from messaging.leases.lease import Lease as Lease
from messaging.leases.lease import release as release
from messaging.leases.remote import LEASE as LEASE
from messaging.leases.remote import LEASES as LEASES
from messaging.leases.remote import SECONDS as SECONDS
from messaging.leases.remote import RemoteGrantor as RemoteGrantor
from messaging.leases.remote import lease_from_value as lease_from_value
from messaging.leases.remote import lease_operations as lease_operations
from messaging.leases.remote import lease_to_value as lease_to_value
from messaging.leases.remote import reference_of as reference_of
from messaging.leases.remote import remote_leases as remote_leases
from messaging.leases.remote import seconds_of as seconds_of
from messaging.leases.remote import value_of as value_of
from messaging.leases.renewal import LeaseRenewalManager as LeaseRenewalManager
from messaging.leases.renewal_events import DesiredExpirationListener as DesiredExpirationListener
from messaging.leases.renewal_events import LeaseListener as LeaseListener
from messaging.leases.renewal_events import LeaseRenewalEvent as LeaseRenewalEvent
from messaging.leases.serving import LeaseServer as LeaseServer
from messaging.leases.serving import LeasingServer as LeasingServer
from messaging.leases.stored_time import StoredTime as StoredTime

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
