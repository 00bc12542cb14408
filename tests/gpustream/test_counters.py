"""``gpustream counters check``: each line that can't be served, and why."""

from pathlib import Path

from click.testing import CliRunner, Result

from gpustream.cli import main


def check(path: Path, text: str | None) -> Result:
    if text is not None:
        path.write_text(text)
    return CliRunner().invoke(main, ["counters", "check", str(path)])


def test_a_file_that_can_all_be_served_ends_with_success(tmp_path: Path) -> None:
    result = check(tmp_path / "a.csv", "# x\nDCGM_FI_DEV_GPU_TEMP, gauge, T\nDCGM_FI_DRIVER_VERSION, label, V\n")

    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}/a.csv: 2 of 2 rows can be served\n")


def test_each_line_that_can_not_be_served_is_named_with_its_reason(tmp_path: Path) -> None:
    result = check(tmp_path / "a.csv", "DCGM_FI_DEV_GPU_TEMP,gauge,T\n\nDCGM_EXP_P2P_STATUS,gauge,P\n")

    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        f"{tmp_path}/a.csv:3: DCGM_EXP_P2P_STATUS: dcgm-exporter makes it itself",
        f"{tmp_path}/a.csv: 1 of 2 rows can be served",
    ]


def test_the_errors_of_a_file_are_named_with_their_lines_and_so_is_what_can_not_be_served(tmp_path: Path) -> None:
    rows = "A,gauge\nDCGM_EXP_P2P_STATUS,gauge,x\nDCGM_FI_DEV_GPU_TEMP,gouge,x\n"
    for more in ("", "DCGM_FI_DEV_GPU_TEMP,gauge,x\n"):
        result = check(tmp_path / "a.csv", rows + more)

        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.splitlines() == [
            f"{tmp_path}/a.csv:1: has 2 columns, not name, type and help",
            f"{tmp_path}/a.csv:2: DCGM_EXP_P2P_STATUS: dcgm-exporter makes it itself",
            f"{tmp_path}/a.csv:3: has the type 'gouge', which is none of gauge, counter, untyped, label",
        ]


def test_a_file_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    result = check(tmp_path / "a.csv", None)

    assert (result.exit_code, result.stderr) == (1, f"{tmp_path}/a.csv: can't be read: No such file or directory\n")
