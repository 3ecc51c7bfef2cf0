"""Verification: read every byte of a log and report all that is not what was written."""

from broker.verify.findings import Damage, TopicReport, VerifyReport
from broker.verify.topic import verify_topic

__all__ = ["Damage", "TopicReport", "VerifyReport", "verify_topic"]
