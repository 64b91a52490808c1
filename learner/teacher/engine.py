"""Names that the launcher and the learner share about the engine of `algorithm.teacher.path`."""

TEACHER = "teacher"  # Role of the engine.
# Environment variable with the key of the engine. It is in no file.
KEY_VARIABLE = "LONGSTRIDE_TEACHER_KEY"
