"""``python -m protofed``."""

from protofed.cli.app import main

main()
