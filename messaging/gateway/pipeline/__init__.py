"""The pipeline of a gateway's route: values in, values out; no input or output, no threads.

::

    pipeline     the steps of a route in order
    draft        a message on its way, and the parts that it became
    steps        filters and transforms, Sparkplug B payloads among them
    thinning     deadband and sampling
    batches      combining and compressing messages
    paths        fields of JSON values
    units        units of measure
"""

from messaging.gateway.pipeline.draft import Draft
from messaging.gateway.pipeline.draft import is_redelivered as is_redelivered
from messaging.gateway.pipeline.pipeline import Passed as Passed
from messaging.gateway.pipeline.pipeline import Pipeline as Pipeline
from messaging.gateway.pipeline.pipeline import PipelineError

__all__ = [
    "Draft",
    "PipelineError",
]
