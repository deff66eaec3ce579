"""Programs that the scenarios' pods run: each file is passed as text to `python3 -c`."""
