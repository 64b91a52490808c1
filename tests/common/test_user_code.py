"""Laws of the user's code: an error has the place of the user's line."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.user_code import load_function


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("def f(\n", r"SyntaxError: .* \(broken_code\.py, line 1\)"),
        ("import absent_module\n", r"No module named 'absent_module' \(broken_code\.py, line 1\)"),
    ],
)
def test_error_of_a_named_module_has_no_line_of_a_library(
    code: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_code.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"{error}$"):
        load_function("algorithm.policy_loss", "broken_code:f")
