"""What verification finds, and the report that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field

# A report must fit into memory even when nothing of a large log is right.
_DAMAGE_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are not what was written, or are missing: where, and what is wrong."""

    path: str
    position: int
    what: str

    def __str__(self) -> str:
        return f"{self.path} at byte {self.position}: {self.what}"


@dataclass(frozen=True, slots=True)
class TopicReport:
    """One topic: how much was read and found right, and what was not.

    Commits, frames and records are those of the journal; it may still hold some that are sealed.
    """

    topic: str
    incarnation: int
    commit_count: int
    frame_count: int
    record_count: int
    byte_count: int
    sealed_file_count: int
    sealed_record_count: int
    damage: tuple[Damage, ...]
    notes: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        return not self.damage


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One consumer group: how much of its journal was read, what it says, and what was not right.

    Members and positions are as far as they are known: damage may hide some.
    """

    group: str
    incarnation: int
    commit_count: int
    member_count: int
    position_count: int
    byte_count: int
    damage: tuple[Damage, ...]
    notes: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        return not self.damage


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """A log, or one topic or group of it. Notes are worth knowing but are no damage.

    Counts are those of the topics.
    """

    root: str
    topics: tuple[TopicReport, ...]
    groups: tuple[GroupReport, ...]
    damage: tuple[Damage, ...]
    notes: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        return not self.damage

    @property
    def commit_count(self) -> int:
        return sum(topic.commit_count for topic in self.topics)

    @property
    def frame_count(self) -> int:
        return sum(topic.frame_count for topic in self.topics)

    @property
    def record_count(self) -> int:
        return sum(topic.record_count for topic in self.topics)

    @property
    def byte_count(self) -> int:
        return sum(topic.byte_count for topic in self.topics)

    @property
    def sealed_file_count(self) -> int:
        return sum(topic.sealed_file_count for topic in self.topics)

    @property
    def sealed_record_count(self) -> int:
        return sum(topic.sealed_record_count for topic in self.topics)


@dataclass(slots=True)
class Findings:
    """What has been found in one topic or group so far."""

    commit_count: int = 0
    frame_count: int = 0
    record_count: int = 0
    byte_count: int = 0
    sealed_file_count: int = 0
    sealed_record_count: int = 0
    damage: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _unlisted_count: int = 0

    def add(self, path: str, position: int, what: str) -> None:
        if len(self.damage) < _DAMAGE_MAX:
            self.damage.append(Damage(path, position, what))
        else:
            self._unlisted_count += 1

    def insert(self, place: int, damage: Damage) -> None:
        """Add damage that belongs before what was found later."""
        self.damage.insert(place, damage)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def report(self, topic: str, incarnation: int) -> TopicReport:
        return TopicReport(
            topic,
            incarnation,
            self.commit_count,
            self.frame_count,
            self.record_count,
            self.byte_count,
            self.sealed_file_count,
            self.sealed_record_count,
            tuple(self.damage),
            self._all_notes(),
        )

    def group_report(
        self, group: str, incarnation: int, *, member_count: int, position_count: int
    ) -> GroupReport:
        return GroupReport(
            group,
            incarnation,
            self.commit_count,
            member_count,
            position_count,
            self.byte_count,
            tuple(self.damage),
            self._all_notes(),
        )

    def _all_notes(self) -> tuple[str, ...]:
        if not self._unlisted_count:
            return tuple(self.notes)
        return (*self.notes, f"{self._unlisted_count} further damaged places are not listed")
