"""Consumer groups: positions, members and assignment, kept in a journal of each group's own."""

from broker.group.consumer import GroupConsumer
from broker.group.description import GroupDescription, MemberDescription, PartitionLag
from broker.group.groups import Groups
from broker.group.reset import Reset
from broker.group.state import Position

__all__ = [
    "GroupConsumer",
    "GroupDescription",
    "Groups",
    "MemberDescription",
    "PartitionLag",
    "Position",
    "Reset",
]
