"""Verification: read every byte of a log and report all that is not what was written."""

from broker.verify.findings import Damage, GroupReport, TopicReport, VerifyReport
from broker.verify.whole import verify_groups, verify_topics

__all__ = [
    "Damage",
    "GroupReport",
    "TopicReport",
    "VerifyReport",
    "verify_groups",
    "verify_topics",
]
