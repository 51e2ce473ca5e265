"""Data: paired transport, transported projection, Transport-MQAR, group words, languages, recall, text.

Everything is generated, or part of Python, and a function of its seed.
"""

from shippo_lab.tasks.languages import LanguageTask
from shippo_lab.tasks.mqar import TransportMQAR
from shippo_lab.tasks.plain_mqar import MQAR
from shippo_lab.tasks.text import TextTask
from shippo_lab.tasks.words import Group, WordTask

__all__ = ["MQAR", "Group", "LanguageTask", "TextTask", "TransportMQAR", "WordTask"]
