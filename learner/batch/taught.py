"""Adds the scores of a teacher to the samples of a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from common.errors import LongstrideError
from learner.batch.batching import Sample
from learner.teacher.scores import TeacherScores


def with_scores(samples: Sequence[Sample], scores: Mapping[str, TeacherScores]) -> list[Sample]:
    """Return the samples with the teacher's columns.

    Args:
        scores: scores by the id of the episode.

    Raises: LongstrideError: an episode has no scores.
    """
    taught: list[Sample] = []
    for sample in samples:
        found = scores.get(sample.trajectory.episode_id)
        if found is None:
            raise LongstrideError(
                f"episode {sample.trajectory.episode_id} has no scores of algorithm.teacher"
            )
        taught.append(replace(sample, **found.columns))
    return taught
