"""``python -m gpustream``, and what the installed command calls."""

from gpustream.cli import main

if __name__ == "__main__":
    main(prog_name="gpustream")
