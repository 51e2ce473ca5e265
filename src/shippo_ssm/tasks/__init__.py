"""Data: paired transport, transported projection, Transport-MQAR. Everything is generated, and a function of its seed."""

from shippo_ssm.tasks.mqar import TransportMQAR

__all__ = ["TransportMQAR"]
