"""Starts the teacher's component of a learner."""

import os
from typing import Any

from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.http.model_endpoint import key_from
from common.store.run_dir import RunDir
from learner.teacher.check import VocabularyCheck
from learner.teacher.endpoint import TeacherEndpoint
from learner.teacher.engine import KEY_VARIABLE, TEACHER
from learner.teacher.scorer import TeacherScorer


def start_teacher(cfg: RunConfig, run_dir: RunDir, tokenizer: Any) -> TeacherScorer | None:
    """Return the running scorer of `algorithm.teacher`; None without a teacher.

    Raises: ConfigError: the environment lacks the key of the endpoint.
    """
    teacher = cfg.algorithm.teacher
    if not teacher.is_on:
        return None
    is_own = bool(teacher.path)
    key = os.environ.get(KEY_VARIABLE, "") if is_own else ""
    if is_own and not key:
        raise ConfigError(
            f"algorithm.teacher.path={teacher.path}: only `python run.py train` starts its engine."
            " For a learner that is started alone, serve the teacher with `python run.py serve` and"
            " set algorithm.teacher.url"
        )
    if not is_own:
        key = key_from(teacher.key_env, setting="algorithm.teacher.key_env")
    endpoint = TeacherEndpoint(
        find_url=(lambda: run_dir.find_address(TEACHER) or "") if is_own else lambda: teacher.url,
        key=key,
        model="" if is_own else teacher.model,
        timeout_s=teacher.timeout_s,
        is_own=is_own,
    )
    name = f"algorithm.teacher.{f'path={teacher.path}' if is_own else f'url={teacher.url}'}"
    vocabulary = VocabularyCheck(tokenizer=tokenizer, context=cfg.actor.max_model_len, name=name)
    scorer = TeacherScorer(endpoint, vocabulary, teacher)
    scorer.start()
    return scorer
