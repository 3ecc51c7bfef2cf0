"""What a user may want to do when partitions come and go."""

from __future__ import annotations

from collections.abc import Collection

from broker.records import TopicPartition


class ConsumerRebalanceListener:
    """Called by `poll`, in the consumer's own thread. Override what you need."""

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        """These are about to be given up: finish their records and commit. They are still yours."""

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """These are yours now, beside those you had; seek here if you keep positions elsewhere."""

    def on_partitions_lost(self, lost: Collection[TopicPartition]) -> None:
        """These are another's already: positions in them cannot be committed any more."""
