"""The interceptors of one instance: those given to ``connect``, and those in the service registry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from messaging.errors import ArgumentError
from messaging.errors.checks import check_procedure
from messaging.errors.text import SafeLog
from messaging.interception.interceptor import InboundOperation, InstanceInfo, Interceptor
from messaging.interception.processing import ProcessChain
from messaging.interception.publishing import PublishChain
from messaging.services import ServiceRegistry

if TYPE_CHECKING:
    from messaging.adapter import Adapter

logger = SafeLog(__name__)


class Interceptors:
    """The interceptors of one instance, by what they override.

    Args:
        given: to ``connect``.
        services: the registry with further ones; later changes of it have no effect.
        instance: for interceptors.
        adapter: of the instance.

    Attributes:
        publishing: those of outgoing messages; ``None`` if there are none.

    Raises:
        ArgumentError: ``given`` are no interceptors.
    """

    def __init__(
        self, given: Iterable[Interceptor], services: ServiceRegistry, instance: InstanceInfo, adapter: Adapter
    ) -> None:
        found = [*_checked(given), *_registered(services)]
        publishing = [each for each in found if _overrides(each, "intercept_publish")]
        self._processing = [each for each in found if _overrides(each, "intercept_process")]
        self._instance = instance
        self.publishing = PublishChain(publishing, instance, adapter) if publishing else None

    def processing(self, operation: InboundOperation) -> ProcessChain | None:
        """Return the interceptors of received messages; ``None`` if there are none."""
        return ProcessChain(self._processing, self._instance, operation) if self._processing else None


def _checked(given: Any) -> tuple[Interceptor, ...]:
    """Return the interceptors that ``connect`` was given.

    Raises:
        ArgumentError: they are no interceptors.
    """
    if isinstance(given, Interceptor) or not isinstance(given, Iterable):
        raise ArgumentError(f"interceptors must be a list of Interceptor, not {type(given).__name__}")
    several = tuple(given)
    for each in several:
        if not isinstance(each, Interceptor):
            raise ArgumentError(
                f"an interceptor must be an instance of messaging.interception.Interceptor, not {_kind(each)}"
            )
        _check_methods(each)
    return several


def _registered(services: ServiceRegistry) -> Iterator[Interceptor]:
    for reference in services.find(Interceptor):
        service = services.get(reference)
        if isinstance(service, Interceptor):
            try:
                _check_methods(service)
            except ArgumentError as error:
                logger.error("the service %r is skipped as Interceptor: %s", reference, error)
            else:
                yield service
        elif service is not None:
            logger.error("the service %r is registered as Interceptor, and is not one: %s", reference, _kind(service))


def _check_methods(interceptor: Interceptor) -> None:
    for name in ("intercept_publish", "intercept_process"):
        check_procedure(getattr(interceptor, name), f"{name} of {type(interceptor).__name__}")


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _overrides(interceptor: Interceptor, method: str) -> bool:
    return getattr(type(interceptor), method) is not getattr(Interceptor, method) or method in vars(interceptor)
