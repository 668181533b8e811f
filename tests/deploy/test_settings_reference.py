"""docs/run_file.md says what the settings are."""

from pathlib import Path

from deploy.settings_reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "run_file.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run python -m deploy.settings_reference > docs/run_file.md"


def test_every_setting_has_a_meaning_and_a_type() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| `")]

    assert len(rows) > 80
    assert all(cell.strip() for row in rows for cell in row.replace("\\|", "/").split("|")[1:-1])
    assert not any("| table |" in row for row in rows)
