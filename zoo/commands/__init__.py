"""The work behind each command of ``zoo``: one file a command, each returning a report."""
