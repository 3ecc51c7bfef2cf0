"""Consumer groups: positions, members and assignment, kept in a journal of each group's own."""

from broker.group.consumer import GroupConsumer
from broker.group.groups import Groups
from broker.group.state import Position

__all__ = ["GroupConsumer", "Groups", "Position"]
