"""Data: paired transport, transported projection, Transport-MQAR, group words, languages, recall, text.

Everything is generated, or part of Python, and a function of its seed.
"""

from shippo_ssm.tasks.languages import LanguageTask
from shippo_ssm.tasks.mqar import TransportMQAR
from shippo_ssm.tasks.recall import MQAR
from shippo_ssm.tasks.text import TextTask
from shippo_ssm.tasks.words import Group, WordTask

__all__ = ["MQAR", "Group", "LanguageTask", "TextTask", "TransportMQAR", "WordTask"]
